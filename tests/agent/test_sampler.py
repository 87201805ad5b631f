import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from agent.backend import Call, Code, ProcessList, ProcessUse, XidEvent
from agent.options import Options
from agent.report import Problem, Report, Tenant
from agent.sampler import Sampler
from agent.session import Cadence
from agent.tenants import DeviceTenants, DeviceUse
from extender.core.readings import Signal
from tests.agent.scripted import ScriptedBackend, ScriptedCard, migs

LIMIT = 0.1

OPTIONS = Options(
    node="gpu-7",
    period_seconds=0.25,
    cadence=Cadence(slow_seconds=0.5, retry_seconds=1.0, start_limit_seconds=LIMIT),
    call_seconds=LIMIT,
    hung_calls=2,
    liveness_seconds=5.0,
)


class Clock:
    """Seconds that pass when the test says so, on top of real ones."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Rig:
    def __init__(self, count: int = 3) -> None:
        self.cards = [ScriptedCard(f"GPU-{number}") for number in range(count)]
        self.backend = ScriptedBackend(*self.cards)
        self.clock = Clock()
        self.sampler = self.make()

    def make(self, tenancy: "Kubelet | None" = None) -> Sampler:
        return Sampler(self.backend, OPTIONS, tenancy, monotonic=self.clock)


class Kubelet:
    """Knows one pod that holds everything."""

    def __init__(self) -> None:
        self.asked: tuple[DeviceUse, ...] = ()
        self.holders_problem: Problem | None = None
        self.processes_problem: Problem | None = None

    def attribute(self, uses: tuple[DeviceUse, ...]) -> tuple[DeviceTenants, ...]:
        self.asked = uses
        tenant = Tenant(namespace="ml", pod="train-0")
        return tuple(
            DeviceTenants(allocated_to=(tenant,), used_by=use.processes, foreign=None)
            for use in uses
        )


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.backend.released.set()
    rig.sampler.close()


async def until(sampler: Sampler, condition: Callable[[Report], bool]) -> Report:
    """Wait for a report of a running sampler."""
    async with asyncio.timeout(30):
        report = sampler.latest.report
        while report is None or not condition(report):
            report = await sampler.latest.newer(0 if report is None else report.sequence)
    return report


def device(report: Report, uuid: str) -> int:
    return [one.uuid for one in report.devices].index(uuid)


async def test_a_report_says_what_was_read(rig: Rig) -> None:
    report = await rig.sampler.sample()

    assert (report.node, report.sequence, report.problem) == ("gpu-7", 1, None)
    assert report.driver_version == "580.95.05"
    assert report.signals[Signal.POWER] == (80.0, 80.0, 80.0)
    assert all(one.age_seconds is not None and one.age_seconds < 5 for one in report.devices)
    assert (await rig.sampler.sample()).sequence == 2


async def test_a_report_counts_the_processes_of_each_device_where_the_driver_lists_them(
    rig: Rig,
) -> None:
    two = tuple(ProcessUse(pid=pid, memory_bytes=1 << 30) for pid in (7, 8))
    rig.cards[1].processes[ProcessList.COMPUTE] = two

    report = await rig.sampler.sample()

    assert report.signals[Signal.PROCESSES] == (0.0, 2.0, 0.0)
    assert [len(one.used_by or ()) for one in report.devices] == [0, 2, 0]


async def test_who_waits_gets_the_next_report(rig: Rig) -> None:
    first = await rig.sampler.sample()
    waiting = asyncio.create_task(rig.sampler.latest.newer(first.sequence))
    await asyncio.sleep(0)
    assert not waiting.done()

    second = await rig.sampler.sample()

    assert await waiting is second


async def test_who_is_late_gets_the_latest_and_none_of_those_between(rig: Rig) -> None:
    for _ in range(3):
        latest = await rig.sampler.sample()

    assert await rig.sampler.latest.newer(1) is latest


async def test_it_samples_as_often_as_it_is_told(rig: Rig) -> None:
    running = asyncio.create_task(rig.sampler.run())
    started = time.monotonic()
    await until(rig.sampler, lambda report: report.sequence >= 5)
    took = time.monotonic() - started
    running.cancel()

    assert took >= 4 * OPTIONS.period_seconds * 0.95


async def test_a_card_whose_call_hangs_grows_old_and_the_others_stay_fresh(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.backend.hangs.add((Call.POWER, "GPU-1"))

    report = await rig.sampler.sample()
    await asyncio.sleep(0.05)
    report = await rig.sampler.sample()

    hung = report.devices[device(report, "GPU-1")]
    assert hung.problem is not None
    assert hung.problem.code == "Hung"
    assert "has not returned for 0.1 s" in hung.problem.text
    assert hung.age_seconds is not None
    assert hung.age_seconds >= 0.05, "stale, and says so"
    assert hung.verdict is not None
    assert hung.verdict.is_idle is None
    fresh = report.devices[device(report, "GPU-2")]
    assert fresh.age_seconds is not None
    assert fresh.age_seconds < hung.age_seconds
    assert fresh.problem is None
    assert {name: count for name, count in rig.sampler.hung.items() if count} == {"power": 1}
    assert rig.sampler.is_alive


async def test_a_call_that_never_hung_is_counted_as_0_from_the_first_pass_on(rig: Rig) -> None:
    await rig.sampler.sample()

    assert {"nvmlInit", "topology", "power"} <= rig.sampler.hung.keys()
    assert set(rig.sampler.hung.values()) == {0}


async def test_a_call_that_returns_after_all_mends_its_card(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.backend.hangs.add((Call.POWER, "GPU-1"))
    running = asyncio.create_task(rig.sampler.run())
    await until(rig.sampler, lambda report: report.devices[1].problem is not None)

    rig.backend.hangs.clear()
    rig.backend.released.set()

    await until(rig.sampler, lambda report: report.devices[1].problem is None)
    running.cancel()


async def test_when_too_many_calls_hang_liveness_fails_after_a_while(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.backend.hangs |= {(Call.POWER, card.uuid) for card in rig.cards}

    report = await rig.sampler.sample()

    assert report.problem is not None
    assert report.problem.code == "Hung"
    assert "start anew" in report.problem.text
    assert rig.sampler.is_alive, "not at once"
    assert sum(rig.sampler.hung.values()) == OPTIONS.hung_calls
    rig.clock.ahead += OPTIONS.liveness_seconds + 1
    assert not rig.sampler.is_alive


@pytest.mark.parametrize("call", [Call.POWER, "card"])
@pytest.mark.parametrize("count", [1, 2])
async def test_where_the_calls_of_every_card_hang_liveness_fails_after_a_while(
    count: int, call: str
) -> None:
    rig = Rig(count)
    sampler = Sampler(rig.backend, replace(OPTIONS, hung_calls=3), monotonic=rig.clock)
    if call == Call.POWER:
        await sampler.sample()
    rig.backend.hangs |= {(call, card.uuid) for card in rig.cards}

    report = await sampler.sample()

    assert report.problem is not None, "nothing new is seen"
    assert report.problem.code == "Hung"
    assert sampler.is_alive, "not at once"
    rig.clock.ahead += OPTIONS.liveness_seconds + 1
    await sampler.sample()
    assert not sampler.is_alive

    rig.backend.hangs.clear()
    rig.backend.released.set()
    running = asyncio.create_task(sampler.run())
    await until(sampler, lambda report: report.problem is None)
    running.cancel()
    assert sampler.is_alive
    sampler.close()


async def test_one_card_that_hangs_beside_another_never_fails_liveness(rig: Rig) -> None:
    rig.cards[0].instances = ()  # MIG, and no instance made yet: nothing to read, and nothing hangs
    rig.cards.pop()
    rig.backend.cards.pop()
    await rig.sampler.sample()
    rig.backend.hangs.add((Call.POWER, "GPU-1"))
    for _ in range(3):
        report = await rig.sampler.sample()
        rig.clock.ahead += OPTIONS.liveness_seconds + 1

    assert report.problem is None
    assert rig.sampler.is_alive


async def test_a_library_that_hangs_at_the_start_fails_liveness_after_a_while(rig: Rig) -> None:
    rig.backend.hangs.add(("start", ""))

    first = await rig.sampler.sample()
    await rig.sampler.sample()

    assert first.problem is not None
    assert "nvmlInit has not returned" in first.problem.text
    assert rig.backend.calls["start", ""] == 1, "it is not started again while it hangs"
    rig.clock.ahead += OPTIONS.liveness_seconds + 1
    assert not rig.sampler.is_alive
    rig.backend.released.set()
    rig.backend.hangs.clear()
    running = asyncio.create_task(rig.sampler.run())
    await until(rig.sampler, lambda report: report.problem is None)
    running.cancel()
    assert rig.sampler.is_alive


async def test_a_missing_driver_never_fails_liveness(rig: Rig) -> None:
    rig.backend.faults["start", ""] = Code.LibraryNotFound
    for _ in range(5):
        report = await rig.sampler.sample()
        rig.clock.ahead += 100

    assert report.problem is not None
    assert rig.sampler.is_alive


async def test_a_container_that_lost_its_devices_fails_liveness_after_a_while(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.backend.faults[Call.POWER, "GPU-0"] = Code.LibRmVersionMismatch
    rig.backend.faults["start", ""] = Code.LibRmVersionMismatch

    await rig.sampler.sample()
    assert rig.sampler.is_alive
    rig.clock.ahead += OPTIONS.liveness_seconds + 1
    await rig.sampler.sample()

    assert not rig.sampler.is_alive


async def test_an_xid_is_reported_at_once_and_judged(rig: Rig) -> None:
    slow = replace(OPTIONS, period_seconds=60.0)
    sampler = Sampler(rig.backend, slow, monotonic=rig.clock)
    running = asyncio.create_task(sampler.run())
    await until(sampler, lambda _: True)

    rig.backend.happen(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=48))
    report = await until(sampler, lambda report: Signal.XID in report.signals)
    running.cancel()
    sampler.close()

    assert report.signals[Signal.XID] == (None, 48.0, None)
    verdict = report.devices[1].verdict
    assert verdict is not None
    assert (verdict.action, verdict.cause) == ("exclude", "XID 48: double-bit memory error")
    assert report.devices[1].xid_age_seconds is not None


async def test_an_xid_that_excludes_the_node_speaks_against_every_card(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.sampler.xids.add(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=79), time.time())

    report = await rig.sampler.sample()

    actions = [one.verdict.action for one in report.devices if one.verdict is not None]
    causes = [one.verdict.cause for one in report.devices if one.verdict is not None]
    assert actions == ["exclude", "exclude-node", "exclude"]
    assert causes[0] == "another GPU of its node: XID 79: fallen off the bus"


async def test_an_xid_of_an_instance_is_that_instances(rig: Rig) -> None:
    rig.cards[0].instances = migs((1, "3g.40gb"), (2, "3g.40gb"))
    await rig.sampler.sample()
    rig.sampler.xids.add(XidEvent(uuid="GPU-0", gpu_instance_id=2, xid=94), time.time())

    report = await rig.sampler.sample()

    assert report.signals[Signal.XID] == (None, 94.0, None, None)


async def test_events_that_cannot_be_waited_for_any_more_are_waited_for_again(rig: Rig) -> None:
    running = asyncio.create_task(rig.sampler.run())
    await until(rig.sampler, lambda _: len(rig.backend.watched) == 3)
    rig.backend.happen(Code.Unknown)
    await until(rig.sampler, lambda _: rig.backend.calls["events", "GPU-0"] > 1)

    rig.backend.happen(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=43))

    await until(rig.sampler, lambda report: Signal.XID in report.signals)
    running.cancel()
    assert rig.sampler.watcher.problem == ""


async def test_tenants_are_asked_by_what_the_driver_says_and_told(rig: Rig) -> None:
    rig.cards[1].instances = migs((5, "1g.10gb"))
    kubelet = Kubelet()
    kubelet.processes_problem = Problem(code="NoHostPid", text="set hostPID")
    sampler = rig.make(kubelet)

    report = await sampler.sample()
    sampler.close()

    assert [use.device.key for use in kubelet.asked] == [
        ("GPU-0", ""),
        ("GPU-1", "5"),
        ("GPU-2", ""),
    ]
    assert kubelet.asked[1].device.mig_uuids == ("MIG-5",)
    assert kubelet.asked[0].memory_used_bytes == 0
    assert report.devices[0].allocated_to == (Tenant(namespace="ml", pod="train-0"),)
    assert report.processes_problem == kubelet.processes_problem


async def test_without_a_kubelet_it_is_unknown_who_holds_what(rig: Rig) -> None:
    report = await rig.sampler.sample()

    assert all(one.allocated_to is None for one in report.devices)
    assert all(one.used_by == () for one in report.devices)


async def test_an_instance_reports_no_power_for_it_has_none_of_its_own(rig: Rig) -> None:
    rig.cards[0].instances = migs((1, "3g.40gb"))

    report = await rig.sampler.sample()

    assert report.signals[Signal.POWER] == (None, 80.0, 80.0)
    assert report.signals[Signal.TEMPERATURE] == (40.0, 40.0, 40.0)


async def test_threads_end_when_it_is_closed(rig: Rig) -> None:
    before = threading.active_count()
    sampler = rig.make()
    await sampler.sample()
    assert threading.active_count() > before

    sampler.close()

    async with asyncio.timeout(30):
        while threading.active_count() > before:
            await asyncio.sleep(0.01)
