import math
import struct
from typing import Any

import pytest
from msgspec.structs import replace

from agent.options import ReportOptions
from agent.push.updates import _MEAN_SECONDS, _SHARES_SECONDS, Digest, DigestBuilder, UpdateBuilder
from agent.report.contract import (
    AGE,
    MAX_PROCESSES,
    MAX_UPDATE_BYTES,
    MEAN,
    MEAN_SQUARE,
    XID_AGE,
    Device,
    Foreign,
    ForeignProcess,
    Place,
    Problem,
    Process,
    Report,
    Tenant,
    Update,
    Verdict,
    decode_update,
    frame,
)
from agent.tenants.foreign import Threshold
from extender.core.devices.readings import Signal
from extender.core.policy import Thresholds

KEY = ("GPU-0", "")

GIB = float(1 << 30)

TENANT = Tenant(namespace="ml", pod="a")


def report(at: float = 0.0, **device: Any) -> Report:
    described = {"uuid": "GPU-0", "age_seconds": 0.5, **device}
    return Report(
        node="n",
        at=at,
        devices=(Device(**described),),
        signals={"power_watts": (80.0,), "xid": (None,)},
    )


def make(updates: UpdateBuilder, said: Report, digest: Digest | None = None) -> Update:
    return updates.build(said, digest or Digest(), is_news=False, sent_at=said.at)


def row(update: Update, names: tuple[str, ...], name: str) -> float:
    (value,) = struct.unpack_from("<d", update.values, 8 * names.index(name))
    return float(value)


def names_of(update: Update) -> tuple[str, ...]:
    assert update.layout is not None
    return update.layout.rows


@pytest.mark.parametrize(
    ("signals", "is_used"),
    [
        ({}, False),
        ({"memory_used_bytes": (0.0,)}, False),
        ({"memory_used_bytes": (1.0,)}, True),
        ({"graphics_active_ratio": (0.10,)}, False),
        ({"graphics_active_ratio": (0.11,)}, True),
    ],
)
def test_a_free_device_is_used_above_a_threshold(
    signals: dict[str, tuple[float, ...]], is_used: bool
) -> None:
    threshold = Threshold(memory_bytes=0, utilization=0.10)
    builder = DigestBuilder(ReportOptions(), Thresholds(), threshold)

    free = builder.build(replace(report(allocated_to=()), sequence=1, signals=signals))
    held = builder.build(replace(report(allocated_to=(TENANT,)), sequence=2, signals=signals))

    assert (free.is_used, held.is_used) == ((is_used,), (False,))


@pytest.mark.parametrize(
    ("signals", "activity"),
    [
        ({}, 0.0),
        *[
            ({name: 0.4}, 0.4)
            for name in (
                *("graphics_active_ratio", "sm_active_ratio", "tensor_active_ratio"),
                *("dram_active_ratio", "memory_copy_utilization_ratio"),
            )
        ],
        ({"power_watts": 700.0, "power_limit_watts": 700.0}, 1.0),
    ],
)
def test_the_busiest_signal_of_a_device_counts(signals: dict[str, float], activity: float) -> None:
    passes = Passes()

    digest = passes.digest_builder.build(
        passes.next(signals={"gpu_utilization_ratio": 0.0, **signals})
    )

    assert digest.activity == (activity,)


@pytest.mark.parametrize(
    "rest",
    [
        {"memory_total_bytes": 80 * GIB},
        {"memory_total_bytes": None, "memory_free_bytes": 60 * GIB},
        {"memory_total_bytes": None, "memory_free_bytes": 59 * GIB, "memory_reserved_bytes": GIB},
    ],
)
def test_the_share_of_memory_in_use_is_of_the_total(rest: dict[str, float]) -> None:
    passes = Passes()

    assert passes.digest_builder.build(passes.next(used=0.25, signals=rest)).memory_used == (0.25,)


def test_unchanged_layout_and_holders_are_not_sent_again() -> None:
    updates = UpdateBuilder()
    first = make(updates, report())
    second = make(updates, report(1.0))
    third = make(updates, report(2.0, mig_profile="1g.10gb"))

    assert first.layout is not None
    assert first.holders is not None
    assert (second.layout, second.holders) == (None, None)
    assert third.layout is not None
    assert third.holders is None


def test_missing_values_are_nan_and_ages_are_sent() -> None:
    update = make(UpdateBuilder(), report())
    names = names_of(update)

    assert row(update, names, "power_watts") == 80.0
    assert math.isnan(row(update, names, "xid"))
    assert row(update, names, AGE) == 0.5


