"""World with advice for its nodes."""

from dataclasses import replace

from extender.core.nodes.host_resources import HostResources, PlacedPod
from testkit.cards import card
from testkit.world import SHARED, World


def build() -> World:
    world = World()
    world.add_shared("s", 4, gpus=2)
    world.register_node("w", gpus=1)
    names = [world.have(f"p{number}", "s", resource=SHARED) for number in range(2)]
    big = world.have("big", "w", memory_bytes=40 << 30)
    shown = {
        "s": [card(*names, busy=1.0, used_gib=20.0), card()],
        "w": [card(big, busy=0.05, used_gib=8.0)],
    }
    world.live(shown, 3600)
    world.register_node("z", gpus=4)
    host = HostResources(64_000, 256 << 30, 1 << 40)
    world.fleet.apply_node(replace(world.fleet.nodes["z"], host=host))
    needs = {"build": HostResources(48_000, 8 << 30), "web": HostResources(8_000, 8 << 30)}
    for name, requested in needs.items():
        world.host_pods[f"team/{name}"] = PlacedPod("z", requested)
    world.fleet.apply_host_use("z", needs["build"].plus(needs["web"]))
    world.live(shown | {"z": [card() for _ in range(4)]}, 1)
    return world
