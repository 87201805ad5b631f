"""Test when a replica is ready: it has enough data, and no other replica reaches more sources."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.server.readiness import _PROBE_SECONDS, Readiness, ReadyState, SourceStatus
from extender.server.request_tracker import RequestTracker
from extender.settings.config import Settings
from extender.settings.service import Ready

SETTINGS = Settings(ready=Ready(wait_seconds=20))


class Replica:
    """Replica with sources and peers that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.errors: dict[str, str] = {"apiserver/pods": "", "prometheus": ""}
        self.pending: list[str] = []
        self.others: list[Collection[str]] = []
        self.unconfigured: list[str] = []
        self.partial: set[str] = set()
        self.made_ready: list[float] = []
        self.request_tracker = RequestTracker()
        self.readiness = Readiness(
            lambda: SETTINGS,
            self.request_tracker,
            states=lambda: [
                SourceStatus(
                    name=name,
                    last_success_at=None,
                    failures=0,
                    error=error,
                    is_partial=name in self.partial,
                )
                for name, error in self.errors.items()
            ],
            pending=lambda: self.pending,
            peer_faults=lambda: self.others,
            unconfigured=lambda: self.unconfigured,
            make_ready=lambda: self.made_ready.append(self.now),
            monotonic=lambda: self.now,
        )

    def state(self) -> ReadyState:
        return self.readiness.state

    def fail(self, *names: str) -> None:
        """Make sources fail for long enough to count."""
        self.errors |= dict.fromkeys(names, "connection refused")
        self.readiness.faults()  # as heartbeats do
        self.now += 30.0


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest.fixture
def started(replica: Replica) -> Replica:
    replica.readiness.mark_allocated()
    assert replica.state() is ReadyState.READY
    return replica


def test_a_replica_is_starting_until_nodes_and_pods_are_allocated(replica: Replica) -> None:
    replica.now += 1000

    assert replica.state() is ReadyState.STARTING
    assert replica.readiness.faults() is None
    assert replica.readiness.causes() == {}


def test_by_default_the_start_takes_no_longer_than_15_s() -> None:
    inventory_seconds = 4.0  # with 5,000 nodes and 10,000 GPU pods, as bench.start measures it

    assert inventory_seconds + Ready().wait_seconds <= 15


def test_a_replica_waits_for_first_readings(replica: Replica) -> None:
    replica.pending = ["prometheus"]
    replica.readiness.mark_allocated()
    replica.now += 19.9

    assert replica.state() is ReadyState.STARTING
    assert replica.readiness.causes() == {"start": "no first readings or peers yet: prometheus"}
    assert replica.readiness.faults() is None

    replica.pending = []

    assert replica.state() is ReadyState.READY


def test_slow_work_runs_once_before_the_first_request(replica: Replica) -> None:
    replica.pending = ["prometheus"]
    replica.readiness.mark_allocated()
    assert replica.state() is ReadyState.STARTING
    assert not replica.made_ready

    replica.pending = []
    assert replica.state() is ReadyState.READY
    replica.now += 1.0
    assert replica.state() is ReadyState.READY

    assert replica.made_ready == [replica.now - 1.0]


def test_the_wait_for_first_readings_is_limited(replica: Replica) -> None:
    replica.pending = ["prometheus"]
    replica.readiness.mark_allocated()
    replica.now += 20.0

    assert replica.state() is ReadyState.READY
    assert replica.readiness.causes() == {}


def test_a_started_replica_does_not_start_again(started: Replica) -> None:
    started.pending = ["prometheus"]

    assert started.state() is ReadyState.READY


def test_a_replica_with_a_fault_is_behind_one_without(started: Replica) -> None:
    started.others = [()]
    started.fail("apiserver/pods")

    assert started.state() is ReadyState.BEHIND
    assert not started.readiness.is_ready
    assert "apiserver/pods" in started.readiness.causes()["replica"]

    started.errors["apiserver/pods"] = ""

    assert started.state() is ReadyState.READY