def test_the_age_of_an_xid_is_sent_besides_that_of_the_values() -> None:
    update = make(UpdateBuilder(), report(xid_age_seconds=42.0))

    assert row(update, names_of(update), XID_AGE) == 42.0


def test_means_cover_the_passes_since_the_last_sent_mean() -> None:
    updates = UpdateBuilder()
    first = make(updates, report(0.0), Digest(totals={KEY: (10, 5.0, 4.0)}))
    names = names_of(first)

    soon = make(updates, report(1.0), Digest(totals={KEY: (11, 6.0, 5.0)}))
    later = make(updates, report(_MEAN_SECONDS), Digest(totals={KEY: (14, 7.0, 4.5)}))
    same = make(updates, report(2 * _MEAN_SECONDS), Digest(totals={KEY: (14, 7.0, 4.5)}))

    for without_mean in (first, soon, same):
        assert math.isnan(row(without_mean, names, MEAN))
    assert row(later, names, MEAN) == 0.5
    assert row(later, names, MEAN_SQUARE) == 0.125


def test_means_and_shares_are_sent_on_when_the_clock_is_set_back() -> None:
    updates = UpdateBuilder()
    shared = {
        "allocated_to": tuple(Tenant(namespace="n", pod=uid, uid=uid) for uid in "ab"),
        "used_by": (),
    }
    names = names_of(make(updates, report(1000.0), Digest(totals={KEY: (10, 5.0, 4.0)})))

    later = make(updates, report(400.0, **shared), Digest(totals={KEY: (14, 7.0, 4.5)}))

    assert row(later, names, MEAN) == 0.5
    assert later.shares == ((0, "a", 0), (0, "b", 0))


def test_an_update_round_trips() -> None:
    update = make(UpdateBuilder(), report())
    content = frame(update)

    assert int.from_bytes(content[:4], "big") == len(content) - 4
    assert decode_update(content[4:]) == update


def pods(**device: Any) -> object:
    update = make(UpdateBuilder(), report(**device))
    assert update.holders is not None
    return update.holders.pods[0]


def test_pods_are_the_holders_of_a_device() -> None:
    tenants = (
        Tenant(namespace="ml", pod="a", uid="u", container="x"),
        Tenant(namespace="ml", pod="a", uid="u", container="y"),
    )

    assert pods(allocated_to=tenants, used_by=()) == (("ml", "a", "u"),)
    assert pods(allocated_to=()) == ()


def test_without_the_kubelet_pods_come_from_processes() -> None:
    inside = Process(pid=1, place=Place.POD, namespace="ml", pod="a", uid="u")

    assert pods(used_by=(inside, Process(pid=2, place=Place.HOST))) == (("ml", "a", "u"),)


def test_unidentified_processes_make_the_pods_unknown() -> None:
    nameless = Process(pid=1, place=Place.POD, uid="u")

    assert pods() is None
    assert pods(used_by=()) is None
    assert pods(used_by=(Process(pid=1),)) is None
    assert pods(used_by=(nameless,)) is None


def used(uid: str, memory_bytes: int | None = 1, place: Place = Place.POD) -> Process:
    return Process(pid=1, place=place, uid=uid, namespace="ns", pod=uid, memory_bytes=memory_bytes)


def test_memory_shares_of_a_shared_device_are_sent_once_a_minute() -> None:
    updates = UpdateBuilder()
    shared = {
        "allocated_to": (
            Tenant(namespace="ns", pod="a", uid="a"),
            Tenant(namespace="ns", pod="idle", uid="idle"),
        ),
        "used_by": (used("a", 5), used("b", 2), used("a", 3), used("", 9, Place.HOST)),
    }

    first = make(updates, report(1000.0, **shared))
    assert first.shares == ((0, "a", 8), (0, "b", 2), (0, "idle", 0))
    assert decode_update(frame(first)[4:]).shares == first.shares
    assert make(updates, report(1000.5, **shared)).shares == ()
    assert make(updates, report(999.0 + _SHARES_SECONDS, **shared)).shares == ()
    assert make(updates, report(1000.0 + _SHARES_SECONDS, **shared)).shares == first.shares
    set_back = make(updates, report(900.0, **shared))
    assert set_back.shares == first.shares


