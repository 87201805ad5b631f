"""Measure the devices that a placement makes unusable for the requests seen so far.

A node's free devices are stranded for a request that it cannot take: too few devices, replicas or
memory in one device, too little CPU or memory, another model. The stranded devices of a node are
the mean over all requests seen; a placement costs as many as it adds. This is the fragmentation
gradient of FGD (USENIX ATC '23), with requests learned from the pods instead of given.
"""

from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from extender.core.devices.gpu_models import is_model, models_in, short_model
from extender.core.nodes.seen_requests import SeenRequests
from extender.core.nodes.snapshot import Batch, Flags, Ratios, Rows
from extender.core.steps import Steps

_QUANTUM: Final = 1 / 8
"""Stranded devices are counted in steps of this size: exact differences break ties by noise. On a
public trace 0.04 and 1/8 leave the least unallocated."""


_HALF: Final = 0.5 + 1e-9
"""Rounds halves up, also values just below a half: rounding errors depend on the number of rows."""

_MANY: Final = 1 << 40
"""Larger than the number of replicas of any device."""

_STEP_ROWS: Final = 256
"""Nodes with shared devices that one step measures: less than a millisecond."""


class _HostNeeds(Protocol):
    """CPU, memory and ephemeral storage as columns."""

    @property
    def millicores(self) -> Rows:
        """CPU."""

    @property
    def memory_bytes(self) -> Rows:
        """Memory of the node."""

    @property
    def storage_bytes(self) -> Rows:
        """Ephemeral storage."""


def stranded_in_steps(
    batch: Batch,
    seen: SeenRequests,
    models: tuple[str, ...],
    *,
    count: Rows,
    memory_bytes: Ratios,
    free_bytes: Ratios,
    hosts: _HostNeeds,
) -> Steps[Ratios]:
    """Compute how many devices the pod makes unusable on each node, rounded to `_QUANTUM`.

    The number is negative if the pod takes devices that the seen requests could not use.

    Args:
        seen: the requests seen so far, at least one.
        models: model names by model id.
        count: devices or replicas that the pod requests; one per node, or one for all.
        memory_bytes: memory that it requests per device; one row per node, or one for all.
        free_bytes: free memory of each device, infinite if unknown.
        hosts: host resources that the pod requests; one per node, or one for all.
    """
    cpu = _both(batch.free_millicores, hosts.millicores)
    memory = _both(batch.free_bytes, hosts.memory_bytes)
    takes = (cpu[..., None] >= seen.millicores) & (memory[..., None] >= seen.host_bytes)
    if seen.storage_bytes is not None:
        storage = _both(batch.free_storage_bytes, hosts.storage_bytes)
        takes &= storage[..., None] >= seen.storage_bytes
    if seen.names_models:
        takes &= _suits(seen, models)[batch.model_id]
    is_shared = batch.is_shared
    if not is_shared.any():
        lost = _whole(batch, seen, takes, count)
    elif is_shared.all() and len(batch) <= _STEP_ROWS:
        lost = _shared(batch, seen, takes, count, memory_bytes, free_bytes)
    else:
        lost = _whole(batch, seen, takes, count)
        shared = np.flatnonzero(is_shared)
        for start in range(0, len(shared), _STEP_ROWS):
            rows = shared[start : start + _STEP_ROWS]
            lost[:, rows] = _shared(
                _Part(batch, rows),
                seen,
                takes[:, rows],
                count if len(count) == 1 else count[rows],
                memory_bytes if len(memory_bytes) == 1 else memory_bytes[rows],
                free_bytes[rows],
            )
            yield
    steps: Ratios = np.floor((lost[1] - lost[0]) / _QUANTUM + _HALF) * _QUANTUM
    return steps


def _both(free: Rows, requested: Rows) -> Rows:
    """Return the free amount before and after the placement, along the first axis."""
    both = np.empty((2, *free.shape), dtype=free.dtype)
    both[0] = free
    np.subtract(free, requested, out=both[1])
    return both


@lru_cache(maxsize=16)
def _suits(seen: SeenRequests, models: tuple[str, ...]) -> Flags:
    """Return whether each request accepts each model; models are the rows."""
    return np.array(
        [
            [
                not kind.models or all(_is_any(each, kind.models) for each in models_in(model))
                for kind in seen.kinds
            ]
            for model in models
        ],
        dtype=np.bool_,
    )


def _is_any(model: str, accepted: tuple[str, ...]) -> bool:
    return short_model(model) in accepted or any(is_model(model, one) for one in accepted)


def _whole(batch: Batch, seen: SeenRequests, takes: Flags, count: Rows) -> Ratios:
    """Return the number of stranded whole devices per node, before and after the placement."""
    free = np.maximum(_both(batch.allocatable - batch.held, count), 0)
    lost: Ratios = free * (1.0 - (takes & (free[..., None] >= seen.count)) @ seen.weight)
    return lost


class _Part:
    """Some rows of a batch."""

    def __init__(self, batch: Batch, rows: Rows) -> None:
        self.used = batch.used[rows]
        self.present = batch.present[rows]
        self.replicas = batch.replicas[rows]
        self.is_packed = batch.is_packed[rows]


def _shared(
    batch: Batch | _Part,
    seen: SeenRequests,
    takes: Flags,
    count: Rows,
    memory_bytes: Ratios,
    free_bytes: Ratios,
) -> Ratios:
    """Return the stranded parts of shared devices, before the placement and after it.

    Replicas of one request are assumed to come from as few devices as possible.
    """
    replicas = batch.replicas[:, None]
    left = (replicas - batch.used) * batch.present
    chosen = _chosen(batch, left, count)
    states = np.maximum(_both(left, np.minimum(count, batch.replicas)[:, None] * chosen), 0)
    usable = states[..., None] >= np.minimum(seen.part_count, replicas)[:, None, :]
    if seen.part_bytes is not None:
        room = np.array([free_bytes, free_bytes - np.where(chosen, memory_bytes, 0.0)])
        usable &= room[..., None] >= seen.part_bytes
    parts = states / replicas
    fitting = np.einsum("snd,sndk->snk", parts, usable)
    devices = -(-seen.part_count // replicas)
    if (devices > 1).any():
        fitting[usable.sum(axis=2) < devices] = 0.0
    lost: Ratios = parts.sum(axis=2) - (takes * fitting[..., seen.parts]) @ seen.weight
    return lost


def _chosen(batch: Batch | _Part, left: Rows, count: Rows) -> Flags:
    """Return the devices that the device plugin allocates to the pod.

    A packed plugin takes the fullest device with room, any other the emptiest one.
    """
    devices = -(-count // batch.replicas)
    rank = -left
    if batch.is_packed.any():
        fits = left >= np.minimum(count, batch.replicas)[:, None]
        rank = np.where(batch.is_packed[:, None] & fits, left - _MANY, rank)
    if not (devices > 1).any():
        first: Flags = np.arange(left.shape[1]) == rank.argmin(axis=1)[:, None]
        return first
    order = np.argsort(np.argsort(rank, axis=1, kind="stable"), axis=1, kind="stable")
    found: Flags = order < devices[:, None]
    return found
