"""An extender that decides nothing: it notes when it receives a pod, and when it is asked about it.

`python -m bench.noting --kubeconfig FILE --port N` follows the API server with the extender's own
sources, on uvloop as the extender does, and answers as `bench.trivial` does. It listens once it
knows all nodes and pods.

    GET /head-starts    for each pod that it received and was asked about since the last such
                        question: seconds from the one to the other, below 0 where it was asked
                        before; a list
"""

import argparse
import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import orjson
import uvloop
from aiohttp import web

from bench import trivial
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.kube.client import KubeClient
from extender.settings.config import Settings
from extender.sources.kubernetes.cluster import ClusterSource
from testkit.controlplane.waiting import wait_for

HEAD_STARTS: Final = "/head-starts"
START_SECONDS: Final = 60.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Notes:
    """When pods were received and asked about, `time.perf_counter`; takes what the API server says.

    Of each only the first time counts: a pod is changed again, and one that fits nowhere is asked
    about again.

    Example:
        >>> notes = Notes()
        >>> notes.received("a", 1.0), notes.asked("a", 1.5), notes.asked("b", 2.0)
        (None, None, None)
        >>> notes.take(), notes.take()
        ([0.5], [])
    """

    def __init__(self) -> None:
        self._received: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._taken: set[str] = set()

    def received(self, uid: str, at: float) -> None:
        """Note that the watch delivered a pod."""
        if uid not in self._taken:
            self._received.setdefault(uid, at)

    def asked(self, uid: str, at: float) -> None:
        """Note that filter was asked about a pod."""
        if uid not in self._taken:
            self._asked.setdefault(uid, at)

    def take(self) -> list[float]:
        """Return the head starts that are not returned yet, in seconds."""
        both = [uid for uid in self._asked if uid in self._received]
        self._taken.update(both)
        return [self._asked.pop(uid) - self._received.pop(uid) for uid in both]

    def apply_pod(self, record: PodRecord) -> None:
        """Take a pod that was added or changed."""
        self.received(record.uid, time.perf_counter())

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        """Leave out the pods that were there before it listened."""

    def remove_pod(self, uid: str, at: float) -> None:
        """Leave what was noted as it is."""

    def replace_nodes(self, records: Iterable[NodeRecord]) -> None:
        """Nodes matter in questions alone."""

    def apply_node(self, record: NodeRecord) -> None:
        """Likewise."""

    def remove_node(self, name: str) -> None:
        """Likewise."""

    def apply_host_use(self, node: str, requested: HostResources) -> None:
        """Likewise."""


def build_app(notes: Notes, shortlist: int = 0) -> web.Application:
    """Return what serves; of the names so many of the first are given back, 0 for all."""

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        now = time.perf_counter()  # its head is there, and as a rule not its body yet
        if request.path == "/filter":
            question = orjson.loads(await request.read())
            notes.asked(question["Pod"]["metadata"]["uid"], now)
        return await handler(request)

    async def take(_: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(notes.take()), content_type="application/json")

    app = trivial.build_app(shortlist)
    app.middlewares.append(note)
    app.router.add_get(HEAD_STARTS, take)
    return app


async def serve(kubeconfig: Path, port: int, shortlist: int) -> None:
    """Follow the API server, and serve, until cancelled."""
    notes = Notes()
    client = await KubeClient.connect(kubeconfig)
    cluster = ClusterSource(client, notes, resources=Settings().resource_patterns)
    runner = web.AppRunner(build_app(notes, shortlist), access_log=None)
    await runner.setup()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(cluster.run(), name="follow the API server")
            await wait_for(
                partial(_is_synced, cluster), "all is listed", deadline_seconds=START_SECONDS
            )
            gc.collect()
            gc.freeze()  # a collection of all that would look like a late watch
            await web.TCPSite(runner, "127.0.0.1", port).start()
    finally:
        await runner.cleanup()
        await client.close()


async def _is_synced(cluster: ClusterSource) -> bool:
    return cluster.is_synced


def main() -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(prog="python -m bench.noting", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    parser.add_argument("--shortlist", type=int, default=0, help="0 for all")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(options.kubeconfig, options.port, options.shortlist))


if __name__ == "__main__":
    main()
