"""Many nodes in all states, and requests of all kinds, the same in every run."""

import random
from dataclasses import replace
from typing import Any

from extender.core.decision.evaluation import EvaluationInputs, Overlay, device_requests
from extender.core.devices.topology import Alignment
from extender.core.nodes.seen_requests import RequestKind, SeenRequests
from extender.core.nodes.snapshot import NO_LIMIT, Tenant
from extender.core.policy import Policy, Strategy, Thresholds
from extender.core.request.gpu_resources import ContainerDevices
from extender.core.request.request import GpuRequest
from testkit.builders import GIB, GPU, Gpu, Node, gpu, request

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
