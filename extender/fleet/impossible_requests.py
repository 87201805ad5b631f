"""Report requests that no node can satisfy: targets that do not exist, and too much memory."""

from collections.abc import Iterator

from extender.core.decision.assessment import largest_bytes
from extender.core.decision.evaluation import estimates
from extender.core.nodes.snapshot import Snapshot
from extender.core.policy import Policy
from extender.core.request.annotations import MIB, Annotation, AnnotationProblem
from extender.core.request.request import GpuRequest
from extender.fleet.known_targets import target_problems
from extender.fleet.store import DeviceStore


def request_problems(
    request: GpuRequest, snapshot: Snapshot, store: DeviceStore, policy: Policy
) -> Iterator[AnnotationProblem]:
    """Yield a problem for each part of a request that no node can satisfy.

    Args:
        request: a request from `Fleet.informed`.
        snapshot: the current snapshot.
        store: the devices.
        policy: the settings of the decision.
    """
    yield from target_problems(request, snapshot, store)
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
