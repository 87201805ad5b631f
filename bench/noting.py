"""Extender that decides nothing, and records when it receives each pod and its filter call.

`python -m bench.noting --kubeconfig FILE --port N` watches the API server with the extender's own
sources, on uvloop as the extender does, and answers as `bench.trivial` does. It listens once it
knows all nodes and pods.

    GET /head-starts    list of seconds from the watch's event to the filter call, for each pod
                    with both since the last GET; negative if filter came first
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
    """Times of pods' watch events and filter calls, by `time.perf_counter`.

    Only the first event and the first call of each pod count.

    Example:
        >>> notes = Notes()
        >>> notes.received("a", 1.0), notes.called("a", 1.5), notes.called("b", 2.0)
        (None, None, None)
        >>> notes.take(), notes.take()
        ([0.5], [])
    """

    def __init__(self) -> None:
        self._received: dict[str, float] = {}
        self._called: dict[str, float] = {}
        self._taken: set[str] = set()

    def received(self, uid: str, at: float) -> None:
        """Record the time of a pod's watch event."""
        if uid not in self._taken:
            self._received.setdefault(uid, at)

    def called(self, uid: str, at: float) -> None:
        """Record the time of a pod's filter call."""
        if uid not in self._taken:
            self._called.setdefault(uid, at)

    def take(self) -> list[float]:
        """Return the head starts since the last call, in seconds."""
        both = [uid for uid in self._called if uid in self._received]
        self._taken.update(both)
        return [self._called.pop(uid) - self._received.pop(uid) for uid in both]

    def apply_pod(self, record: PodRecord) -> None:
        """Record a pod that was added or changed."""
        self.received(record.uid, time.perf_counter())

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        """Ignore the pods of the initial list."""

    def remove_pod(self, uid: str, at: float) -> None:
        """Ignore the end of a pod."""

    def replace_nodes(self, records: Iterable[NodeRecord]) -> None:
        """Ignore the list of nodes; requests contain the nodes' names."""

    def apply_node(self, record: NodeRecord) -> None:
        """Ignore a changed node."""

    def remove_node(self, name: str) -> None:
        """Ignore a removed node."""

    def apply_host_use(self, node: str, requested: HostResources) -> None:
        """Ignore the requested host resources of a node."""

    def apply_group_size(self, key: str, size: int | None) -> None:
        """Ignore the size of a group."""


def build_app(notes: Notes, shortlist: int = 0) -> web.Application:
    """Build the application; filter answers the first `shortlist` nodes, all if it is 0."""

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        # aiohttp calls this when the headers are read, usually before the body
        now = time.perf_counter()
        if request.path == "/filter":
            arguments = orjson.loads(await request.read())
            notes.called(arguments["Pod"]["metadata"]["uid"], now)
        return await handler(request)

    async def take(_: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(notes.take()), content_type="application/json")

    app = trivial.build_app(shortlist)
    app.middlewares.append(note)
    app.router.add_get(HEAD_STARTS, take)
    return app


async def serve(kubeconfig: Path, port: int, shortlist: int) -> None:
    """Watch the API server, and serve until cancelled."""
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
            gc.freeze()  # a full garbage collection would look like a late watch event
            await web.TCPSite(runner, "127.0.0.1", port).start()
    finally:
        await runner.cleanup()
        await client.close()


async def _is_synced(cluster: ClusterSource) -> bool:
    return cluster.is_synced


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m bench.noting", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    parser.add_argument("--shortlist", type=int, default=0, help="0 for all")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(options.kubeconfig, options.port, options.shortlist))


if __name__ == "__main__":
    main()
