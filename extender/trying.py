"""What lets somebody see first what this would do: shadow mode, the log of decisions, regret."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from extender.config import Settings
from extender.in_flight import InFlight
from extender.metrics import Metrics
from extender.observe.regret import RegretMetrics, RegretTable
from extender.observe.replicas import Replicas
from extender.placement.history import DecisionRecord
from extender.placement.placer import Placer
from extender.placement.regret import RegretWatch
from extender.records.decision_log import DecisionLogWriter
from extender.settings.trying import Mode

logger = logging.getLogger(__name__)

TAKE_SECONDS: Final = 0.05
"""Bound pods are looked into one by one, so far apart, after a burst: webhooks come first."""

Clock = Callable[[], float]


class Trying:
    """Shadow mode, the log of decisions and regret, over one placer.

    Args:
        settings: all of them.
        placer: decides.
        metrics: where it is counted.
        clock: seconds since the epoch.
        in_flight: lets what is urgent go first.

    Attributes:
        log: the log of decisions, None where there is none.
        regret: watches bound pods.
    """

    def __init__(
        self,
        settings: Settings,
        placer: Placer,
        metrics: Metrics,
        clock: Clock,
        in_flight: InFlight,
    ) -> None:
        self._settings = settings
        self._placer = placer
        self._clock = clock
        self._give_way = in_flight.give_way
        self._calm = in_flight.calm
        self.log: DecisionLogWriter | None = None
        self.regret = self._make_regret(settings)
        self._metrics = RegretMetrics(metrics.registry, lambda: self.regret)
        self.regret.on_outcome = self._metrics.note
        metrics.registry.register(_LogCounts(lambda: self.log, lambda: self._placer.is_shadow))
        placer.is_shadow = settings.mode is Mode.SHADOW
        self._open_log(settings)

    async def adopt(self, settings: Settings) -> None:
        """Go by other settings from now on."""
        before, self._settings = self._settings, settings
        self._placer.is_shadow = settings.mode is Mode.SHADOW
        if settings.regret != before.regret:
            self.regret = self._make_regret(settings)
            self.regret.on_outcome = self._metrics.note
        if settings.decision_log != before.decision_log:
            old = self.log
            if old is not None:  # of one file, two threads would write across each other
                self._placer.on_settled = lambda *_: None
                self.log = None
                await asyncio.to_thread(old.close)
            self._open_log(settings)

    def note_bound(self, record: DecisionRecord) -> None:
        """Note that a pod is bound, and what we decided about it, be it the last word or not."""
        if self.log is not None:
            self.log.note_bound(record.pod.uid, record.bound_node, self._clock())

    def note_own(self, record: DecisionRecord) -> None:
        """Note that a pod is bound, and that ours was the last decision about it."""
        self.regret.note(record)

    def regret_table(self, replicas: Replicas) -> RegretTable:
        """Return what tells of regret, here and at the other replicas."""
        return RegretTable(lambda: self.regret, replicas)

    def degraded(self) -> Mapping[str, str]:
        """Return what is wrong although questions are answered."""
        problem = self.log.problem if self.log is not None else ""
        return {"decision_log": problem} if problem else {}

    async def run(self) -> None:
        """Watch bound pods until cancelled; then write what is left of the log."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._take(), name="regret pods")
                group.create_task(self._watch(), name="regret")
        finally:
            if self.log is not None:
                self.log.close()

    async def _take(self) -> None:
        while True:
            await asyncio.sleep(TAKE_SECONDS)
            if not self.regret.waiting:
                continue
            await self._calm()
            try:
                self.regret.take_next()
            except Exception:  # placing pods must go on
                logger.exception("fault", extra={"verb": "regret"})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.regret.sample_seconds)
            watch = self.regret
            if not self._settings.regret.pods:
                continue
            try:
                watch.look()
                for _ in watch.judge_in_steps():
                    await self._give_way()
            except Exception:  # likewise
                logger.exception("fault", extra={"verb": "regret"})

    def _make_regret(self, settings: Settings) -> RegretWatch:
        return RegretWatch(
            self._placer.fleet,
            self._clock,
            pods=settings.regret.pods,
            after_seconds=settings.regret.after_seconds,
        )

    def _open_log(self, settings: Settings) -> None:
        if settings.decision_log.path:
            self.log = DecisionLogWriter(settings.decision_log)
            self._placer.on_settled = self.log.note


class _LogCounts(Collector):
    """Tells of the log of decisions, and whether answers count."""

    def __init__(
        self, log: Callable[[], DecisionLogWriter | None], is_shadow: Callable[[], bool]
    ) -> None:
        self._log = log
        self._is_shadow = is_shadow

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        shadow = GaugeMetricFamily(
            "idlegpu_shadow_mode", "Whether no answer changes anything: mode is shadow."
        )
        shadow.add_metric([], float(self._is_shadow()))
        yield shadow
        log = self._log()
        if log is None:
            return
        decisions = CounterMetricFamily(
            "idlegpu_decision_log_decisions",
            "Decisions that were written to the log of decisions, or that it lacks.",
            labels=["outcome"],
        )
        decisions.add_metric(["written"], log.written)
        decisions.add_metric(["dropped"], log.dropped)
        yield decisions
