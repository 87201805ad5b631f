"""Hypothesis strategies for fleets and GPU requests."""

from dataclasses import replace

from hypothesis import strategies as st

from extender.core.nodes.snapshot import NO_LIMIT, Tenant
from extender.core.policy import LoadFilter, Policy, Strategy, Thresholds
from extender.core.request.request import GpuRequest
from testkit.builders import GIB, Gpu, Node, gpu, node, request

ratios = st.sampled_from([0.0, 0.05, 0.1, 0.29, 0.3, 0.31, 0.5, 0.9, 1.0]) | st.floats(0, 1)
freshness = st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0])
flags = st.booleans()
rarely = st.sampled_from([False, False, False, True])


@st.composite
def gpus(draw: st.DrawFn, *, replicas: int = 1, is_shared: bool = False) -> Gpu:
    """Draw a device in any state, with telemetry known, stale, partial or missing."""
    used = draw(st.integers(0, replicas))
    assumed = draw(st.integers(0, used)) if is_shared else 0
    activity, memory = draw(freshness), draw(freshness)
    utilization = draw(ratios) if activity else 0.0
    memory_used = draw(ratios) if memory else 0.0
    return gpu(
        utilization=utilization,
        latest=draw(ratios) if activity else 0.0,
        next_hour=draw(ratios) if activity else 0.0,
        freshness=activity,
        memory_used=memory_used,
        memory_total_bytes=draw(st.sampled_from([0.0, 10 * GIB, 80 * GIB]))
        if not memory
        else 80 * GIB,
        memory_freshness=memory,
        memory_free_bytes=None if memory else 0.0,
        presumed=0.0 if activity or memory else draw(freshness),
        stress=draw(ratios),
        penalty=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        is_excluded=draw(rarely),
        is_excluded_multi=draw(rarely),
        is_out=draw(rarely),
        is_foreign=draw(rarely),
        is_in_use=draw(flags),
        used=used,
        assumed=assumed,
        assumed_shares=assumed if draw(flags) else 0,
        declared_bytes=draw(st.sampled_from([0.0, 20 * GIB, 70 * GIB])) if is_shared else 0.0,
        guessed_bytes=draw(st.sampled_from([0.0, 30 * GIB])) if assumed else 0.0,
        others_bytes=memory_used * 80 * GIB * draw(st.sampled_from([0.0, 0.5, 1.0])),
        foreign_bytes=memory_used * 80 * GIB * draw(st.sampled_from([0.0, 0.5])),
        loading=used - assumed if is_shared and draw(flags) else 0,
    )


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Draw a node of whole, time-sliced or MPS devices; its mapping and counts may disagree."""
    is_shared = draw(flags)
    replicas = draw(st.integers(1, 10)) if is_shared else 1
    devices = draw(st.lists(gpus(replicas=replicas, is_shared=is_shared), min_size=1, max_size=8))
    described = node(
        *devices,
        replicas=replicas,
        is_shared=is_shared,
        is_packed=draw(flags),
        is_mps=is_shared and draw(flags),
        is_agreed=draw(st.sampled_from([True, True, False])),
        taken=0 if is_shared else draw(st.integers(0, 3)),
        withdrawn=draw(st.integers(0, 2)),
        model_id=draw(st.integers(0, 2)),
        suspicion=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        free_millicores=draw(st.sampled_from([NO_LIMIT, 500, 16_000])),
        free_bytes=draw(st.sampled_from([NO_LIMIT, NO_LIMIT, 32 * 1024**3])),
        free_storage_bytes=draw(st.sampled_from([NO_LIMIT, NO_LIMIT, 64 * 1024**3])),
    )
    if draw(rarely):
        described = replace(described, held=draw(st.integers(0, 20)))
    held = [at for at, device in enumerate(devices) if device.used]
    leaves: bool = draw(flags)
    if held and leaves:
        leaving = draw(st.lists(st.sampled_from(held), min_size=1, unique=True))
        described = replace(described, leaving=tuple(leaving))
    return described


@st.composite
def fleets(draw: st.DrawFn, *, max_size: int = 5) -> dict[str, Node]:
    """Draw a fleet of nodes by name."""
    drawn = draw(st.lists(nodes(), min_size=1, max_size=max_size))
    return {f"node-{index}": described for index, described in enumerate(drawn)}


@st.composite
def requests(draw: st.DrawFn) -> GpuRequest:
    """Draw a GPU request."""
    return request(
        draw(st.integers(1, 9)),
        memory_bytes=draw(st.sampled_from([None, None, 9 * 1024**3, 20 * 1024**3, 90 * 1024**3])),
        requires_idle=draw(rarely),
        thresholds=Thresholds(
            utilization=draw(st.sampled_from([0.3, 0.3, 0.0, 0.8, 1.0])),
            memory=draw(st.sampled_from([0.5, 0.5, 0.0, 1.0])),
        ),
        strategy=draw(st.sampled_from(Strategy)),
        millicores=draw(st.sampled_from([0, 0, 4_000, 30_000])),
        host_bytes=draw(st.sampled_from([0, 0, 9 * 1024**3])),
        storage_bytes=draw(st.sampled_from([0, 0, 20 * 1024**3])),
        preferred_models=draw(st.sampled_from([(), (), ("H100",), ("A100", "H100")])),
    )


@st.composite
def overlays(draw: st.DrawFn, names: list[str]) -> dict[str, tuple[Tenant, ...]]:
    """Draw tentative tenants on some of the nodes, and on an unknown one."""
    chosen = draw(st.lists(st.sampled_from([*names, "node-unknown"]), unique=True))
    tenants = st.builds(
        Tenant,
        uid=st.just("tentative"),
        count=st.integers(1, 4),
        memory_bytes=st.sampled_from([None, 10 * 1024**3]),
    )
    return {name: tuple(draw(st.lists(tenants, min_size=1, max_size=3))) for name in chosen}


POLICY = Policy()
LOAD_FILTER = Policy(load_filter=LoadFilter(is_enabled=True))
policies = st.sampled_from([POLICY, LOAD_FILTER])

MODELS = ("", "nvidia h100 80gb hbm3", "nvidia a100 sxm4 40gb")