def test_a_fault_counts_only_after_a_while(started: Replica) -> None:
    started.others = [()]
    started.errors["prometheus"] = "timed out"
    assert started.state() is ReadyState.READY
    started.now += 29.9
    assert started.state() is ReadyState.READY
    started.errors["prometheus"] = ""  # a success in between
    assert started.state() is ReadyState.READY
    started.errors["prometheus"] = "timed out"
    started.now += 29.9

    assert started.state() is ReadyState.READY


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], id="there is no other, or it is silent"),
        pytest.param([("prometheus",)], id="the other has the same fault"),
        pytest.param([("prometheus", "agents")], id="the other has more"),
        pytest.param([("apiserver/pods",)], id="the other has another fault"),
    ],
)
def test_a_replica_with_a_fault_stays_ready_if_no_other_is_better(
    started: Replica, others: list[Collection[str]]
) -> None:
    started.others = others
    started.fail("prometheus")

    assert started.state() is ReadyState.READY


def test_a_replica_that_was_probed_ready_reports_the_sources_it_reaches(started: Replica) -> None:
    started.fail("prometheus")
    assert started.readiness.faults() is None

    assert started.readiness.answer_probe() is ReadyState.READY

    assert started.readiness.faults() == ("prometheus",)


def test_a_replica_that_was_probed_behind_reports_no_sources(started: Replica) -> None:
    assert started.readiness.answer_probe() is ReadyState.READY
    started.others = [()]
    started.fail("prometheus")

    assert started.readiness.answer_probe() is ReadyState.BEHIND

    assert started.readiness.faults() is None


def test_a_replica_without_probes_reports_no_sources(started: Replica) -> None:
    assert started.readiness.answer_probe() is ReadyState.READY
    started.now += _PROBE_SECONDS - 0.1
    assert started.readiness.faults() == ()

    started.now += 0.1

    assert started.readiness.faults() is None
    assert started.state() is ReadyState.READY


def test_an_ending_replica_is_not_ready_and_reports_no_sources(started: Replica) -> None:
    assert started.readiness.answer_probe() is ReadyState.READY
    started.request_tracker.is_draining = True

    assert started.state() is ReadyState.ENDING
    assert started.readiness.faults() is None


def exchange_faults(replicas: list[Replica]) -> None:
    for replica in replicas:
        reported = [other.readiness.faults() for other in replicas if other is not replica]
        replica.others = [one for one in reported if one is not None]


@given(
    st.lists(st.sets(st.sampled_from(["a", "b", "c"])), min_size=1, max_size=5),
    st.lists(st.integers(min_value=0, max_value=4), max_size=10),
)
def test_one_replica_is_always_ready_finally_the_best_connected(
    faults: list[set[str]], probes: list[int]
) -> None:
    replicas = [Replica() for _ in faults]
    for replica, failing in zip(replicas, faults, strict=True):
        replica.readiness.mark_allocated()
        replica.fail(*failing)
    for number in probes:
        exchange_faults(replicas)
        replicas[number % len(replicas)].readiness.answer_probe()

    exchange_faults(replicas)
    assert any(replica.readiness.is_ready for replica in replicas)

    for _ in range(2):
        for replica in replicas:
            replica.readiness.answer_probe()
        exchange_faults(replicas)
    least = [one for one in faults if not any(other < one for other in faults)]
    assert sum(replica.readiness.is_ready for replica in replicas) == len(least)


def test_a_replica_with_more_configured_sources_is_not_behind(started: Replica) -> None:
    started.others = [{"agents"}]  # not configured there: an older replica during a rollout
    started.fail("agents")

    assert started.state() is ReadyState.READY


def test_a_replica_with_fewer_configured_sources_is_not_behind(started: Replica) -> None:
    started.unconfigured = ["agents"]
    started.others = [()]

    assert started.readiness.answer_probe() is ReadyState.READY
    assert started.readiness.faults() == ("agents",)


def test_a_source_with_a_partial_answer_counts_as_reached(started: Replica) -> None:
    started.partial = {"prometheus"}
    started.others = [()]
    started.fail("prometheus")

    assert started.readiness.answer_probe() is ReadyState.READY
    assert started.readiness.faults() == ()
