"""Report of a replay: a pod's last attempt is repeated with all nodes of its filter call."""

from dataclasses import replace

import pytest

from extender.core.policy import Policy, Strategy
from extender.insight.decision_log.lines import LineWriter
from extender.insight.replay import ReplayReport, parse_changes, replay
from extender.placement.request_log import FILTER, PRIORITIZE
from testkit.builders import GIB, NOW, Node, busy, gpu, node, request, snapshot_of
from testkit.decision_logs import read, record_of, weighed

FLEET: dict[str, Node] = {
    "calm": node(*[gpu(utilization=0.02, memory_used=0.31)] * 2),
    "roomy": node(*[gpu(utilization=0.29, memory_used=0.0)] * 2),
    "nearly-full": node(gpu(utilization=0.25, memory_used=0.45), busy(used=1)),
}
LOADED: dict[str, Node] = {"calm": FLEET["calm"], "loaded": node(gpu(utilization=0.4))}
SHORTLIST = ("calm", "roomy")
FILTERING = replace(Policy(), load_filter=replace(Policy().load_filter, is_enabled=True))


class Log:
    """Decision log of a test."""

    def __init__(self, fleet: dict[str, Node], policy: Policy) -> None:
        self.snapshot, self.policy = snapshot_of(fleet), policy
        self.writer, self.lines = LineWriter(), b""
        self.number = 0

    def requested(self, verb: str, *names: str, at: float = NOW, **requested: int) -> int:
        """Log a call with these nodes, all if none are named; return the number that passed."""
        made = weighed(
            self.snapshot,
            request(strategy=Strategy.SPREAD, **requested),
            policy=self.policy,
            candidates=names or None,
            name="pod",
        )
        self.number += 1
        record = record_of(made, self.number, verb=verb, at=at)
        self.lines += b"".join(self.writer.decision(record, made))
        return made.decision.feasible

    def replayed(self, *changes: str) -> ReplayReport:
        report = replay(read(self.lines), parse_changes(changes), {})
        assert report.exact == report.decisions == self.number
        return report


@pytest.fixture
def log() -> Log:
    return Log(FLEET, Policy())


def test_other_settings_may_choose_a_node_that_was_not_on_the_shortlist(log: Log) -> None:
    log.requested(FILTER)
    log.requested(PRIORITIZE, *SHORTLIST, at=NOW + 0.01)

    report = log.replayed("strategy=pack")

    assert (report.pods, report.moved, report.narrowed) == (1, 1, 0)
    (move,) = report.moves
    assert (move.before, move.after) == ("calm", "nearly-full")


def test_by_the_same_settings_nothing_moves(log: Log) -> None:
    log.requested(FILTER)
    log.requested(PRIORITIZE, *SHORTLIST, at=NOW + 0.01)

    report = log.replayed()

    assert (report.moved, report.narrowed, report.before) == (0, 0, report.after)


def test_without_the_load_filter_the_nodes_that_it_refused_come_back() -> None:
    log = Log(LOADED, FILTERING)
    assert log.requested(FILTER) == 1
    log.requested(PRIORITIZE, "calm", at=NOW + 0.01)

    report = log.replayed("load_filter.enabled=false", "thresholds.utilization=50", "strategy=pack")

    assert [move.after for move in report.moves] == ["loaded"]


@pytest.mark.parametrize(
    "filtered_at",
    [
        pytest.param(None, id="another-replica-answered-filter"),
        pytest.param(NOW - 60, id="filter-was-of-an-attempt-before"),
    ],
)
def test_decision_of_prioritize_alone_counts_and_is_reported(
    log: Log, filtered_at: float | None
) -> None:
    if filtered_at is not None:
        log.requested(FILTER, at=filtered_at)
    log.requested(PRIORITIZE, *SHORTLIST)

    report = log.replayed("strategy=pack")

    assert (report.pods, report.moved, report.narrowed) == (1, 0, 1)


def test_filter_without_feasible_nodes_belongs_to_another_attempt() -> None:
    log = Log(FLEET | {"full": node(busy(memory_free_bytes=GIB))}, Policy())
    assert log.requested(FILTER, "full", memory_bytes=int(20 * GIB)) == 0
    log.requested(PRIORITIZE, at=NOW + 1, memory_bytes=int(20 * GIB))

    report = log.replayed()

    assert (report.before.placed, report.narrowed) == (1, 1)


def test_of_several_attempts_the_last_counts(log: Log) -> None:
    log.requested(FILTER)
    log.requested(PRIORITIZE, *SHORTLIST, at=NOW + 0.01)
    log.requested(FILTER, "roomy", at=NOW + 2)

    report = log.replayed("strategy=pack")

    assert (report.pods, report.moved, report.narrowed) == (1, 0, 0)
    assert report.before.activity == pytest.approx(0.29)