@pytest.mark.parametrize(
    "used_by",
    [
        pytest.param((used("a"),), id="one-pod"),
        pytest.param((used("a"), used("b", None)), id="memory-not-known"),
        pytest.param((used("a"), used("b"), used("", 1, Place.UNKNOWN)), id="place-not-known"),
        pytest.param((used("a"), used("b"), used("")), id="pod-not-known"),
        pytest.param(None, id="no-processes-known"),
    ],
)
def test_no_memory_shares_are_sent_if_not_shared_or_unknown(
    used_by: tuple[Process, ...] | None,
) -> None:
    assert make(UpdateBuilder(), report(used_by=used_by)).shares == ()


def strangers(count: int, *, memory_bytes: int = 5 << 30, name: str = "python3") -> dict[str, Any]:
    """Return the fields of a device that processes of the host use."""
    used_by = tuple(
        Process(
            pid=pid,
            name=name,
            memory_bytes=memory_bytes + (pid << 30),
            place=Place.HOST,
            container="session-3.scope",
            started_at=60.0,
        )
        for pid in range(1, count + 1)
    )
    pids = tuple(one.pid for one in used_by)
    return {"used_by": used_by, "foreign": Foreign(memory_bytes=memory_bytes, pids=pids)}


def test_foreign_processes_are_sent_only_if_they_changed() -> None:
    updates = UpdateBuilder()
    none = make(updates, report())
    first = make(updates, report(1.0, **strangers(1)))
    again = make(updates, report(2.0, **strangers(1, memory_bytes=(5 << 30) - 1000)))
    more = make(updates, report(3.0, **strangers(1, memory_bytes=9 << 30)))
    gone = make(updates, report(4.0))

    assert (none.foreign, again.foreign, gone.foreign) == (None, None, ())
    assert first.foreign == (
        ForeignProcess(
            device=0,
            pid=1,
            name="python3",
            memory_bytes=6 << 30,
            started_at=60.0,
            container="session-3.scope",
        ),
    )
    assert more.foreign is not None
    assert more.foreign[0].memory_bytes == 10 << 30


def test_a_new_layout_carries_its_foreign_processes() -> None:
    updates = UpdateBuilder()
    first = make(updates, report(**strangers(1)))
    second = make(updates, report(1.0, mig_profile="1g.10gb", **strangers(1)))

    assert second.layout is not None
    assert second.foreign == first.foreign


def test_update_names_only_the_largest_processes_of_each_device() -> None:
    devices = tuple(Device(uuid=f"GPU-{at}", **strangers(50, name="x" * 500)) for at in range(100))
    said = Report(node="n", at=0.0, devices=devices)
    update = UpdateBuilder().build(said, Digest(), is_news=False, sent_at=0.0)

    assert update.foreign is not None
    assert len(update.foreign) == MAX_PROCESSES
    assert [(one.device, one.pid) for one in update.foreign] == [
        (at, 50) for at in range(MAX_PROCESSES)
    ]
    assert len(frame(update)) < MAX_UPDATE_BYTES / 4
    few = UpdateBuilder().build(
        Report(node="n", at=0.0, devices=devices[:1]), Digest(), is_news=False, sent_at=0.0
    )
    assert [one.pid for one in few.foreign or ()] == [50, 49, 48, 47]


def test_names_of_foreign_processes_control_no_terminal_and_ids_are_short() -> None:
    process = Process(
        pid=7,
        name="evil\x1b[31m\u202e",
        place=Place.POD,
        uid="uid-a",
        container="cri-containerd-" + "ab" * 32 + ".scope",
    )
    said = report(used_by=(process,), foreign=Foreign(pids=(7,)))
    (shown,) = make(UpdateBuilder(), said).foreign or ()

    assert shown.name == "evil\ufffd[31m\ufffd"
    assert shown.container == "cri-containerd-abababababab.scope"
    assert (shown.pod, shown.memory_bytes) == ("uid-a", None)


def test_processes_of_the_holders_are_not_reported() -> None:
    process = Process(pid=7, name="python", place=Place.POD, namespace="a", pod="b")

    assert make(UpdateBuilder(), report(used_by=(process,), foreign=Foreign())).foreign is None


