"""Whether a replica is asked: it knows what it needs to answer well, and no other one knows better.

Nobody is left without an answer for it. Who starts waits for the first readings, but not for long:
where Prometheus is down all replicas answer without. And who has fallen behind steps back only for
another that has not, and that is asked: where all have the same fault, or the other one's kubelet
is gone, all are ready.
"""

import time
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import Final

from extender.config import Settings
from extender.in_flight import InFlight
from extender.observe.collector import SourceStatus

TOLD_SECONDS: Final = 30.0
"""Who has not asked again for so long does not lead questions here: a kubelet asks more often, and
40 s after its last word Kubernetes takes its pods out of their Services."""


class Standing(StrEnum):
    """How ready a replica is, as /readyz says."""

    STARTING = "starting"
    """It does not know nodes and pods yet, or waits for the first readings."""
    READY = "ready"
    BEHIND = "behind"
    """A source fails that another replica has."""
    ENDING = "ending"
    """It answers who still comes, and nobody is to."""


class Readiness:
    """Says whether kube-scheduler is to ask this replica.

    Args:
        settings: those in force.
        in_flight: says whether the end is near.
        states: how each source fares.
        awaited: says what a start still waits for.
        others: what is wrong with each replica that answers well otherwise; see `Peers`.
        unset: the sources that it is not told to follow, and so does not reach either.
        make_ready: is called once, right before anybody is told that it is ready: whatever takes
            long then keeps nobody waiting.
        monotonic: seconds since any moment.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        in_flight: InFlight,
        *,
        states: Callable[[], Iterable[SourceStatus]],
        awaited: Callable[[], Iterable[str]],
        others: Callable[[], Iterable[Collection[str]]],
        unset: Callable[[], Iterable[str]] = tuple,
        make_ready: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._in_flight = in_flight
        self._states = states
        self._awaited = awaited
        self._others = others
        self._unset = unset
        self._make_ready = make_ready
        self._monotonic = monotonic
        self._laid_out_at: float | None = None
        self._is_started = False
        self._told_ready_at: float | None = None
        self._failing_since: dict[str, float] = {}

    @property
    def is_laid_out(self) -> bool:
        """Whether the inventory is complete and laid out: questions can be answered."""
        return self._laid_out_at is not None

    def lay_out(self) -> None:
        """Note that it is, from now on."""
        self._laid_out_at = self._monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether kube-scheduler is to ask here."""
        return self.standing is Standing.READY

    @property
    def standing(self) -> Standing:
        """How ready this replica is now."""
        if self._in_flight.is_draining:
            return Standing.ENDING
        if not self._has_started():
            return Standing.STARTING
        # Of all sets of faults one has no smaller one: whoever has that is ready.
        if self._failing():
            ours = self._unreached()
            if any(ours > frozenset(theirs) for theirs in self._others()):
                return Standing.BEHIND
        return Standing.READY

    def tell(self) -> Standing:
        """Return the standing for who goes by it, as a kubelet does; note that somebody does."""
        standing = self.standing
        self._told_ready_at = self._monotonic() if standing is Standing.READY else None
        return standing

    def causes(self) -> dict[str, str]:
        """Return why this replica is not ready although it could answer; nothing where it is."""
        match self.standing:
            case Standing.STARTING if self.is_laid_out:
                return {"start": f"no readings yet, or no word: {', '.join(self._awaited())}"}
            case Standing.BEHIND:
                names = ", ".join(sorted(self._failing()))
                return {"replica": f"behind: another one reaches what it does not: {names}"}
            case _:
                return {}

    def faults(self) -> tuple[str, ...] | None:
        """Return what the others are told that we do not reach; None where we are no help.

        We are none before somebody was told that we are ready, nor where nobody asks any more: then
        no question is led here, however well we are.
        """
        unreached = self._unreached()  # always: how long something has failed counts from a look
        told_at = self._told_ready_at
        if self._in_flight.is_draining or told_at is None:
            return None
        return tuple(sorted(unreached)) if self._monotonic() - told_at < TOLD_SECONDS else None

    def _has_started(self) -> bool:
        if not self._is_started and self._laid_out_at is not None:
            waited = self._monotonic() - self._laid_out_at
            self._is_started = waited >= self._settings().ready.wait_seconds or not any(
                True for _ in self._awaited()
            )
            if self._is_started:
                self._make_ready()
        return self._is_started

    def _unreached(self) -> frozenset[str]:
        """Return the sources without which we answer, those that nobody has set included.

        So a replica that is to follow one more than another is not behind that.
        """
        return self._failing() | frozenset(self._unset())

    def _failing(self) -> frozenset[str]:
        """Return the sources that have failed for long, without a success between."""
        now = self._monotonic()
        failing = {state.name for state in self._states() if state.error and not state.is_partial}
        self._failing_since = {name: self._failing_since.get(name, now) for name in failing}
        behind_seconds = self._settings().ready.behind_seconds
        since = self._failing_since.items()
        return frozenset(name for name, at in since if now - at >= behind_seconds)
