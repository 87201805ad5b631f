"""Many nodes in all states, and requests of all kinds, the same in every run.

`python -m tests.extender.core.crowd` writes the decisions on them to `golden.txt`, after a change
of the decision.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from extender.core.decision.allocation import DeviceTenancy
from extender.core.decision.decision import decide
from extender.core.decision.evaluation import EvaluationInputs, Overlay, device_requests
from extender.core.decision.filtering import Code
from extender.core.decision.group_fit import GroupNeed, Topology
from extender.core.decision.verdicts import explain, gather
from extender.core.devices.topology import Alignment
from extender.core.nodes.inventory import ClaimedDevice
from extender.core.nodes.seen_requests import RequestKind, SeenRequests
from extender.core.nodes.snapshot import NO_LIMIT, PoolRow, Tenant
from extender.core.policy import Assumed, Policy, SharedPolicy, Strategy, Thresholds
from extender.core.request.gpu_resources import ContainerDevices
from extender.core.request.request import GpuRequest
from testkit.builders import GIB, GPU, NOW, Gpu, Node, gpu, request, snapshot_of
from tests.extender.core import holding

GOLDEN = Path(__file__).parent / "golden.txt"
POLICY = Policy(mps_share_bytes=int(25 * GIB))
MODELS = (
    "",
    "nvidia h100 80gb hbm3",
    "nvidia a100 sxm4 40gb",
    "nvidia a100 sxm4 40gb | nvidia h100 80gb hbm3",
)


def crowd(count: int, seed: int = 1) -> dict[str, Node]:
    """Return nodes by name."""
    draw = random.Random(seed)
    return {f"node-{at:03}": _node(draw) for at in range(count)}


def _node(draw: random.Random) -> Node:
    pick = draw.choice
    is_shared = pick([False, True])
    replicas = pick([2, 4, 10]) if is_shared else 1
    mood = {
        "is_shared": is_shared,
        "is_well": pick([False, True, True]),
        "is_calm": pick([False, True]),
    }
    devices = [_gpu(draw, replicas, **mood) for _ in range(pick([1, 2, 4, 8]))]
    half = 1 << len(devices) // 2
    halves = (half - 1, (1 << len(devices)) - half) if len(devices) > 1 else (1,)
    sets = tuple((*halves, *[0] * len(devices))[: len(devices)])
    held = [at for at, device in enumerate(devices) if device.used]
    described = Node(
        gpus=tuple(devices),
        replicas=replicas,
        is_shared=is_shared,
        is_packed=pick([False, True]),
        is_mps=is_shared and pick([False, True]),
        is_agreed=pick([True, True, False]),
        is_presumed=pick([False, True]),
        is_reconfiguring=pick([False] * 29 + [True]),
        taken=0 if is_shared else pick([0, 0, 1]),
        just_freed=0 if is_shared else pick([0, 0, 1]),
        withdrawn=pick([0, 0, replicas]),
        model_id=pick(range(len(MODELS))),
        suspicion=pick([0.0, 0.0, 0.5]),
        joined=() if is_shared else pick([(), sets]),
        numa=() if is_shared else pick([(), sets]),
        alignment=pick([Alignment.NONE, Alignment.NONE, *Alignment]),
        free_millicores=pick([NO_LIMIT, 5_000, 64_000]),
        free_bytes=pick([NO_LIMIT, int(20 * GIB), int(900 * GIB)]),
        free_storage_bytes=pick([NO_LIMIT, int(30 * GIB)]),
        leaving=tuple(draw.sample(held, pick([0, 1, len(held)]))) if held else (),
    )
    full = len(devices) * replicas
    described = replace(described, allocatable=full - min(described.withdrawn, full))
    if pick([False] * 4 + [True]):
        described = replace(described, held=pick(range(full + 1)))
    return described


def _gpu(
    draw: random.Random, replicas: int, *, is_shared: bool, is_well: bool, is_calm: bool
) -> Gpu:
    pick = draw.choice
    known = [1.0] * 8 + [0.5, 0.0] if is_calm else [1.0, 1.0, 1.0, 0.5, 0.0]
    activity, memory = pick(known), pick(known)
    used = pick(range(replicas + 1)) if is_shared else pick([0, 0, 1])
    assumed = pick(range(used + 1)) if is_shared else 0
    values: dict[str, Any] = {"freshness": activity, "memory_freshness": memory}
    if activity:
        values["utilization"] = pick([0.0, 0.1] if is_calm else [0.0, 0.3, 0.5, 0.9])
        activities = [None, 0.05, 0.2] if is_calm else [None, 0.0, 0.3, 0.6, 1.0]
        values |= {name: pick(activities) for name in ("latest", "peak", "next_hour")}
    if memory:
        values["memory_used"] = in_use = pick([0.0, 0.1] if is_calm else [0.0, 0.5, 0.6, 0.95])
        values["others_bytes"] = others = in_use * 80 * GIB * pick([0.0, 0.5, 1.0])
        values["foreign_bytes"] = others * pick([0.0, 0.0, 0.5])
    else:
        values |= {"memory_total_bytes": pick([0.0, 80 * GIB]), "memory_free_bytes": 0.0}
    if not activity and not memory:
        values["presumed"] = pick([0.0, 0.5, 1.0])
    if is_shared:
        values |= {"assumed": assumed, "loading": pick([0, used - assumed])}
        values["declared_bytes"] = pick([0.0, 0.0, 20 * GIB, 70 * GIB])
        values["assumed_shares"] = pick([0, assumed])
        values["guessed_bytes"] = pick([0.0, 15 * GIB]) if assumed else 0.0
    if not is_well:
        rarities = {"is_excluded": 8, "is_excluded_multi": 8, "is_out": 4, "is_foreign": 3}
        values |= {name: pick([*[False] * most, True]) for name, most in rarities.items()}
        values["is_in_use"] = pick([False, True])
        values |= {"penalty": pick([0.0, 0.0, 0.5]), "stress": pick([0.0, 0.5])}
    return gpu(used=used, **values)


REQUESTS: tuple[GpuRequest, ...] = (
    request(),
    request(2, strategy=Strategy.SPREAD, memory_bytes=int(20 * GIB)),
    request(4, strategy=Strategy.PACK, millicores=4_000, host_bytes=int(10 * GIB)),
    request(1, memory_share=0.5, requires_idle=True),
    request(2, expected_bytes=int(30 * GIB), preferred_models=("H100", "A100")),
    request(1, strategy=Strategy.PACK, required_models=("H100",), storage_bytes=int(20 * GIB)),
    request(8, thresholds=Thresholds(utilization=0.6, memory=0.8), millicores=4_000),
    request(
        3,
        containers=((GPU, (ContainerDevices(2, is_passed_on=True), ContainerDevices(1))),),
        memory_bytes=int(50 * GIB),
    ),
)

SEEN = SeenRequests.of(
    {
        RequestKind(1): 4.0,
        RequestKind(1, memory_bytes=int(30 * GIB), millicores=2_000): 2.0,
        RequestKind(4, host_bytes=int(8 * GIB), models=("h100",)): 2.0,
        RequestKind(2, models=("h100",)): 2.0,
        RequestKind(8, storage_bytes=int(10 * GIB)): 1.0,
    }
)


def overlay(names: list[str], seed: int) -> dict[str, tuple[Tenant, ...]]:
    """Return tentative tenants on a third of the nodes."""
    draw = random.Random(seed)
    return {
        name: tuple(
            Tenant(
                uid=f"uid-{at}",
                count=draw.choice([1, 2]),
                memory_bytes=draw.choice([None, 0, int(10 * GIB)]),
                expected_bytes=draw.choice([None, int(5 * GIB)]),
            )
            for at in range(draw.choice([1, 2]))
        )
        for name in draw.sample(names, len(names) // 3)
    }


def inputs_of(requested: GpuRequest, tenants: Overlay) -> EvaluationInputs:
    """Return the inputs of an evaluation for a pod with one resource."""
    ((_, devices),) = device_requests(requested)
    return EvaluationInputs(request=requested, devices=devices, policy=POLICY, overlay=tenants)


def golden_lines() -> Iterator[str]:
    """Yield decisions on nodes, on groups of pods, and allocations, a line each."""
    nodes = crowd(60, seed=2)
    snapshot = snapshot_of(nodes, models=MODELS, seen=SEEN)
    for number, requested in enumerate(REQUESTS):
        inputs = inputs_of(requested, overlay(list(nodes), number))
        for one in explain(gather(snapshot, snapshot.pools[GPU], inputs, nodes)):
            code = next(code.name for code in Code if code.text == one.rejection)
            states = " ".join(device.state for device in one.devices)
            counts = f"{one.landing} {one.idle} {one.needed} {one.taken}"
            yield (
                f"{number} {one.node} {code} {one.score:.9f} {one.chance:.6f} {counts}: "
                f"{one.reason or '-'}: {states}"
            )
    for number, (requested, need) in enumerate(_groups(sorted(nodes))):
        overlays = {GPU: overlay(list(nodes), number)}
        candidates = tuple(nodes) if number % 2 else (*nodes, "unknown")
        decision = decide(snapshot, requested, candidates, POLICY, overlays=overlays, group=need)
        fit = decision.group
        assert fit is not None
        units = [round(each, 6) for each in fit.units]
        places = [(one.label, one.name, one.pods) for one in fit.fitting]
        yield f"group {number}: {fit.too_few} {places} {units} {fit.words}"
        yield f"group {number}: {fit.ranks.tolist()} {np.bincount(decision.codes).tolist()}"
        yield f"group {number}: {' '.join(decision.candidates[at] for at in decision.order[:20])}"
    draw = random.Random(4)
    for number in range(120):
        yield f"allocation {number}: {_ALLOCATED(_allocated(draw))}"


_ALLOCATED = attrgetter(
    *("used", "assumed", "assumed_shares", "declared_bytes", "undeclared", "guessed_bytes"),
    *("kindred", "loading", "allocatable", "withdrawn", "held", "taken"),
    *("is_shared", "is_packed", "is_mps", "is_agreed", "serves_claims"),
)


def _groups(names: list[str]) -> Iterator[tuple[GpuRequest, GroupNeed]]:
    """Yield requests of pods in groups, with the needs of the groups."""
    racks = [f"rack-{at % 9}" for at in range(len(names))]
    zones = [f"zone-{at % 9 // 5}" if at % 10 else "" for at in range(len(names))]
    near = Topology.of({"x/rack": racks, "x/zone": zones})
    may_go = np.array([at % 3 > 0 for at in range(len(names))])
    one, two = request(), request(2, strategy=Strategy.SPREAD)
    placed = {names[4]: 1, names[40]: 2, "gone": 1}
    yield one, GroupNeed(name="a", size=3, rest=3, total=3, topology=near)
    yield two, GroupNeed(name="b", size=8, rest=16, total=1600, topology=near, may_go=may_go)
    yield two, GroupNeed(name="c", size=9, rest=10, placed=placed, topology=near)
    yield one, GroupNeed(name="d", size=90, rest=300, total=3000, is_uniform=False, may_go=may_go)
    yield two, GroupNeed(name="e", size=40, rest=79, total=79, is_uniform=False, topology=near)
    model = request(required_models=("H100",), memory_bytes=int(60 * GIB))
    yield model, GroupNeed(name="f", size=900, rest=900, total=900, topology=near)


def _allocated(draw: random.Random) -> PoolRow:
    """Return the row of a node with some pods."""
    pick = draw.choice
    replicas, count = pick([1, 1, 4]), pick([1, 2, 3, 4])
    claims = (ClaimedDevice(uuid="GPU-1", name="gpu-1"), ClaimedDevice(uuid="", name="gpu-2"))
    pods = []
    for name in "abcd"[: pick([0, 1, 2, 3, 4])]:
        requested = pick([0, 1, 1, 2, 3])
        at = NOW - pick([0, 60, 120, 900, 5000])
        has_claims = pick([False, False, True])
        changes = {
            "bound_at": at - pick([0, 1]),
            "started_at": pick([None, at, at]),
            "last_started_at": pick([None, None, NOW]),
            "memory_bytes": pick([None, None, int(10 * GIB)]),
            "lasting": pick([None, None, {GPU: requested // 2}]),
            "has_claims": has_claims,
            "has_gpu_claims": has_claims and pick([False, True]),
            "claimed": pick([None, (), claims[:1], claims]) if has_claims else None,
        }
        pods.append(holding.pod(name, requested, **changes))
    held = [tuple(one.name for one in pods if pick([False, True])) for _ in range(count)]
    tenancy = DeviceTenancy(
        is_mapped=pick([True, True, False]),
        assumed=Assumed(),
        shared_policy=pick([*SharedPolicy]),
        is_out=np.array([pick([False, False, True]) for _ in range(count)]),
        expected=pick([lambda _: None, lambda _: int(5 * GIB)]),
    )
    return holding.row_of(
        held,
        *pods,
        replicas=replicas,
        tenancy=tenancy,
        measured_at=tuple(NOW - pick([0, 0, 100]) for _ in range(count)),
        allocatable=count * replicas - pick([0, 0, replicas]),
        serving={
            "is_by_claims": pick([False, True]),
            "is_mps": replicas > 1 and pick([False, True]),
        },
    )


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{line}\n" for line in golden_lines()), encoding="utf-8")
