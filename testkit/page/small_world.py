"""Small fleet with GPUs in every state."""

from extender.core.nodes.inventory import PodPhase, PodRecord
from testkit.builders import GPU
from testkit.cards import IDLE, Gpu
from testkit.world import World

ZONE = "topology.kubernetes.io/zone"
MISSING = Gpu(busy=None, used_gib=None)
STALE = Gpu(busy=0.5, used_gib=8.0, age=200.0, tenants=("team/lost",))
FOREIGN = Gpu(busy=0.8, used_gib=30.0)
CARDS = {
    "node-a": [IDLE, IDLE, MISSING, Gpu(busy=0.02, used_gib=0.5)],
    "node-b": [
        Gpu(busy=0.97, used_gib=70.0, tenants=("team/train",)),
        IDLE,
        STALE,
        Gpu(busy=0.01, used_gib=1.0, tenants=("team/notebook",)),
    ],
    "node-c": [Gpu(xid=79.0), IDLE],
    "node-d": [FOREIGN, IDLE],
}


def small_world() -> World:
    """Build four nodes with GPUs of each kind."""
    world = World()
    for at, (node, cards) in enumerate(CARDS.items()):
        world.register_node(node, gpus=len(cards), labels={ZONE: ("east", "west")[at % 2]})
    world.add_pod("train", "node-b")
    world.add_pod("notebook", "node-b")
    world.add_pod("lost", "node-b")
    for _ in range(4):
        world.now += 10.0
        world.report(CARDS)
    return world


def wait_for_gpus(world: World, name: str, gpus: int) -> None:
    """Add a waiting pod that the extender has refused once."""
    message = (
        f"0/{len(CARDS)} nodes are available: 1 Insufficient nvidia.com/gpu, "
        "3 node(s) had too few working GPUs (idlegpu)."
    )
    world.fleet.apply_pod(
        PodRecord(
            uid=f"uid-{name}",
            namespace="team",
            name=name,
            phase=PodPhase.PENDING,
            resources={GPU: gpus},
            created_at=world.now - 312.0,
            is_unscheduled=True,
            is_refused=True,
            message=message,
        )
    )
