import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from agent.gpu.backend import Call, Code, ProcessList, ProcessUse, XidEvent
from agent.gpu.session import Cadence
from agent.options import Options
from agent.report.contract import Problem, Report, Tenant
from agent.sampler import Sampler
from agent.tenants.attribution import DeviceTenants, DeviceUsage
from extender.core.devices.readings import Signal
from testkit.agent.scripted import ScriptedBackend, ScriptedCard, migs

LIMIT = 0.1
NOW = 1_800_000_000.0

OPTIONS = Options(
    node="gpu-7",
    period_seconds=0.25,
    cadence=Cadence(slow_seconds=0.5, retry_seconds=1.0, start_limit_seconds=LIMIT),
    call_seconds=LIMIT,
    liveness_seconds=5.0,
)


class Clock:
    """Real time plus an offset that the test advances."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead

    def wall(self) -> float:
        """Return seconds since the epoch, which pass only as the test says."""
        return NOW + self.ahead


class Rig:
    def __init__(self, count: int = 3) -> None:
        self.cards = [ScriptedCard(f"GPU-{number}") for number in range(count)]
        self.backend = ScriptedBackend(*self.cards)
        self.clock = Clock()
        self.sampler = self.make()

    def make(self, tenant_source: "Kubelet | None" = None) -> Sampler:
        return Sampler(
            self.backend, OPTIONS, tenant_source, clock=self.clock.wall, monotonic=self.clock
        )


class Kubelet:
    """A source of tenants with one pod that holds every device."""

    def __init__(self) -> None:
        self.requested: tuple[DeviceUsage, ...] = ()
        self.holders_problem: Problem | None = None
        self.processes_problem: Problem | None = None

    def attribute(self, usages: tuple[DeviceUsage, ...]) -> tuple[DeviceTenants, ...]:
        self.requested = usages
        tenant = Tenant(namespace="ml", pod="train-0")
        return tuple(
            DeviceTenants(allocated_to=(tenant,), used_by=use.processes, foreign=None)
            for use in usages
        )


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.backend.released.set()
    rig.sampler.close()


async def until(sampler: Sampler, condition: Callable[[Report], bool]) -> Report:
    """Wait for a report that satisfies a condition, and return it."""
    async with asyncio.timeout(30):
        report = sampler.latest.report
        while report is None or not condition(report):
            report = await sampler.latest.wait_newer(0 if report is None else report.sequence)
    return report


def device(report: Report, uuid: str) -> int:
    return [one.uuid for one in report.devices].index(uuid)


async def test_a_report_contains_the_read_values(rig: Rig) -> None:
    report = await rig.sampler.sample()

    assert (report.node, report.sequence, report.problem) == ("gpu-7", 1, None)
    assert report.driver_version == "580.95.05"
    assert report.signals[Signal.POWER] == (80.0, 80.0, 80.0)
    assert {one.age_seconds for one in report.devices} == {0.0}
    assert (await rig.sampler.sample()).sequence == 2


async def test_a_report_counts_processes_if_the_driver_lists_them(rig: Rig) -> None:
    two = tuple(ProcessUse(pid=pid, memory_bytes=1 << 30) for pid in (7, 8))
    rig.cards[1].processes[ProcessList.COMPUTE] = two

    report = await rig.sampler.sample()

    assert report.signals[Signal.PROCESSES] == (0.0, 2.0, 0.0)
    assert [len(one.used_by or ()) for one in report.devices] == [0, 2, 0]


async def test_a_waiting_task_gets_the_next_report(rig: Rig) -> None:
    first = await rig.sampler.sample()
    waiting = asyncio.create_task(rig.sampler.latest.wait_newer(first.sequence))
    await asyncio.sleep(0)
    assert not waiting.done()

    second = await rig.sampler.sample()

    assert await waiting is second


async def test_a_late_task_gets_only_the_latest_report(rig: Rig) -> None:
    reports = [await rig.sampler.sample() for _ in range(3)]

    assert await rig.sampler.latest.wait_newer(1) is reports[-1]


async def test_sampler_samples_once_per_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = NOW
    waits: list[float] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def hurry(seconds: float, *rest: Any, **options: Any) -> asyncio.TimerHandle:
        nonlocal now
        if rest[0] != sampler._wake.set:
            return call_later(seconds, *rest, **options)
        now += seconds
        waits.append(seconds)
        return call_later(0.0, *rest, **options)

    monkeypatch.setattr(loop, "call_later", hurry)
    backend = ScriptedBackend(ScriptedCard("GPU-0"))
    with contextlib.closing(Sampler(backend, OPTIONS, monotonic=lambda: now)) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(sampler, lambda report: report.sequence >= 5)
        running.cancel()

    assert waits[:4] == pytest.approx([OPTIONS.period_seconds] * 4)


async def test_a_hung_card_becomes_stale_and_others_stay_fresh(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.backend.hangs.add((Call.POWER, "GPU-1"))

    await rig.sampler.sample()
    rig.clock.ahead += 4.0
    report = await rig.sampler.sample()

    hung = report.devices[device(report, "GPU-1")]
    assert hung.problem is not None
    assert hung.problem.code == "Hung"
    assert "did not return within 0.1 s" in hung.problem.text
    assert hung.age_seconds == 4.0, "stale, and says so"
    assert hung.verdict is not None
    assert hung.verdict.is_idle is None
    fresh = report.devices[device(report, "GPU-2")]
    assert fresh.age_seconds == 0.0
    assert fresh.problem is None
    assert {name: count for name, count in rig.sampler.hung.items() if count} == {"power": 1}
    assert rig.sampler.is_alive


async def test_a_call_that_never_hung_counts_0_from_the_first_pass(rig: Rig) -> None:
    await rig.sampler.sample()

    assert {"nvmlInit", "topology", "power"} <= rig.sampler.hung.keys()
    assert set(rig.sampler.hung.values()) == {0}


async def test_a_card_recovers_when_its_hung_call_returns(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.backend.hangs.add((Call.POWER, "GPU-1"))
    running = asyncio.create_task(rig.sampler.run())
    await until(rig.sampler, lambda report: report.devices[1].problem is not None)

    rig.backend.hangs.clear()
    rig.backend.released.set()

    await until(rig.sampler, lambda report: report.devices[1].problem is None)
    running.cancel()


@pytest.mark.parametrize("call", [Call.POWER, "card", "instances", "topology"])
@pytest.mark.parametrize("count", [1, 2, 8])
async def test_hung_calls_of_all_cards_are_reported_and_do_not_fail_liveness(
    count: int, call: str
) -> None:
    rig = Rig(count)
    if call == Call.POWER:
        await rig.sampler.sample()
    rig.backend.hangs |= {(call, card.uuid) for card in rig.cards}

    for _ in range(count + 2):
        await rig.sampler.sample()
        rig.clock.ahead += OPTIONS.liveness_seconds + 1
    report = await rig.sampler.sample()

    assert report.problem is not None, "nothing new is seen"
    assert report.problem.code == "Hung"
    assert "a new container does not help" in report.problem.text
    assert rig.sampler.is_alive
    assert sum(rig.sampler.hung.values()) == count, "each card is called once"

    rig.backend.hangs.clear()
    rig.backend.released.set()
    running = asyncio.create_task(rig.sampler.run())
    await until(rig.sampler, lambda report: report.problem is None)
    running.cancel()
    rig.sampler.close()


@pytest.mark.parametrize("call", [Call.POWER, "card", "instances"])
async def test_many_slow_cards_do_not_block_a_healthy_one(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(8)
    slow = {card.uuid for card in rig.cards[:7]}
    answer = rig.backend._answer

    def answer_late(name: str, uuid: str = "") -> None:
        if name == call and uuid in slow:
            time.sleep(1.5 * LIMIT)
        answer(name, uuid)

    monkeypatch.setattr(rig.backend, "_answer", answer_late)
    running = asyncio.create_task(rig.sampler.run())

    def is_read(report: Report, at: float) -> bool:
        ages = {one.uuid: one.age_seconds for one in report.devices}
        return ages.get("GPU-7") == 0.0 and rig.clock.ahead == at

    for at in range(5):
        rig.clock.ahead = float(at)
        await until(rig.sampler, partial(is_read, at=at))
    running.cancel()
    rig.sampler.close()


async def test_a_hung_call_of_the_library_does_not_stop_reads_of_cards(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.backend.hangs.add(("count", ""))
    rig.clock.ahead += 1.0
    await rig.sampler.sample()
    before = rig.backend.calls[Call.POWER, "GPU-2"]

    report = await rig.sampler.sample()

    assert rig.backend.calls[Call.POWER, "GPU-2"] == before + 1
    assert report.devices[2].problem is None
    assert rig.backend.calls["count", ""] == 2, "a hung call is not repeated"


async def test_xids_of_other_cards_are_watched_while_one_hangs(rig: Rig) -> None:
    rig.backend.hangs.add(("card", "GPU-1"))
    running = asyncio.create_task(rig.sampler.run())

    await until(rig.sampler, lambda _: rig.backend.watched == {"GPU-0", "GPU-2"})
    running.cancel()


async def test_a_hung_card_besides_a_working_one_never_fails_liveness(rig: Rig) -> None:
    rig.cards[0].instances = ()
    rig.cards.pop()
    rig.backend.cards.pop()
    await rig.sampler.sample()
    rig.backend.hangs.add((Call.POWER, "GPU-1"))
    problems = []
    for _ in range(3):
        problems.append((await rig.sampler.sample()).problem)
        rig.clock.ahead += OPTIONS.liveness_seconds + 1

    assert problems[-1] is None
    assert rig.sampler.is_alive


async def test_a_hung_start_is_reported_and_does_not_fail_liveness(rig: Rig) -> None:
    rig.backend.hangs.add(("start", ""))

    first = await rig.sampler.sample()
    await rig.sampler.sample()

    assert first.problem is not None
    assert "nvmlInit did not return" in first.problem.text
    assert rig.backend.calls["start", ""] == 1, "it is not started again while it hangs"
    rig.clock.ahead += OPTIONS.liveness_seconds + 1
    await rig.sampler.sample()
    assert rig.sampler.is_alive
    rig.backend.released.set()
    rig.backend.hangs.clear()
    running = asyncio.create_task(rig.sampler.run())
    await until(rig.sampler, lambda report: report.problem is None)
    running.cancel()
    assert rig.sampler.is_alive


async def test_a_missing_driver_never_fails_liveness(rig: Rig) -> None:
    rig.backend.faults["start", ""] = Code.LibraryNotFound
    problems = []
    for _ in range(5):
        problems.append((await rig.sampler.sample()).problem)
        rig.clock.ahead += 100

    assert problems[-1] is not None
    assert rig.sampler.is_alive


async def test_a_container_that_lost_its_devices_fails_liveness_in_time(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.backend.faults[Call.POWER, "GPU-0"] = Code.LibRmVersionMismatch
    rig.backend.faults["start", ""] = Code.LibRmVersionMismatch

    await rig.sampler.sample()
    assert rig.sampler.is_alive
    rig.clock.ahead += OPTIONS.liveness_seconds + 1
    await rig.sampler.sample()

    assert not rig.sampler.is_alive


async def test_an_xid_is_reported_and_evaluated_at_once(rig: Rig) -> None:
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
    assert report.devices[0].xid_age_seconds is None


@pytest.mark.parametrize(("xid", "is_read"), [(154, True), (48, False)])
async def test_a_changed_recovery_action_is_read_at_once(
    rig: Rig, xid: int, *, is_read: bool
) -> None:
    options = replace(OPTIONS, period_seconds=60.0, cadence=Cadence(slow_seconds=3600.0))
    sampler = Sampler(rig.backend, options, monotonic=rig.clock)
    running = asyncio.create_task(sampler.run())
    await until(sampler, lambda _: True)
    before = rig.backend.calls[Call.FIELDS, "GPU-1"]

    rig.backend.happen(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=xid))
    await until(sampler, lambda report: Signal.XID in report.signals)
    running.cancel()
    sampler.close()

    assert (rig.backend.calls[Call.FIELDS, "GPU-1"] > before) is is_read


async def test_many_xids_share_a_pass_and_a_log_line(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = Sampler(rig.backend, replace(OPTIONS, period_seconds=60.0), monotonic=rig.clock)
    running = asyncio.create_task(sampler.run())
    await until(sampler, lambda _: True)

    for _ in range(1000):
        sampler._note_xid(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=31))
        await asyncio.sleep(0)
    await until(sampler, lambda report: Signal.XID in report.signals)
    running.cancel()
    sampler.close()

    assert sampler.passes < 10
    assert sampler.xids.counts == {("GPU-1", 31): 1000}
    assert [record.message for record in caplog.records].count("XID error") == 1


@pytest.mark.parametrize(
    ("at", "age"),
    [
        pytest.param(NOW - 42.0, 42.0, id="earlier"),
        pytest.param(NOW + 42.0, 0.0, id="before-the-clock-was-set-back"),
    ],
)
async def test_a_report_contains_the_age_of_an_xid(at: float, age: float) -> None:
    backend = ScriptedBackend(ScriptedCard("GPU-0"), ScriptedCard("GPU-1"))
    with contextlib.closing(Sampler(backend, OPTIONS, clock=lambda: NOW)) as sampler:
        sampler.xids.add(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=48), at)

        report = await sampler.sample()

    assert [one.xid_age_seconds for one in report.devices] == [None, age]


async def test_an_xid_that_excludes_the_node_affects_every_card(rig: Rig) -> None:
    await rig.sampler.sample()
    rig.sampler.xids.add(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=79), NOW)

    report = await rig.sampler.sample()

    actions = [one.verdict.action for one in report.devices if one.verdict is not None]
    causes = [one.verdict.cause for one in report.devices if one.verdict is not None]
    assert actions == ["excluded", "exclude-node", "excluded"]
    assert causes[0] == "another GPU of its node: XID 79: fallen off the bus"


async def test_an_xid_of_an_instance_affects_only_that_instance(rig: Rig) -> None:
    rig.cards[0].instances = migs((1, "3g.40gb"), (2, "3g.40gb"))
    await rig.sampler.sample()
    rig.sampler.xids.add(XidEvent(uuid="GPU-0", gpu_instance_id=2, xid=94), NOW)

    report = await rig.sampler.sample()

    assert report.signals[Signal.XID] == (None, 94.0, None, None)


async def test_a_failed_event_wait_is_restarted(rig: Rig) -> None:
    running = asyncio.create_task(rig.sampler.run())
    await until(rig.sampler, lambda _: len(rig.backend.watched) == 3)
    rig.backend.happen(Code.Unknown)
    await until(rig.sampler, lambda _: rig.backend.calls["events", "GPU-0"] > 1)

    rig.backend.happen(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=43))

    await until(rig.sampler, lambda report: Signal.XID in report.signals)
    await until(rig.sampler, lambda _: not any(rig.sampler.watcher.problems.values()))
    running.cancel()


async def test_tenants_are_attributed_from_driver_data_and_reported(rig: Rig) -> None:
    rig.cards[1].instances = migs((5, "1g.10gb"))
    rig.cards[2].minor = 0
    kubelet = Kubelet()
    kubelet.processes_problem = Problem(code="NoHostPid", text="set hostPID")
    sampler = rig.make(kubelet)

    report = await sampler.sample()
    sampler.close()

    assert [use.device.key for use in kubelet.requested] == [
        ("GPU-0", ""),
        ("GPU-1", "5"),
        ("GPU-2", ""),
    ]
    assert kubelet.requested[1].device.mig_uuids == ("MIG-5",)
    assert [use.device.index for use in kubelet.requested] == [0, 1, 0]
    assert kubelet.requested[0].memory_used_bytes == 0
    assert report.devices[0].allocated_to == (Tenant(namespace="ml", pod="train-0"),)
    assert report.processes_problem == kubelet.processes_problem


async def test_without_a_kubelet_holders_are_unknown(rig: Rig) -> None:
    report = await rig.sampler.sample()

    assert all(one.allocated_to is None for one in report.devices)
    assert all(one.used_by == () for one in report.devices)


async def test_an_instance_reports_no_power(rig: Rig) -> None:
    rig.cards[0].instances = migs((1, "3g.40gb"))

    report = await rig.sampler.sample()

    assert report.signals[Signal.POWER] == (None, 80.0, 80.0)
    assert report.signals[Signal.POWER_LIMIT][0] is None
    assert report.signals[Signal.TEMPERATURE] == (40.0, 40.0, 40.0)


async def test_close_ends_the_threads(rig: Rig) -> None:
    before = threading.active_count()
    sampler = rig.make()
    await sampler.sample()
    assert threading.active_count() > before

    sampler.close()

    async with asyncio.timeout(30):
        while threading.active_count() > before:
            await asyncio.sleep(0.01)
