from typing import Any

import pytest

from agent.options import ReportOptions
from agent.push.digest import DigestBuilder
from agent.report.contract import Device, Foreign, Problem, Report, Tenant, Verdict
from agent.tenants.foreign import Threshold
from extender.core.devices.readings import Signal
from extender.core.policy import Thresholds

GIB = float(1 << 30)
TENANT = Tenant(namespace="ml", pod="a")


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
            self.reported,
            self.digest_builder.build(self.next(busy, used, **device)),
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
    assert passes.is_news(used=0.16, allocated_to=(TENANT,))


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
