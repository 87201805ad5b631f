"""Decide whether this replica reports itself ready.

A replica is ready when it has the data for good answers, unless another ready replica reaches more
sources. At least one replica always stays ready. After its start a replica waits a limited time for
the first readings: without Prometheus all replicas answer without readings. A replica with failing
sources becomes unready only if another replica reaches them and receives probes and requests.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from extender.server.request_tracker import RequestTracker
from extender.settings.config import Settings

_BEHIND_SECONDS: Final = 30.0
"""Time without success after which a source counts as unreached: sources are polled every 10 s."""
_PROBE_SECONDS: Final = 30.0
"""A replica that was not probed for this long is assumed to get no requests. Kubelets probe more
often, and Kubernetes removes the pods of a node from Services 40 s after the kubelet's last
status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """Health of a source, for metrics and /readyz.

    Attributes:
        name: name of the source.
        last_success_at: seconds since the epoch, None before the first success.
        failures: failed attempts since the start.
        error: current error, "" if there is none.
        failed_queries: failed queries of the last round.
        partial_answers: answers since the start that the source itself marked incomplete.
        restarts: restarts of the source's worker process.
        is_partial: whether only parts of the last answer are missing.
        unreadable: malformed objects since the start, which were left out.
        is_unreadable_in_part: whether the last complete answer contained malformed objects.
    """

    name: str
    last_success_at: float | None
    failures: int
    error: str
    failed_queries: int = 0
    partial_answers: int = 0
    restarts: int = 0
    is_partial: bool = False
    unreadable: int = 0
    is_unreadable_in_part: bool = False


class ReadyState(StrEnum):
    """Readiness state of a replica, as /readyz reports it."""

    STARTING = "starting"
    """Nodes and pods are not known yet, or the first readings have not arrived."""
    READY = "ready"
    BEHIND = "behind"
    """A source fails here, and another replica reaches it."""
    ENDING = "ending"
    """It is shutting down: it answers requests, but must receive no new ones."""


class Readiness:
    """Decides whether kube-scheduler should send requests to this replica.

    Args:
        settings: returns the current settings.
        request_tracker: reports whether the shutdown has begun.
        states: returns the status of each source.
        pending: returns the names of the sources that the start waits for.
        peer_faults: returns the unreached sources of each other ready replica; see `Peers`.
        unconfigured: returns the names of the sources that are not configured, and so not reached.
        make_ready: runs once, right before the replica becomes ready, so that slow work delays no
            request.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        request_tracker: RequestTracker,
        *,
        states: Callable[[], Iterable[SourceStatus]],
        pending: Callable[[], Iterable[str]],
        peer_faults: Callable[[], Iterable[Collection[str]]],
        unconfigured: Callable[[], Iterable[str]] = tuple,
        make_ready: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._request_tracker = request_tracker
        self._states = states
        self._pending = pending
        self._peer_faults = peer_faults
        self._unconfigured = unconfigured
        self._make_ready = make_ready
        self._monotonic = monotonic
        self._allocated_at: float | None = None
        self._is_started = False
        self._reported_ready_at: float | None = None
        self._failing_since: dict[str, float] = {}

    @property
    def is_allocated(self) -> bool:
        """Whether the inventory is complete and allocated, so that requests can be answered."""
        return self._allocated_at is not None

    def mark_allocated(self) -> None:
        """Record that the inventory is complete and allocated."""
        self._allocated_at = self._monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether kube-scheduler should send requests to this replica."""
        return self.state is ReadyState.READY

    @property
    def state(self) -> ReadyState:
        """Readiness state of this replica now."""
        if self._request_tracker.is_draining:
            return ReadyState.ENDING
        if not self._has_started():
            return ReadyState.STARTING
        # Some replica has a smallest set of faults: it stays ready.
        if self._failing():
            ours = self._unreached()
            if any(ours > frozenset(theirs) for theirs in self._peer_faults()):
                return ReadyState.BEHIND
        return ReadyState.READY

    def answer_probe(self) -> ReadyState:
        """Return the state for a readiness probe, and record that the probe was answered."""
        state = self.state
        self._reported_ready_at = self._monotonic() if state is ReadyState.READY else None
        return state

    def causes(self) -> dict[str, str]:
        """Return the reasons why a replica that could answer is not ready; empty if it is ready."""
        match self.state:
            case ReadyState.STARTING if self.is_allocated:
                return {"start": f"no first readings or peers yet: {', '.join(self._pending())}"}
            case ReadyState.BEHIND:
                names = ", ".join(sorted(self._failing()))
                return {"replica": f"behind: another one reaches sources that fail here: {names}"}
            case _:
                return {}

    def faults(self) -> tuple[str, ...] | None:
        """Return the unreached sources to report to other replicas, or None if not ready.

        It is None before a probe was answered with ready, and after probes have stopped: then this
        replica gets no requests, and no other replica may rely on it.
        """
        unreached = self._unreached()  # call it always: it starts the timers of failing sources
        reported_at = self._reported_ready_at
        if self._request_tracker.is_draining or reported_at is None:
            return None
        return (
            tuple(sorted(unreached)) if self._monotonic() - reported_at < _PROBE_SECONDS else None
        )

    def _has_started(self) -> bool:
        if not self._is_started and self._allocated_at is not None:
            waited = self._monotonic() - self._allocated_at
            self._is_started = waited >= self._settings().ready.wait_seconds or not any(
                True for _ in self._pending()
            )
            if self._is_started:
                self._make_ready()
        return self._is_started

    def _unreached(self) -> frozenset[str]:
        """Return the sources that this replica does not reach, including unconfigured ones.

        So a replica with an additional configured source is not behind a replica without that
        source.
        """
        return self._failing() | frozenset(self._unconfigured())

    def _failing(self) -> frozenset[str]:
        """Return the sources that have failed for `_BEHIND_SECONDS` without a success."""
        now = self._monotonic()
        failing = {state.name for state in self._states() if state.error and not state.is_partial}
        self._failing_since = {name: self._failing_since.get(name, now) for name in failing}
        since = self._failing_since.items()
        return frozenset(name for name, at in since if now - at >= _BEHIND_SECONDS)
