"""Run shadow mode, the decision log and the regret watch."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from extender.insight.decision_log.writer import DecisionLogWriter
from extender.insight.regret_table import RegretMetrics
from extender.insight.regret_watch import RegretWatch
from extender.placement.history import DecisionRecord
from extender.placement.placer import Placer, Weighed
from extender.runtime.metrics import Metrics
from extender.server.request_tracker import RequestTracker
from extender.settings.config import Settings

logger = logging.getLogger(__name__)

SAMPLE_SECONDS: Final = 30.0
"""Time between two samples of the activity of all GPUs; an hour's mean needs no more."""
_TAKE_SECONDS: Final = 0.05
"""Pause between two bound pods that the regret watch reads, so that webhooks come first."""

_Clock = Callable[[], float]


class ShadowMode:
    """Runs shadow mode, the decision log and the regret watch for one placer.

    Args:
        metrics: registry for the metrics of these parts.
        clock: seconds since the epoch.
        request_tracker: yields to requests, and waits for the end of a burst.

    Attributes:
        log: the decision log, or None if it is off.
        regret: compares decisions with the load that followed.
    """

    def __init__(
        self,
        settings: Settings,
        placer: Placer,
        metrics: Metrics,
        clock: _Clock,
        request_tracker: RequestTracker,
    ) -> None:
        self._settings = settings
        self._placer = placer
        self._clock = clock
        self._yield_control = request_tracker.yield_control
        self._wait_for_quiet = request_tracker.wait_for_quiet
        self.log: DecisionLogWriter | None = None
        self._metrics = RegretMetrics(metrics.registry, lambda: self.regret)
        self.regret = self._make_regret(settings)
        metrics.registry.register(_LogCounts(lambda: self.log, lambda: self._placer.is_shadow))
        placer.decided.subscribe(self._log_decision)
        self._open_log(settings)

    async def adopt(self, settings: Settings) -> None:
        """Apply new settings."""
        before, self._settings = self._settings, settings
        if settings.regret != before.regret:
            self.regret = self._make_regret(settings)
        if settings.decision_log != before.decision_log:
            old = self.log
            if old is not None:  # two threads must not write the same file
                self.log = None
                await asyncio.to_thread(old.close)
            self._open_log(settings)

    def _log_decision(self, record: DecisionRecord, weighed: Weighed) -> None:
        if self.log is not None:
            self.log.note(record, weighed)

    def note_bound(self, record: DecisionRecord) -> None:
        """Log that a pod was bound, whether or not this replica decided last about the pod."""
        if self.log is not None:
            self.log.note_bound(record.pod.uid, record.bound_node, self._clock())

    def note_own(self, record: DecisionRecord) -> None:
        """Start the regret watch of a bound pod about which this replica decided last."""
        self.regret.note(record)

    def degraded(self) -> Mapping[str, str]:
        """Return active problems by name that do not stop the webhooks from answering."""
        problem = self.log.problem if self.log is not None else ""
        return {"decision_log": problem} if problem else {}

    async def run(self) -> None:
        """Watch bound pods until cancelled, then write the rest of the decision log."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._take(), name="regret pods")
                group.create_task(self._watch(), name="regret")
        finally:
            if self.log is not None:
                self.log.close()

    async def _take(self) -> None:
        while True:
            await asyncio.sleep(_TAKE_SECONDS)
            if not self.regret.waiting:
                continue
            await self._wait_for_quiet()
            try:
                self.regret.take_next()
            except Exception:  # placing pods must go on
                logger.exception("internal error", extra={"verb": "regret"})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            watch = self.regret
            if not self._settings.regret.pods:
                continue
            try:
                watch.look()
                for _ in watch.judge_in_steps():
                    await self._yield_control()
            except Exception:  # placing pods must go on
                logger.exception("internal error", extra={"verb": "regret"})

    def _make_regret(self, settings: Settings) -> RegretWatch:
        return RegretWatch(
            self._placer.fleet,
            self._clock,
            pods=settings.regret.pods,
            after_seconds=settings.regret.after_seconds,
            on_outcome=self._metrics.note,
        )

    def _open_log(self, settings: Settings) -> None:
        if settings.decision_log.path:
            self.log = DecisionLogWriter(settings.decision_log)


class _LogCounts(Collector):
    """Exports counters of the decision log, and whether shadow mode is on."""

    def __init__(
        self, log: Callable[[], DecisionLogWriter | None], is_shadow: Callable[[], bool]
    ) -> None:
        self._log = log
        self._is_shadow = is_shadow

    @override
    def collect(self) -> Iterable[Metric]:
        shadow = GaugeMetricFamily(
            "idlegpu_shadow_mode", "Whether shadow mode is on: no answer affects a pod."
        )
        shadow.add_metric([], float(self._is_shadow()))
        yield shadow
        log = self._log()
        if log is None:
            return
        decisions = CounterMetricFamily(
            "idlegpu_decision_log_decisions",
            "Decisions that were written to the decision log, or lost.",
            labels=["outcome"],
        )
        decisions.add_metric(["written"], log.written)
        decisions.add_metric(["dropped"], log.dropped)
        yield decisions
