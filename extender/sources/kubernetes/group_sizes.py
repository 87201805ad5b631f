"""Read the sizes of pod groups from their objects, where the pods do not state them.

kube-scheduler's own PodGroups and Workloads, the PodGroups of the coscheduling plugin and of
Volcano, and JobSets are read.
"""

import logging
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
    WORKLOAD,
    PodGroup,
)
from extender.core.request.gpu_resources import ResourceNames, count_devices
from extender.core.untyped import int_of, mapping_of, objects_of, text_of
from extender.sources.kubernetes.objects import ObjectKind, RecordFeed

_OnGroupSize = Callable[[str, int | None], None]
"""Receives a group's key and its size, None if no object states it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupSize:
    """The size that an object states for a group.

    Attributes:
        key: as `PodGroup.size_key`.
        size: number of pods that the group needs to start.
    """

    key: str
    size: int


_Sizes = Mapping[str, int]
"""Sizes of the groups that an object describes, by their names."""


def _gang_size(raw: Mapping[str, object], _: ResourceNames) -> _Sizes:
    """Return the `minCount` of one of Kubernetes' own PodGroups, 0 without one."""
    return {_name(raw): _least_count(mapping_of(raw.get("spec")).get("schedulingPolicy"))}


def _workload_sizes(raw: Mapping[str, object], _: ResourceNames) -> _Sizes:
    """Return the `minCount` of each pod group of a Workload, which 1.35 has instead of PodGroups.

    Example:
        >>> group = {"name": "workers", "policy": {"gang": {"minCount": 4}}}
        >>> workload = {"metadata": {"name": "train"}, "spec": {"podGroups": [group]}}
        >>> _workload_sizes(workload, ResourceNames())
        {'train/workers': 4}
    """
    return {
        f"{_name(raw)}/{text_of(group.get('name'))}": _least_count(group.get("policy"))
        for group in objects_of(mapping_of(raw.get("spec")).get("podGroups"))
    }


def _least_count(policy: object) -> int:
    return int_of(mapping_of(mapping_of(policy).get("gang")).get("minCount"))


def _least_members(raw: Mapping[str, object], _: ResourceNames) -> _Sizes:
    """Return the `minMember` of a PodGroup of the coscheduling plugin or of Volcano."""
    return {_name(raw): int_of(mapping_of(raw.get("spec")).get("minMember"))}


def _job_set_size(raw: Mapping[str, object], names: ResourceNames) -> _Sizes:
    """Return the number of pods with GPUs that a JobSet runs at the same time.

    Example:
        >>> gpu = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        >>> job = {"parallelism": 4, "template": {"spec": {"containers": [gpu]}}}
        >>> workers = {"replicas": 2, "template": {"spec": job}}
        >>> job_set = {"metadata": {"name": "train"}, "spec": {"replicatedJobs": [workers]}}
        >>> _job_set_size(job_set, ResourceNames())
        {'train': 8}
    """
    stages: dict[str, int] = {}
    totals: dict[int, int] = {}
    for replicated in objects_of(mapping_of(raw.get("spec")).get("replicatedJobs")):
        # A Job depends on earlier ones of the list only; it may start once these are complete.
        stage = max(
            (
                stages.get(text_of(other.get("name")), 0) + (other.get("status") == "Complete")
                for other in objects_of(replicated.get("dependsOn"))
            ),
            default=0,
        )
        stages[text_of(replicated.get("name"))] = stage
        job = mapping_of(mapping_of(replicated.get("template")).get("spec"))
        if count_devices(mapping_of(job.get("template")), names):
            pods = _or_one(job.get("parallelism"))
            if job.get("completions") is not None:
                pods = min(pods, int_of(job.get("completions")))
            totals[stage] = totals.get(stage, 0) + _or_one(replicated.get("replicas")) * pods
    return {_name(raw): max(totals.values(), default=0)}


def _or_one(value: object) -> int:
    """Return a number of replicas or pods, which is 1 if it is missing."""
    return 1 if value is None else max(int_of(value), 0)


def _name(raw: Mapping[str, object]) -> str:
    return text_of(mapping_of(raw.get("metadata")).get("name"))


_Read = Callable[[Mapping[str, object], ResourceNames], _Sizes]

_SOURCES: Final[tuple[tuple[str, str, _Read], ...]] = (
    ("scheduling.k8s.io/v1beta1/podgroups", POD_GROUP, _gang_size),
    ("scheduling.k8s.io/v1alpha2/podgroups", POD_GROUP, _gang_size),  # 1.36
    ("scheduling.k8s.io/v1alpha1/workloads", WORKLOAD, _workload_sizes),  # 1.35
    ("scheduling.x-k8s.io/v1alpha1/podgroups", COSCHEDULING, _least_members),
    ("scheduling.volcano.sh/v1beta1/podgroups", VOLCANO, _least_members),
    ("jobset.x-k8s.io/v1alpha2/jobsets", JOB_SET, _job_set_size),
)
"""API path, kind of the groups, and how to read the sizes. A cluster serves one or two of these."""


class GroupSizes:
    """Sizes of pod groups, as their API objects state them.

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
            (_kind(path), RecordFeed(partial(self._reduce, kind, read), self._set))
            for path, kind, read in _SOURCES
        )

    def use(self, *, is_used: bool) -> None:
        """Start to report all sizes, or withdraw them and report none."""
        self.is_used = is_used
        for key, record in self._by_key.items():
            self._notify(key, record.size if is_used else None)

    def _reduce(
        self, kind: str, read: _Read, raw: Mapping[str, object]
    ) -> tuple[_GroupSize, ...] | None:
        namespace = text_of(mapping_of(raw.get("metadata")).get("namespace"))
        sizes = tuple(
            _GroupSize(key=PodGroup(kind, namespace, name).size_key, size=size)
            for name, size in read(raw, self._resources()).items()
            if 1 <= size <= MAX_SIZE
        )
        return sizes or None

    def _set(
        self, _: str, before: tuple[_GroupSize, ...] | None, record: tuple[_GroupSize, ...] | None
    ) -> None:
        for group in record or ():
            self._by_key[group.key] = group
            self._report(group.key, group.size)
        for group in before or ():
            if self._by_key.get(group.key) is group:
                del self._by_key[group.key]
                self._report(group.key, None)

    def _report(self, key: str, size: int | None) -> None:
        if self.is_used:
            self._notify(key, size)


def _kind(path: str) -> ObjectKind:
    group, version, resource = path.split("/")
    return ObjectKind(
        resource=f"{resource}.{version}.{group}",
        path=f"/apis/{path}",
        is_optional=True,
        absence_level=logging.DEBUG,
    )
