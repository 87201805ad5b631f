"""Queries and parsing that a round saves, without missing a change."""

import pytest

from extender.core.devices.readings import DeviceKey, Signal
from testkit.collecting import NOW, CollectorState
from testkit.prometheus.fake import FakePrometheus, Series, util


def devices_questions(fake: FakePrometheus) -> int:
    """Return the number of queries for the devices."""
    return sum("modelName" in request for request in fake.queries)


async def test_only_the_ages_of_known_devices_are_queried(fake: FakePrometheus) -> None:
    fake.series = [util(number, at=NOW, UUID=f"GPU-{number}") for number in (1, 2)]
    state = CollectorState(fake.url)
    await state.round(NOW)
    fake.series = [util(number + 10, at=NOW + 15, UUID=f"GPU-{number}") for number in (1, 2)]
    fake.clock = lambda: NOW + 20

    found = await state.round(NOW + 20)

    assert devices_questions(fake) == 1
    assert found.measured_at.tolist() == [NOW + 15 - 30] * 2  # minus the exporter's interval
    assert state.value(Signal.GPU_UTILIZATION, "GPU-2") == pytest.approx(0.12)


async def test_devices_are_queried_again_when_another_node_has_them(fake: FakePrometheus) -> None:
    fake.series = [util(1)]
    state = CollectorState(fake.url)
    await state.round(NOW)
    fake.series = [util(1, Hostname="gpu-2")]

    await state.round(NOW + 60)

    assert state.rows[0].node == "gpu-2"


async def test_unmatched_series_are_queried_in_every_round(fake: FakePrometheus) -> None:
    fake.series = [util(1), util(2, UUID="GPU-2", Hostname="stranger")]
    state = CollectorState(fake.url)
    await state.round(NOW)

    found = await state.round(NOW + 10)

    assert devices_questions(fake) == 2
    assert found.unmatched_series == 1


async def test_changed_pods_are_found_though_equal_answers_are_parsed_once(
    fake: FakePrometheus,
) -> None:
    def held_by(pod: str) -> Series:
        return util(1, exported_pod=pod, exported_namespace="team", pod="exporter")

    state = CollectorState(fake.url)
    tenants = []
    for pod in ("a", "a", "b"):
        fake.series = [held_by(pod)]
        tenants.append((await state.round(NOW)).tenants)

    key = DeviceKey(("GPU-1", ""))
    assert tenants == [{key: ("team/a",)}, {}, {key: ("team/b",)}]
