"""Report requests that no node can satisfy: targets that do not exist, and too much memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from extender.core.decision.assessment import largest_bytes
from extender.core.decision.evaluation import estimates
from extender.core.nodes.node_names import near_names
from extender.core.nodes.snapshot import Pool, PoolRow, Snapshot, Telemetry
from extender.core.policy import Policy
from extender.core.quantity import MIB
from extender.core.request.annotations import Annotation, AnnotationProblem, Target, TargetPolicy
from extender.core.request.request import GpuRequest
from extender.fleet.store import DeviceStore


def request_problems(
    request: GpuRequest, snapshot: Snapshot, store: DeviceStore, policy: Policy
) -> Iterator[AnnotationProblem]:
    """Yield a problem for each part of a request that no node can satisfy.

    Args:
        request: a request from `Fleet.informed`.
    """
    yield from _target_problems(request, snapshot, store)
    pool = snapshot.pools.get(request.resource)
    if pool is None or not request.memory_bytes:
        return
    batch = pool.batch
    largest_card = batch.telemetry.memory_total_bytes.max(initial=0.0)
    if request.memory_bytes <= largest_card and not batch.is_mps.any():
        return  # the usual case, without the slower look at shares
    most = largest_bytes(batch, estimates(policy))
    if 0 < most < request.memory_bytes:
        source = request.memory_source
        yield AnnotationProblem(
            annotation=source or Annotation.GPU_MEMORY,
            value=f"{request.memory_bytes / MIB:.10g}Mi",
            allowed=f"at most {int(most // MIB)}Mi, the most that one {request.resource} here has",
            default_used="nothing, the pod waits for a larger one",
            kind=("argument" if source.startswith("-") else "variable") if source else "annotation",
        )


_MAX_LISTED: Final = 8
"""Maximum number of node names in a message."""


def aim(request: GpuRequest, snapshot: Snapshot, store: DeviceStore) -> tuple[Target, ...]:
    """Mark the unusable targets of a request, and sort targets with free GPUs first.

    Args:
        request: a request with targets.
    """
    pool = snapshot.pools.get(request.resource)
    marked = [_mark(target, pool, store) for target in request.targets]
    return tuple(sorted(marked, key=lambda target: not _is_free(target, request, snapshot, store)))


def _mark(target: Target, pool: Pool | None, store: DeviceStore) -> Target:
    """Return a target with `is_usable` set: its GPUs exist, or no source may report them yet."""
    known = rows_by_index(target.node, store)
    is_usable = not known or known.keys() >= set(target.devices)
    if not is_usable and pool is not None and target.node in pool.row_of:
        row = pool.rows[pool.row_of[target.node]]
        is_usable = not set(row.slots) <= set(store.rows_of_node(target.node))
    return replace(target, is_usable=is_usable)


def rows_by_index(node: str, store: DeviceStore) -> Mapping[int, set[int]]:
    """Return the device rows of a node by GPU index; MIG instances have the index of their card."""
    found: dict[int, set[int]] = {}
    for row in store.rows_of_node(node):
        info = store.info(row)
        if info is not None and info.index is not None:
            found.setdefault(info.index, set()).add(row)
    return found


def _is_free(target: Target, request: GpuRequest, snapshot: Snapshot, store: DeviceStore) -> bool:
    """Return whether the GPUs that a target names are free for the pod, and work."""
    if not target.devices or not target.is_usable:
        return True
    pool = snapshot.pools.get(request.resource)
    if pool is None or target.node not in pool.row_of:
        return False
    row = pool.rows[pool.row_of[target.node]]
    free = {
        slot
        for slot, used in zip(row.slots, row.used, strict=True)
        if used < row.replicas and not is_bad(slot, row, snapshot.telemetry)
    }
    known = rows_by_index(target.node, store)
    suitable = sum(not free.isdisjoint(known.get(index, ())) for index in target.devices)
    return suitable >= min(request.count, len(target.devices))


def is_bad(slot: int, row: PoolRow, telemetry: Telemetry) -> bool:
    """Return whether a device cannot work, or is used whole by processes outside Kubernetes."""
    if slot >= len(telemetry.is_excluded):  # the device is newer than the snapshot
        return False
    return bool(telemetry.is_excluded[slot] or (telemetry.is_foreign[slot] and not row.is_shared))


def _target_problems(
    request: GpuRequest, snapshot: Snapshot, store: DeviceStore
) -> Iterator[AnnotationProblem]:
    """Yield a problem for each target whose node does not exist or has no such GPU.

    Args:
        request: a request from `Fleet.informed`.
    """
    is_bound = request.target_policy is TargetPolicy.REQUIRE
    instead = "nothing, the pod waits for it" if is_bound else "every node"
    pool = snapshot.pools.get(request.resource)
    for target in request.targets:
        if pool is None or target.node not in pool.row_of:
            kind = (
                f" with {request.resource}" if target.node in snapshot.nodes else " of the cluster"
            )
            allowed = f"a node{kind}: {_listed(target.node, pool.nodes if pool else ())}"
        elif not target.is_usable:
            indices = sorted(rows_by_index(target.node, store))
            allowed = f"GPUs of {target.node}: {', '.join(map(str, indices))}"
        else:
            continue
        yield AnnotationProblem(
            annotation=Annotation.TARGET, value=str(target), allowed=allowed, default_used=instead
        )


def _listed(name: str, nodes: Sequence[str]) -> str:
    """Return the GPU nodes next to a name in alphabetical order, as one text."""
    shown = near_names(name, nodes, _MAX_LISTED)
    more = len(nodes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") or "none has such GPUs"
