"""Read the policy of the kubelet's Topology Manager from the kubelet's command line.

No API returns it without further rights. A command line in `/proc` is readable by all processes,
and so is the kubelet's configuration file if it is mounted under its own path.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from agent.report.contract import Place
from agent.tenants.cgroup import parse_cgroup
from worker_device.process_stat import process_stat, small_file

_NAME: Final = "kubelet"
AGAIN_SECONDS: Final = 300.0
"""Interval of reads: the policy changes only when the kubelet restarts."""

_FLAG: Final = re.compile(r"--(topology-manager-policy|topology-manager-scope|config)=?(.*)")
_FIELD: Final = re.compile(
    r"""^\s*["']?topologyManager(Policy|Scope)["']?:\s*["']?([a-z-]+)""", re.MULTILINE
)

Topology = tuple[str, str]
"""Policy and scope of the Topology Manager in the kubelet's words; "" if unknown."""

UNKNOWN: Final[Topology] = ("", "")


class KubeletFlags:
    """Reads the kubelet's policy periodically.

    Args:
        proc: mount point of the host's `/proc`, None if it is not read.
        clock: monotonic time in seconds.
    """

    def __init__(self, proc: Path | None, clock: Callable[[], float]) -> None:
        self._proc = proc
        self._clock = clock
        self._read_at: float | None = None
        self._topology = UNKNOWN

    def topology(self) -> Topology:
        """Return the policy and scope as last read."""
        now = self._clock()
        if self._proc is not None and (
            self._read_at is None or now - self._read_at >= AGAIN_SECONDS
        ):
            self._read_at, self._topology = now, read_topology(self._proc)
        return self._topology


def read_topology(proc: Path) -> Topology:
    """Return the policy and scope of the host's kubelet; `UNKNOWN` unless it names a policy.

    Args:
        proc: mount point of the host's `/proc`.
    """
    arguments = next(_command_lines(proc), ("",))
    flags: dict[str, str] = {}
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=True):
        found = _FLAG.fullmatch(argument)
        if found is not None:
            flags[found[1]] = found[2] or following
    text = small_file(flags["config"]) if "config" in flags else None
    fields = dict(_FIELD.findall(text or ""))
    policy = flags.get("topology-manager-policy") or fields.get("Policy", "")
    scope = flags.get("topology-manager-scope") or fields.get("Scope", "")
    return (policy, scope) if policy else UNKNOWN


def _command_lines(proc: Path) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of processes named kubelet that run in no pod."""
    try:
        pids = [int(path.name) for path in proc.iterdir() if path.name.isdecimal()]
    except OSError:
        return
    for pid in sorted(pids):
        stat = process_stat(pid, proc)
        if stat is None or stat.name != _NAME:
            continue
        in_pod = parse_cgroup(small_file(f"{proc}/{pid}/cgroup") or "").place is Place.POD
        if not in_pod:
            yield tuple((small_file(f"{proc}/{pid}/cmdline") or "").split("\0"))
