"""Real API of an extender in a thread, for blocking clients and command lines."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from aiohttp import web
from click.testing import CliRunner, Result

from extender.cli.__main__ import idlegpu
from testkit.cards import IDLE, Gpu, card
from testkit.webhook_requests import names_request, pod
from testkit.world import MESSAGE, World

NO_ENVIRONMENT: Final = dict.fromkeys(
    ("IDLEGPU_URL", "IDLEGPU_TOKEN", "IDLEGPU_TOKEN_FILE", "IDLEGPU_SERVICE", "KUBECONFIG")
)
TWO_HOURS: Final = 7200.0
WAIT_SECONDS: Final = 60.0


@contextmanager
def serving(app: web.Application) -> Iterator[str]:
    """Serve an application while the context is open; yield its URL."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_SECONDS)
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(WAIT_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_SECONDS)
        loop.close()


async def call(world: World, verb: str, *nodes: str, **wishes: Any) -> None:
    """Call a webhook for a pod."""
    body = json.dumps(names_request(*nodes, requester=pod(**wishes))).encode()
    webhooks = world.webhooks()
    await (webhooks.filter if verb == "filter" else webhooks.prioritize)(body)
    for record in world.history:  # computed after the answer was sent
        world.placer.detail(record)
        break


def build_fleet() -> World:
    """Build a small cluster with every kind of node and pod."""
    world = World()
    notebook = [card("team/notebook", used_gib=2.0), card("team/notebook")]
    train = [card("team/train", busy=0.95, used_gib=70.0)] * 2
    cards = {
        "node-1": [*notebook, IDLE, IDLE],
        "node-2": [*train, IDLE, IDLE],
        "node-3": [IDLE, IDLE],
    }
    world.add(cards)
    world.hold("notebook", "node-1", 2)
    world.hold("train", "node-2", 2, owner="Job train")
    world.live(cards, TWO_HOURS)
    world.add({"node-4": [Gpu(xid=79.0), IDLE]})
    world.add_waiting("big", is_unscheduled=True, is_refused=True, message=MESSAGE, owner="Job big")
    asyncio.run(_place_one(world))
    world.why.set_prices({"H100": 2.5})
    return world


async def _place_one(world: World) -> None:
    await call(world, "filter", "node-1", "node-2", "node-3", "node-4", name="fresh", gpus=2)
    await call(world, "prioritize", "node-1", "node-2", "node-3", name="fresh", gpus=2)
    uid = world.add_pod("fresh", "node-1", gpus=2)
    world.history.note_bound(uid, "node-1")


Run = Callable[..., Result]


def runner(url: str) -> Run:
    """Return a function that runs the command line against an extender."""

    def run(*arguments: str, standard_input: str = "", **environment: str) -> Result:
        variables = {**NO_ENVIRONMENT, "IDLEGPU_URL": url, **environment}
        return CliRunner(env=variables).invoke(idlegpu, arguments, input=standard_input)

    return run
