"""Parse `/proc/<pid>/cgroup` to find the pod of a process, for all container runtimes."""

import re
from dataclasses import dataclass
from typing import Final

from agent.report.contract import MAX_NAME, Place
from extender.runtime.terminal_escapes import plain_text

_UID: Final = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
_STATIC_UID: Final = r"[0-9a-f]{32}"  # a static pod's UID is the hash of its manifest

_POD: Final = re.compile(
    rf"(?:^|[/-])pod({_UID}|{_STATIC_UID})(?:\.slice)?(?=[/:]|$)", re.IGNORECASE
)
"""Matches `pod<uid>` (cgroupfs) and `…-pod<uid>.slice` (systemd); with `:` if containerd writes a
systemd path for a cgroupfs runtime. Does not match podman's `libpod-…`."""

_CONTAINER: Final = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])", re.IGNORECASE)

_OWN_POD: Final = re.compile(r"/|(?:/\.\.)?(?:/(?!\.\.$)[^/]+)?")
"""Paths inside the reader's own pod, seen from a private cgroup namespace: `/` is the reader's
container, `/../x` a sibling container. Other paths start with more `..` and name their pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLocation:
    """The pod or host service that a process runs in.

    Attributes:
        place: `UNKNOWN` if the path shows neither pod nor host.
        pod_uid: UID in the API server's format, "" outside pods.
        container_id: 64 hexadecimal digits, "" if the path has none.
        unit: last component of the path for display, such as `docker-….scope`.
    """

    place: Place
    pod_uid: str = ""
    container_id: str = ""
    unit: str = ""


UNKNOWN_LOCATION: Final = ProcessLocation(place=Place.UNKNOWN)


def parse_cgroup(text: str, *, has_private_namespace: bool = False) -> ProcessLocation:
    """Parse a `/proc/<pid>/cgroup` file to the location of its process.

    The outermost pod counts: a nested container (Docker or kind in a pod) belongs to that pod.

    Args:
        text: content of the file: one line for each hierarchy (v1), one line (v2), or both
            (hybrid).
        has_private_namespace: the reader sees paths relative to its own container, so a path may
            hide the reader's own pod.

    Example:
        >>> location = parse_cgroup(
        ...     "0::/kubepods.slice/kubepods-pod0f6b1c2d_0000_4000_8000_00000000000a.slice/x.scope"
        ... )
        >>> location.place.value, location.pod_uid
        ('pod', '0f6b1c2d-0000-4000-8000-00000000000a')
    """
    paths = _paths(text)
    for path in paths:
        found = _POD.search(path)
        if found is not None:
            container = _CONTAINER.search(path, found.end())
            return ProcessLocation(
                place=Place.POD,
                pod_uid=found[1].replace("_", "-").lower(),
                container_id=container[1].lower() if container and "conmon" not in path else "",
                unit=_unit(path),
            )
    if not paths:
        return UNKNOWN_LOCATION
    path = max(paths, key=len)  # in hybrid mode, unused hierarchies have the path "/"
    if has_private_namespace and all(_OWN_POD.fullmatch(one) for one in paths):
        return UNKNOWN_LOCATION
    return ProcessLocation(place=Place.HOST, unit=_unit(path))


def is_private_namespace(own: str) -> bool:
    """Return whether `/proc/self/cgroup` shows the reader's own container as the root.

    A process in the real root cgroup looks the same. Its paths cannot be distinguished from those
    of its own pod, so ambiguous paths count as unknown.
    """
    paths = _paths(own)
    return bool(paths) and all(path == "/" for path in paths)


def _paths(text: str) -> list[str]:
    # The kernel refuses newlines in names, but no other character that ends a line in Python.
    return [path for line in text.split("\n") if (path := _path(line))]


def _path(line: str) -> str:
    """Return the path of a line `hierarchy:controllers:path`; the path may contain colons."""
    parts = line.split(":", 2)
    return parts[2] if len(parts) == 3 else ""  # noqa: PLR2004 - the format's three fields


def _unit(path: str) -> str:
    """Return the last component: its characters are free, and it is shown and is a label."""
    return plain_text(path.rpartition("/")[2], MAX_NAME)
