"""Test that replicas with the same data choose alike, in any order of arrival."""

import json
import random

import pytest

from testkit.cards import BUSY, IDLE, Gpu
from testkit.webhook_requests import MakeClient, names_request, pod
from testkit.world import World

WARM = Gpu(busy=0.1, used_gib=2.0)
FOREIGN = Gpu(busy=0.0, used_gib=30.0)
CARDS = {
    **{f"idle-{number}": [IDLE] * 4 for number in range(8)},
    **{f"warm-{number}": [IDLE, WARM] for number in range(8)},
    **{f"busy-{number}": [BUSY] * 2 for number in range(4)},
    **{f"foreign-{number}": [FOREIGN] * 2 for number in range(4)},
}


def replica(shortlist: int, seed: int) -> World:
    """Return a replica that received nodes, pods and GPUs in its own order."""
    generator = random.Random(seed)
    names = generator.sample(sorted(CARDS), len(CARDS))
    world = World(shortlist=shortlist)
    world.add({name: CARDS[name] for name in names})
    for name in generator.sample([name for name in names if name.startswith("busy")], 4):
        world.add_pod(f"holder-of-{name}", name)
    return world


@pytest.mark.parametrize("shortlist", [0, 1, 5])
async def test_replicas_give_the_same_bytes(aiohttp_client: MakeClient, shortlist: int) -> None:
    replicas = [await aiohttp_client(replica(shortlist, seed).build_app()) for seed in range(3)]
    candidates = sorted(CARDS)

    # Unbound pods are part of the data, so replicas also agree during a burst.
    for number in range(12):
        request = names_request(*candidates, requester=pod(f"burst-{number}"))
        for verb in ("filter", "prioritize"):
            body = json.dumps(request)
            answers = [await (await one.post(f"/{verb}", data=body)).read() for one in replicas]

            assert answers[0]
            assert set(answers) == {answers[0]}
