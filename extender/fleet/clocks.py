"""Correct the times of pods' bindings, starts, failures and ends if another clock is wrong."""

from dataclasses import dataclass, replace
from math import inf

from extender.core.nodes.inventory import PodRecord

_AGREE_SECONDS = 10.0
"""Maximum deviation of a correct clock. Kubelets report events within this time."""


@dataclass(frozen=True, slots=True)
class _Time:
    """A time as reported by the API server and as corrected, seconds since the epoch."""

    reported: float
    corrected: float


class PodClocks:
    """Corrected times of pods whose node or API server has a wrong clock.

    A binding has the API server's time. A binding in the future counts as now. Otherwise the pod
    would count as unmeasured until that time.

    Starts, failures and ends have the node's time. A new event counts as now if its time is in the
    future or too long ago. The event of a pod that was unknown before may be old: it counts as not
    before the binding and not in the future.
    """

    def __init__(self) -> None:
        self._bound_at: dict[str, _Time] = {}
        self._started_at: dict[str, float] = {}
        self._works_since: dict[str, float] = {}
        self._failed_at: dict[str, _Time] = {}

    def correct(self, before: PodRecord | None, pod: PodRecord, now: float) -> PodRecord:
        """Return a pod with corrected times of binding and failure.

        The correction of a time stays the same as long as the reported time does.

        Args:
            before: previously returned record, None for a new pod.
            pod: record from the API server.
            now: seconds since the epoch.
        """
        bound_at = self._bound(pod, now)
        failed_at = self._failed(before, pod, bound_at, now)
        if (bound_at, failed_at) == (pod.bound_at, pod.failed_at):
            return pod
        return replace(pod, bound_at=bound_at, failed_at=failed_at)

    def _bound(self, pod: PodRecord, now: float) -> float | None:
        reported, known = pod.bound_at, self._bound_at.get(pod.uid)
        if reported is None or (known is not None and known.reported == reported):
            return reported if known is None else known.corrected
        if reported <= now:
            return reported
        self._bound_at[pod.uid] = _Time(reported, now)
        return now

    def _failed(
        self, before: PodRecord | None, pod: PodRecord, bound_at: float | None, now: float
    ) -> float | None:
        reported, known = pod.failed_at, self._failed_at.get(pod.uid)
        if reported is None:
            return None
        if known is not None and known.reported == reported:
            return known.corrected
        if before is not None and not before.phase.is_terminal:
            corrected = _recent(reported, now)
        else:
            corrected = min(max(reported, bound_at or reported), now)
        self._failed_at[pod.uid] = _Time(reported, corrected)
        return corrected

    def works_since(self, pod: PodRecord) -> float | None:
        """Return when a pod's GPU containers last started; None if they have not.

        Infinite while one of them waits to start again.
        """
        if pod.last_started_at is None:
            return self.started_at(pod)
        return self._works_since.get(pod.uid, pod.last_started_at)

    def started_at(self, pod: PodRecord) -> float | None:
        """Return when a pod started, seconds since the epoch; None if it has not."""
        return self._started_at.get(pod.uid, pod.started_at)

    def note(self, before: PodRecord | None, pod: PodRecord, now: float) -> None:
        """Record the start of a pod.

        Args:
            before: previous record, None for a new pod.
            pod: current record.
            now: seconds since the epoch.
        """
        if not pod.holds_devices:
            self._started_at.pop(pod.uid, None)
            return
        self._note_last(before, pod, now)
        if pod.started_at is None or (before is not None and before.started_at is not None):
            return
        is_late = now - pod.started_at > _AGREE_SECONDS
        if pod.started_at > now or (before is not None and is_late):
            self._started_at[pod.uid] = now
        elif (pod.bound_at or 0.0) > pod.started_at:
            self._started_at[pod.uid] = min(pod.bound_at or 0.0, now)

    def _note_last(self, before: PodRecord | None, pod: PodRecord, now: float) -> None:
        """Record when a pod's containers last started."""
        last = pod.last_started_at
        if last is None or (before is not None and before.last_started_at == last):
            return
        is_late = before is not None and now - last > _AGREE_SECONDS
        at = now if is_late else min(last, now)
        self._works_since[pod.uid] = inf if last == inf else at

    def shift_back(self, seconds: float) -> None:
        """Shift corrected times back after our clock was set back by this many seconds."""
        for reported_times in (self._bound_at, self._failed_at):
            for uid, time in reported_times.items():
                reported_times[uid] = replace(time, corrected=time.corrected - seconds)
        for times in (self._started_at, self._works_since):
            times.update({uid: at - seconds for uid, at in times.items()})

    def forget(self, uid: str) -> None:
        """Forget a removed pod."""
        for times in (self._bound_at, self._started_at, self._works_since, self._failed_at):
            times.pop(uid, None)

    def ended_at(self, pod: PodRecord, now: float) -> float:
        """Return when a pod ended that has just been reported as ended, seconds since the epoch."""
        return now if pod.ended_at is None else _recent(pod.ended_at, now)


def _recent(reported: float, now: float) -> float:
    """Return the time of a new event: as reported if plausible, else now."""
    return reported if now - _AGREE_SECONDS <= reported <= now else now
