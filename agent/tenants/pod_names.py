"""Find pod names by UID in the kubelet's log directory; needs no API server and no RBAC permission.

The kubelet keeps a directory `<namespace>_<name>_<uid>` for every pod of its node. Only the names
of these directories are read, never a log file.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SECONDS_BETWEEN_READS: Final = 1.0
_SECONDS_A_UID_COUNTS: Final = 5.0  # the interval of kubelet calls; reading 250 pods takes 0.4 ms

_MANIFEST_HASH: Final = re.compile(r"[0-9a-f]{32}")
"""UID of a static pod on its node; its mirror pod in the API server has another UID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodName:
    """Namespace and name of a pod."""

    namespace: str
    pod: str


class PodNames:
    """Names of this node's pods by UID, and UIDs by name.

    An unknown UID or name triggers a new read of the directory. The name of a UID never changes.
    But a StatefulSet recreates pods under the same name, so UIDs are read again periodically.

    Args:
        directory: the kubelet's log directory; None to look up nothing.
        clock: monotonic time in seconds.
    """

    def __init__(self, directory: Path | None, *, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._names: dict[str, PodName] = {}
        self._uids: dict[PodName, list[str]] = {}
        self._read_at: float | None = None

    def name(self, uid: str) -> PodName | None:
        """Return the name of a pod; None if the directory is missing or does not list the UID."""
        if uid not in self._names:
            self._read_after(_SECONDS_BETWEEN_READS)
        return self._names.get(uid)

    def uid(self, name: PodName) -> str:
        """Return the UID of a pod in the API server.

        Returns "" if the UID is unknown, if several pods have had the name, or if the pod is
        static.
        """
        is_known = name in self._uids
        self._read_after(_SECONDS_A_UID_COUNTS if is_known else _SECONDS_BETWEEN_READS)
        uids = self._uids.get(name, ())
        return uids[0] if len(uids) == 1 and not _MANIFEST_HASH.fullmatch(uids[0]) else ""

    def _read_after(self, seconds: float) -> None:
        """Read the directory if the last read is at least `seconds` ago."""
        now = self._clock()
        if self._directory is None or (self._read_at is not None and now - self._read_at < seconds):
            return
        self._read_at = now
        try:
            entries = [entry.name for entry in self._directory.iterdir()]
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
