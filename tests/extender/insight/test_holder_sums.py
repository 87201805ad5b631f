"""GPU-hours and costs of pods, and their sums."""

from dataclasses import replace

from extender.answers.holding import SumsAnswer
from extender.core.devices.readings import DeviceInfo
from extender.core.nodes.inventory import PodRecord
from extender.insight.holder_sums import HeldDevice, Holder, Sums

NOTHING = SumsAnswer(
    pods=0,
    gpus=0,
    gpus_idle=0,
    gpu_hours=0.0,
    gpu_hours_used=0.0,
    gpu_hours_idle=0.0,
    cost=None,
    cost_used=None,
    cost_idle=None,
    unpriced_pods=0,
)


def device(idle_seconds: float, profile: str = "") -> HeldDevice:
    return HeldDevice(
        row=0,
        info=DeviceInfo(node="n", uuid="GPU-0", mig_profile=profile),
        idle_seconds=idle_seconds,
        is_at_least=False,
        tenants=1,
    )


IDLE = device(1800.0), device(3600.0, "1g.10gb")
BUSY = device(0.0), device(0.0, "1g.10gb")

HOLDER = Holder(
    record=PodRecord(uid="uid-p", namespace="team", name="p"),
    model="H100",
    devices=IDLE + BUSY,
    missing=2,
    missing_instances=1,
    cards=3.5,
    idle=IDLE,
    idle_seconds=1800.0,
    held_seconds=7200.0,
    price=2.0,
)


def test_gpus_and_mig_instances_of_a_pod_are_counted_apart() -> None:
    assert (HOLDER.size, HOLDER.gpus, HOLDER.instances) == (6, 3, 3)
    assert (HOLDER.gpus_idle, HOLDER.instances_idle) == (1, 1)


def test_the_idle_hours_are_those_of_the_idle_devices() -> None:
    assert (HOLDER.gpu_hours, HOLDER.gpu_hours_idle) == (7.0, 3.5 * 1.5 / 6)
    assert (HOLDER.cost, HOLDER.cost_idle, HOLDER.cost_used) == (14.0, 1.75, 12.25)
    assert replace(HOLDER, held_seconds=60.0).cost_used == 0.0
    free = replace(HOLDER, price=None)
    assert (free.cost, free.cost_idle, free.cost_used) == (None, None, None)


def test_a_pod_is_idle_if_all_its_devices_are() -> None:
    assert not HOLDER.is_idle
    assert not replace(HOLDER, devices=IDLE).is_idle  # two more are missing
    assert replace(HOLDER, devices=IDLE, missing=0).is_idle


def test_sums_are_over_all_pods_and_costs_over_those_with_a_price() -> None:
    sums = Sums()
    assert sums.view() == NOTHING

    sums.add(replace(HOLDER, price=None))
    assert (sums.view().cost, sums.view().cost_used, sums.view().cost_idle) == (None, None, None)
    sums.add(HOLDER)
    sums.add(HOLDER)

    assert sums.view() == SumsAnswer(
        pods=3,
        gpus=9,
        gpus_idle=3,
        mig_instances=9,
        mig_instances_idle=3,
        gpu_hours=21.0,
        gpu_hours_used=18.375,
        gpu_hours_idle=2.625,
        cost=28.0,
        cost_used=24.5,
        cost_idle=3.5,
        unpriced_pods=1,
    )


def test_idle_hours_beyond_those_held_leave_none_that_were_used() -> None:
    sums = Sums()
    sums.add(replace(HOLDER, held_seconds=60.0))

    assert (sums.view().gpu_hours_used, sums.view().cost_used) == (0.0, 0.0)