class Passes:
    """Passes over one device at intervals of a second; idle and free by default."""

    def __init__(self, options: ReportOptions | None = None) -> None:
        self.digest_builder = DigestBuilder(options or ReportOptions(), Thresholds(), Threshold())
        self.sequence = 0
        self.reported = self.digest_builder.build(self.next())

    def next(
        self,
        busy: float | None = 0.0,
        used: float = 0.0,
        *,
        signals: dict[str, float] | None = None,
        **device: Any,
    ) -> Report:
        self.sequence += 1
        said: dict[str, tuple[float | None, ...]] = {
            Signal.GRAPHICS_ACTIVE: (busy,),
            Signal.MEMORY_USED: (used * 80 * GIB,),
            Signal.MEMORY_TOTAL: (80 * GIB,),
            **{name: (value,) for name, value in (signals or {}).items()},
        }
        described = {"uuid": "GPU-0", "allocated_to": (), **device}
        return Report(
            node="n",
            at=float(self.sequence),
            sequence=self.sequence,
            devices=(Device(**described),),
            signals=said,
        )

    def is_news(self, busy: float | None = 0.0, used: float = 0.0, **device: Any) -> bool:
        return self.digest_builder.is_news(
            self.reported, self.digest_builder.build(self.next(busy, used, **device))
        )


def test_an_unchanged_report_is_no_news() -> None:
    assert not Passes().is_news()


def test_a_change_is_news_from_the_step_on() -> None:
    passes = Passes()

    assert not passes.is_news(busy=0.09)
    assert passes.is_news(busy=0.29)


@pytest.mark.parametrize(
    ("busy", "used"), [(0.11, 0.0), (0.0, 0.02)], ids=["a-tenth-of-it-busy", "more-than-a-gib"]
)
def test_use_of_a_free_device_is_news_below_the_step(busy: float, used: float) -> None:
    assert Passes().is_news(busy=busy, used=used)


def test_memory_has_its_own_step() -> None:
    passes = Passes()
    passes.reported = passes.digest_builder.build(passes.next(used=0.10, allocated_to=(TENANT,)))

    assert not passes.is_news(used=0.14, allocated_to=(TENANT,))
    assert passes.is_news(used=0.15, allocated_to=(TENANT,))


def test_crossing_an_idle_threshold_is_news() -> None:
    passes = Passes()
    passes.reported = passes.digest_builder.build(passes.next(used=0.48, allocated_to=(TENANT,)))

    assert passes.is_news(used=0.51, allocated_to=(TENANT,))


def test_a_short_spike_on_a_held_device_is_no_news() -> None:
    passes = Passes()
    for number in range(60):
        passes.reported = passes.digest_builder.build(
            passes.next(busy=float(number % 2), allocated_to=(TENANT,))
        )

    news = [passes.is_news(busy=float(number % 2), allocated_to=(TENANT,)) for number in range(20)]

    assert not any(news)


def test_a_lasting_change_on_a_held_device_becomes_news() -> None:
    passes = Passes()
    passes.reported = passes.digest_builder.build(passes.next(allocated_to=(TENANT,)))

    news = [passes.is_news(busy=1.0, allocated_to=(TENANT,)) for _ in range(10)]

    assert not news[0]
    assert news[-1]


@pytest.mark.parametrize(
    "device",
    [
        {"allocated_to": (TENANT,)},
        {"allocated_to": None},
        {"problem": Problem(code="GpuIsLost", text="lost")},
        {"verdict": Verdict(action="exclude", cause="XID 79")},
        {"foreign": Foreign(memory_bytes=2 << 30)},
        {"mig_profile": "1g.10gb"},
        {"replicas": 4},
        {"uuid": "GPU-1"},
        {"signals": {Signal.XID: 79.0}},
        {"signals": {Signal.CLOCK_EVENT_REASONS: float(0x8)}},
    ],
    ids=[
        "tenant",
        "unknown",
        "lost",
        "ill",
        "foreign",
        "profile",
        "shares",
        "device",
        "xid",
        "slowed",
    ],
)
def test_a_changed_fact_is_news(device: dict[str, Any]) -> None:
    assert Passes().is_news(**device)


def test_a_clock_event_reason_without_slowdown_is_no_news() -> None:
    assert not Passes().is_news(signals={Signal.CLOCK_EVENT_REASONS: 1.0})


def test_a_value_that_becomes_unknown_is_news() -> None:
    assert Passes().is_news(busy=None)


def test_totals_count_every_pass_once() -> None:
    passes = Passes()
    digest_builder = []
    for busy in (0.5, 1.0):
        report = passes.next(busy=busy)
        passes.digest_builder.build(report)
        digest_builder.append(passes.digest_builder.build(report))

    assert digest_builder[-1].totals["GPU-0", ""] == (3, 1.5, 1.25)
