"""Fleet and server of these tests."""

import pytest

from testkit.cards import BUSY, IDLE, Gpu
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

DEAD = Gpu(xid=79.0)
FOREIGN = Gpu(busy=0.0, used_gib=30.0)


@pytest.fixture
def world() -> World:
    """Return two idle nodes, a busy one, one with dead GPUs and one with foreign processes."""
    world = World()
    world.add(
        {
            "idle-b": [IDLE, IDLE],
            "idle-a": [IDLE, IDLE],
            "busy": [BUSY, BUSY],
            "dead": [DEAD, DEAD],
            "foreign": [FOREIGN, FOREIGN],
        }
    )
    for index in range(2):
        world.add_pod(f"holder-{index}", "busy")
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())
