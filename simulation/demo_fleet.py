"""Build ready-made fleets: a dozen nodes for the demo, thousands for benchmarks."""

import random
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from simulation.devices import Load, Loss, PodRef
from simulation.fleet import SimulatedFleet
from simulation.models import A10, A100_40GB, GIB, H100, H200, L40S, T4, V100
from simulation.nodes import EXPORTER_4_8, GPU_RESOURCE, NodeSpec, Sharing

_BUSY_SHARE: Final = 0.6
"""Share of a big fleet's devices with a tenant."""

_STALE_AGE_SECONDS: Final = 240.0
"""Age of the stale node's last sample: no longer fresh, but still remembered."""

_SHARED: Final = partial(
    NodeSpec,
    cards=2,
    sharing=Sharing.TIME_SLICING,
    replicas=4,
    is_renamed=True,
    exporter=EXPORTER_4_8,
)

_DEMO_NODES: Final = (
    NodeSpec(name="gpu-h100-01", model=H100, description="idle"),
    NodeSpec(name="gpu-h100-02", model=H100, description="every GPU trains"),
    NodeSpec(name="gpu-h100-03", model=H100, description="4 train, 1 serves, 2 foreign"),
    NodeSpec(name="gpu-h200-01", model=H200, cards=4, description="half of its GPUs train"),
    NodeSpec(
        name="gpu-a100-01", model=A100_40GB, cards=4, description="a GPU fell off the bus (XID 79)"
    ),
    NodeSpec(
        name="gpu-a100-mig-01",
        model=A100_40GB,
        cards=2,
        mig=(("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"),) * 2,
        description="MIG: 4 instances on each GPU",
    ),
    NodeSpec(name="gpu-l40s-01", model=L40S, cards=4, description="all held, unused for hours"),
    NodeSpec(name="gpu-v100-01", model=V100, cards=4, description="idle, an old model"),
    NodeSpec(
        name="gpu-v100-02", model=V100, cards=4, description="telemetry stopped 4 minutes ago"
    ),
    _SHARED(name="gpu-a10-01", model=A10, description="time-sliced x4, saturated"),
    _SHARED(name="gpu-a10-02", model=A10, description="time-sliced x4, quiet tenants"),
    _SHARED(name="gpu-t4-01", model=T4, description="time-sliced x4, memory full"),
    _SHARED(
        name="gpu-l40s-mps-01",
        model=L40S,
        sharing=Sharing.MPS,
        description="MPS x4: 1/4 of the memory each",
    ),
)


def demo_fleet(clock: Callable[[], float] = time.time) -> SimulatedFleet:
    """Build the demo's fleet: a dozen nodes with running pods."""
    fleet = SimulatedFleet(clock=clock)
    for number, spec in enumerate(_DEMO_NODES, start=11):
        fleet.add(replace(spec, address=f"10.0.0.{number}"))
    _fill_whole_nodes(fleet)
    _fill_shared_nodes(fleet)
    _fill_mig_node(fleet)
    fleet.kill_device("gpu-a100-01", 1, Loss.XID_79)
    fleet.silence("gpu-v100-02", age_seconds=_STALE_AGE_SECONDS)
    # The pods above have loaded their models; pods that the demo places must load them first.
    fleet.warm_up_seconds = 20.0
    return fleet


def tenant(namespace: str, name: str, container: str = "main") -> PodRef:
    """Return a pod with a UID that depends only on its name."""
    uid = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{namespace}/{name}"))
    return PodRef(namespace=namespace, name=name, uid=uid, container=container)


