"""Finds a pod's name by its UID in the kubelet's log directory: no API server, no permission.

The kubelet keeps a directory `<namespace>_<name>_<uid>` for every pod of its node there. Only the
names of these directories are read, never a log.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

POD_LOGS: Final = Path("/var/log/pods")
_SECONDS_BETWEEN_READS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodName:
    """A pod, as people call it."""

    namespace: str
    pod: str


class PodNames:
    """Names of this node's pods by UID; the directory is read again when an unknown UID comes."""

    def __init__(self, directory: Path | None = POD_LOGS, *, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._names: dict[str, PodName] = {}
        self._uids: dict[PodName, list[str]] = {}
        self._read_at: float | None = None

    def name(self, uid: str) -> PodName | None:
        """Return a pod's name; None where the directory is not mounted, or has no such pod."""
        if uid not in self._names and self._may_read():
            self._read()
        return self._names.get(uid)

    def uid(self, name: PodName) -> str:
        """Return a pod's UID; "" where it is unknown, or several pods had that name."""
        if name not in self._uids and self._may_read():
            self._read()
        uids = self._uids.get(name, ())
        return uids[0] if len(uids) == 1 else ""

    def _may_read(self) -> bool:
        now = self._clock()
        if self._read_at is not None and now - self._read_at < _SECONDS_BETWEEN_READS:
            return False
        self._read_at = now
        return self._directory is not None

    def _read(self) -> None:
        try:
            entries = [entry.name for entry in (self._directory or POD_LOGS).iterdir()]
        except OSError:
            return
        self._names = {
            parts[2].lower(): PodName(namespace=parts[0], pod=parts[1])
            for entry in entries
            if len(parts := entry.split("_")) == 3  # noqa: PLR2004 - namespace, name and UID have no "_"
        }
        self._uids = {}
        for uid, name in self._names.items():
            self._uids.setdefault(name, []).append(uid)
