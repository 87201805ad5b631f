"""Browser that all tests of the page share, and the server that it opens."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from testkit.page.serving import Server, browsing, serving
from testkit.page.small_world import small_world
from testkit.world import World


@pytest.fixture
def world() -> World:
    return small_world()


@pytest_asyncio.fixture(loop_scope="session")
async def server(world: World) -> AsyncIterator[Server]:
    async with serving(world) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Yield a browser; each test opens its own context, so tests share no state."""
    async with browsing() as browser:
        yield browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with the browser or its server in the browser's event loop."""
    here = (item for item in items if item.path.parent == Path(__file__).parent)
    for item in here:
        if not {"browser", "server"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