def _fill_whole_nodes(fleet: SimulatedFleet) -> None:
    training = Load(utilization=0.97, memory_bytes=68 * GIB)
    fleet.place(tenant("research", "llama-pretrain-0"), "gpu-h100-02", GPU_RESOURCE, 8, training)
    fleet.place(tenant("research", "llama-finetune-0"), "gpu-h100-03", GPU_RESOURCE, 4, training)
    # A loaded model without requests: idle by activity, not by memory.
    serving = Load(utilization=0.02, memory_bytes=70 * GIB)
    fleet.place(tenant("serving", "vllm-70b-x2k4p"), "gpu-h100-03", GPU_RESOURCE, 1, serving)
    for index in (5, 6):
        fleet.set_foreign("gpu-h100-03", index, Load(utilization=0.85, memory_bytes=30 * GIB))
    fleet.place(
        tenant("research", "diffusion-0"),
        "gpu-h200-01",
        GPU_RESOURCE,
        2,
        Load(utilization=0.88, memory_bytes=90 * GIB),
    )
    fleet.place(
        tenant("vision", "detector-train-0"),
        "gpu-a100-01",
        GPU_RESOURCE,
        1,
        Load(utilization=0.75, memory_bytes=24 * GIB),
    )
    # Held and unused: forgotten notebooks, and a service without requests for its loaded model.
    for name, count, memory_bytes in (("jupyter-carol-0", 2, 0), ("jupyter-dave-0", 1, 9 * GIB)):
        forgotten = Load(memory_bytes=memory_bytes)
        fleet.place(tenant("notebooks", name), "gpu-l40s-01", GPU_RESOURCE, count, forgotten)
    unused = Load(memory_bytes=18 * GIB)
    fleet.place(tenant("serving", "tts-demo-7d9c4-hx2vq"), "gpu-l40s-01", GPU_RESOURCE, 1, unused)
    fleet.place(
        tenant("vision", "segment-train-0"),
        "gpu-v100-02",
        GPU_RESOURCE,
        1,
        Load(utilization=0.65, memory_bytes=20 * GIB),
    )


def _fill_shared_nodes(fleet: SimulatedFleet) -> None:
    for number in range(4):
        fleet.place(
            tenant("speech", f"whisper-{number}"),
            "gpu-a10-01",
            "nvidia.com/gpu.shared",
            1,
            Load(utilization=0.48, memory_bytes=4 * GIB),
        )
    for number in range(2):
        fleet.place(
            tenant("notebooks", f"jupyter-{number}"),
            "gpu-a10-02",
            "nvidia.com/gpu.shared",
            1,
            Load(utilization=0.06, memory_bytes=3 * GIB),
        )
        fleet.place(
            tenant("search", f"embedder-{number}"),
            "gpu-t4-01",
            "nvidia.com/gpu.shared",
            1,
            Load(utilization=0.12, memory_bytes=12 * GIB),
        )
        fleet.place(
            tenant("serving", f"reranker-{number}"),
            "gpu-l40s-mps-01",
            "nvidia.com/gpu.shared",
            1,
            Load(utilization=0.20, memory_bytes=9 * GIB),
        )


def _fill_mig_node(fleet: SimulatedFleet) -> None:
    node = "gpu-a100-mig-01"
    busy = Load(utilization=0.70, memory_bytes=3 * GIB)
    fleet.place(tenant("batch", "etl-embed-28fjq"), node, "nvidia.com/mig-1g.5gb", 1, busy)
    fleet.place(tenant("notebooks", "lab-alice-0"), node, "nvidia.com/mig-2g.10gb", 1, busy)
    fleet.place(
        tenant("serving", "bert-6c9f-8xj2l"),
        node,
        "nvidia.com/mig-3g.20gb",
        1,
        Load(utilization=0.40, memory_bytes=12 * GIB),
    )


def big_fleet(nodes: int) -> SimulatedFleet:
    """Build a large fleet: 70 % nodes of whole GPUs, 20 % time-sliced by 10, 10 % with MIG."""
    generator = random.Random(7)
    fleet = SimulatedFleet(clock=time.time)
    for number in range(nodes):
        node = fleet.add(_big_spec(number))
        for device in node.devices:
            if generator.random() >= _BUSY_SHARE:
                continue
            load = Load(
                utilization=round(generator.betavariate(2.0, 2.0), 3),
                memory_bytes=int(device.memory_mib * generator.uniform(0.1, 0.8)) << 20,
            )
            pod = tenant("load", f"{node.name}-{device.card.index}-{device.gpu_instance_id or 0}")
            fleet.place(pod, node.name, device.resource, 1, load)
    return fleet


def _big_spec(number: int) -> NodeSpec:
    name = f"gpu-{number:05d}"
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    match number % 10:
        case 9:
            layout = ("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb")
            return NodeSpec(name=name, model=A100_40GB, cards=8, address=address, mig=(layout,) * 8)
        case 7 | 8:
            return NodeSpec(
                name=name,
                model=A10,
                cards=8,
                address=address,
                sharing=Sharing.TIME_SLICING,
                replicas=10,
            )
        case kind:
            model = (H100, H200, A100_40GB, V100, L40S)[kind % 5]
            return NodeSpec(name=name, model=model, cards=8, address=address)
