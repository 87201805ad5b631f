"""Reads from `/proc/<pid>/cgroup` in which pod a process runs, whatever runtime started it."""

import re
from dataclasses import dataclass
from typing import Final

from agent.report import Place

_UID: Final = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
_STATIC_UID: Final = r"[0-9a-f]{32}"  # a static pod's UID is the hash of its manifest

_POD: Final = re.compile(
    rf"(?:^|[/-])pod({_UID}|{_STATIC_UID})(?:\.slice)?(?=[/:]|$)", re.IGNORECASE
)
"""`pod<uid>` (cgroupfs) or `…-pod<uid>.slice` (systemd; `:` where containerd writes a systemd path
for a cgroupfs runtime). Not `libpod-…` of podman."""

_CONTAINER: Final = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])", re.IGNORECASE)

_OWN_POD: Final = re.compile(r"/|(?:/\.\.)?(?:/(?!\.\.$)[^/]+)?")
"""What a private cgroup namespace shows of the reader's own pod: `/` is its container, `/../x` a
sibling of it. Anything further away has more steps up, and names its pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a process runs.

    Attributes:
        place: `UNKNOWN` where the path says neither.
        pod_uid: as the API server writes it, "" outside of pods.
        container_id: 64 hexadecimal digits; "" where the path has none.
        unit: last part of the path, such as `docker-….scope`, to show people what it is.
    """

    place: Place
    pod_uid: str = ""
    container_id: str = ""
    unit: str = ""


UNKNOWN_HOME: Final = Home(place=Place.UNKNOWN)


def parse_cgroup(text: str, *, has_private_namespace: bool = False) -> Home:
    """Say where a process runs, by its `/proc/<pid>/cgroup`.

    The outermost pod counts: what runs in a container of a container (Docker in a pod, kind in a
    pod) is that pod's.

    Args:
        text: the file: one line for each hierarchy (v1), one line (v2), or both (hybrid).
        has_private_namespace: the reader sees paths relative to its own container, so that a
            path may hide the reader's own pod.

    Example:
        >>> home = parse_cgroup(
        ...     "0::/kubepods.slice/kubepods-pod0f6b1c2d_0000_4000_8000_00000000000a.slice/x.scope"
        ... )
        >>> home.place.value, home.pod_uid
        ('pod', '0f6b1c2d-0000-4000-8000-00000000000a')
    """
    paths = [path for line in text.splitlines() if (path := _path(line))]
    for path in paths:
        found = _POD.search(path)
        if found is not None:
            container = _CONTAINER.search(path, found.end())
            return Home(
                place=Place.POD,
                pod_uid=found[1].replace("_", "-").lower(),
                container_id=container[1].lower() if container and "conmon" not in path else "",
                unit=path.rpartition("/")[2],
            )
    if not paths:
        return UNKNOWN_HOME
    path = max(paths, key=len)  # hybrid: the unused hierarchies stay at the root
    if has_private_namespace and all(_OWN_POD.fullmatch(one) for one in paths):
        return UNKNOWN_HOME
    return Home(place=Place.HOST, unit=path.rpartition("/")[2])


def is_private_namespace(own: str) -> bool:
    """Say whether `/proc/self/cgroup` shows the reader's own container as the root.

    A program that really runs in the root cgroup looks the same: its paths are then told apart
    from those of its own pod by nothing, and count as unknown where they could be either.
    """
    paths = [path for line in own.splitlines() if (path := _path(line))]
    return bool(paths) and all(path == "/" for path in paths)


def _path(line: str) -> str:
    """Return the path of a line `hierarchy:controllers:path`; it may itself hold colons."""
    parts = line.split(":", 2)
    return parts[2] if len(parts) == 3 else ""  # noqa: PLR2004 - the format's three fields
