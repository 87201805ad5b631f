"""A world that advice is given for."""

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
    return world
