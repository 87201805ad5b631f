"""Fleet of these tests, and the server that shows it."""

import pytest

from testkit.cards import BUSY, IDLE, Gpu
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

DEAD = Gpu(xid=79.0)
HALF = Gpu(busy=0.2, used_gib=8.0)


@pytest.fixture
def world() -> World:
    world = World()
    world.add(
        {"idle": [IDLE, IDLE, HALF], "busy": [BUSY, BUSY], "dead": [DEAD, IDLE], "full": [IDLE]}
    )
    world.add_pod("a", "busy", gpus=2)
    world.add_pod("b", "full")
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())
