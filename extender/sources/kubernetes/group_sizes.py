"""Read the sizes of pod groups from their objects, where the pods do not state them.

kube-scheduler's own and the coscheduling plugin's PodGroups, Volcano's, and JobSets are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from extender.core.nodes.pod_groups import (
    COSCHEDULING,
    JOB_SET,
    MAX_SIZE,
    POD_GROUP,
    VOLCANO,
    PodGroup,
)
from extender.core.request.gpu_resources import ResourceNames, count_devices
from extender.core.untyped import int_of, mapping_of, objects_of, text_of
from extender.sources.kubernetes.objects import ObjectKind, RecordFeed

_OnGroupSize = Callable[[str, int | None], None]
"""Receives a group's key and its size, None if no object states it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupSize:
    """The size that a group's object states.

    Attributes:
        key: as in `PodGroup`.
        size: number of pods that the group needs to start.
    """

    key: str
    size: int


def _gang_size(raw: Mapping[str, object], _: ResourceNames) -> int:
    """Return the `minCount` of one of Kubernetes' own PodGroups, 0 without one."""
    policy = mapping_of(mapping_of(raw.get("spec")).get("schedulingPolicy"))
    return int_of(mapping_of(policy.get("gang")).get("minCount"))


def _least_members(raw: Mapping[str, object], _: ResourceNames) -> int:
    """Return the `minMember` of a PodGroup of the coscheduling plugin or of Volcano."""
    return int_of(mapping_of(raw.get("spec")).get("minMember"))


def _job_set_size(raw: Mapping[str, object], names: ResourceNames) -> int:
    """Return the number of pods with GPUs that a JobSet runs at the same time.

    Example:
        >>> gpu = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        >>> job = {"parallelism": 4, "template": {"spec": {"containers": [gpu]}}}
        >>> workers = {"replicas": 2, "template": {"spec": job}}
        >>> _job_set_size({"spec": {"replicatedJobs": [workers]}}, ResourceNames())
        8
    """
    total = 0
    for replicated in objects_of(mapping_of(raw.get("spec")).get("replicatedJobs")):
        job = mapping_of(mapping_of(replicated.get("template")).get("spec"))
        if count_devices(mapping_of(job.get("template")), names):
            pods = _or_one(job.get("parallelism"))
            if job.get("completions") is not None:
                pods = min(pods, int_of(job.get("completions")))
            total += _or_one(replicated.get("replicas")) * pods
    return total


def _or_one(value: object) -> int:
    """Return a number of replicas or pods, which is 1 if it is missing."""
    return 1 if value is None else max(int_of(value), 0)


_Size = Callable[[Mapping[str, object], ResourceNames], int]

_SOURCES: Final[tuple[tuple[str, str, _Size], ...]] = (
    ("scheduling.k8s.io/v1beta1/podgroups", POD_GROUP, _gang_size),
    ("scheduling.x-k8s.io/v1alpha1/podgroups", COSCHEDULING, _least_members),
    ("scheduling.volcano.sh/v1beta1/podgroups", VOLCANO, _least_members),
    ("jobset.x-k8s.io/v1alpha2/jobsets", JOB_SET, _job_set_size),
)
"""API path, kind of the groups, and how to read the size."""


class GroupSizes:
    """Sizes of groups by their objects.

    Args:
        notify: receives each change.
        resources: returns the names of the GPU resources.
        is_used: whether changes are reported, by the settings.

    Attributes:
        is_used: as the argument; `use` changes it.
        feeds: receiver of the objects of each kind.
    """

    def __init__(
        self, notify: _OnGroupSize, resources: Callable[[], ResourceNames], *, is_used: bool
    ) -> None:
        self._notify = notify
        self._resources = resources
        self._by_key: dict[str, _GroupSize] = {}
        self.is_used = is_used
        self.feeds = tuple(
            (_kind(path), RecordFeed(partial(self._reduce, kind, size), self._set))
            for path, kind, size in _SOURCES
        )

    def use(self, *, is_used: bool) -> None:
        """Report all sizes from now on, or take them back and report none."""
        self.is_used = is_used
        for key, record in self._by_key.items():
            self._notify(key, record.size if is_used else None)

    def _reduce(self, kind: str, size: _Size, raw: Mapping[str, object]) -> _GroupSize | None:
        metadata = mapping_of(raw.get("metadata"))
        group = PodGroup(kind, text_of(metadata.get("namespace")), text_of(metadata.get("name")))
        count = size(raw, self._resources())
        if not 1 <= count <= MAX_SIZE:
            return None
        return _GroupSize(key=group.key, size=count)

    def _set(self, _: str, before: _GroupSize | None, record: _GroupSize | None) -> None:
        if record is not None:
            self._by_key[record.key] = record
            self._report(record.key, record.size)
        elif before is not None and self._by_key.get(before.key) is before:
            del self._by_key[before.key]
            self._report(before.key, None)

    def _report(self, key: str, size: int | None) -> None:
        if self.is_used:
            self._notify(key, size)


def _kind(path: str) -> ObjectKind:
    group, _, resource = path.split("/")
    return ObjectKind(resource=f"{resource}.{group}", path=f"/apis/{path}", is_optional=True)
