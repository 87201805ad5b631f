"""When pods started and ended, by a clock that does not depend on their node's."""

from extender.core.inventory import PodRecord

AGREE_SECONDS = 10.0
"""A kubelet says so soon what happened. A time that is off by more is of a clock that is wrong."""


class PodClocks:
    """Starts of pods whose node has another time than we; kubelets write the node's own.

    Such a start counts as now where the pod was seen before it started. Where it was not, it is not
    before the pod was bound, which the API server's clock says, and not in the future.
    """

    def __init__(self) -> None:
        self._started_at: dict[str, float] = {}

    def started_at(self, pod: PodRecord) -> float | None:
        """Return when a pod started, seconds since the epoch; None before that."""
        return self._started_at.get(pod.uid, pod.started_at)

    def note(self, before: PodRecord | None, pod: PodRecord, now: float) -> None:
        """Take over what the API server shows of a pod.

        Args:
            before: what it showed before, None where that was nothing.
            pod: what it shows now.
            now: seconds since the epoch.
        """
        if not pod.holds_devices:
            self.forget(pod.uid)
            return
        if pod.started_at is None or (before is not None and before.started_at is not None):
            return
        is_late = now - pod.started_at > AGREE_SECONDS
        if pod.started_at > now or (before is not None and is_late):
            self._started_at[pod.uid] = now
        elif (pod.bound_at or 0.0) > pod.started_at:
            self._started_at[pod.uid] = min(pod.bound_at or 0.0, now)

    def forget(self, uid: str) -> None:
        """Forget a pod that is gone."""
        self._started_at.pop(uid, None)

    def ended_at(self, pod: PodRecord, now: float) -> float:
        """Return when a pod ended of which that is news, seconds since the epoch."""
        told = now if pod.ended_at is None else pod.ended_at
        return told if now - AGREE_SECONDS <= told <= now else now
