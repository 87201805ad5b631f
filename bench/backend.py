"""Simulate a cluster's API server and Prometheus in one process that uses little CPU.

`python -m bench.backend --port PORT` serves, these paths on 127.0.0.1:PORT:

    /api/..., /apis/...         the API server
    /prometheus                 base URL of the Prometheus
    GET /control/state          counts: nodes, devices, pods, watches, writes, queries, sent_bytes
    GET /control/nodes          names of all nodes
    GET /control/pods?kind=gpu  UIDs of the bound pods of a kind
    POST /control/refresh       the next readings have new values, and show what pods do now
    POST /control/touch         {"nodes": 5000, "broken": true}: so many nodes change an annotation,
                                and, where "broken" is given, offer one GPU less, or all again
    POST /control/pods          {"count": 1, "kind": "gpu", "resource": "nvidia.com/gpu", "gpus": 1,
                                "annotations": {}, "life": "pending", "objects": false}: create pods
                                that wait for a node, or ("running") go through a pod's first states
                                on any node, or ("mixed") every second one on a node with room;
                                answers "uids", and with "objects": true also "objects"
    POST /control/bind          {"uid": "...", "node": "..."}: bind as kube-scheduler does; the
                                kubelet starts the pod at once
    POST /control/delete        {"uids": [...]}: the pods are gone
    POST /control/close-watches {"expired": true}: end all watches; expired ones must list again
    POST /control/drop-nodes    {"nodes": ["..."]}: nodes go away ...
    POST /control/add-nodes     {"nodes": ["..."]}: ... and come back
"""

import argparse
import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import orjson
import uvloop
from aiohttp import web

from bench.backend_apiserver import BenchApiServer
from bench.backend_fleet import BenchFleet, BenchNode, FleetSpec
from bench.backend_objects import BenchPod, render_pod
from bench.backend_prometheus import Prometheus

Answer = Mapping[str, object]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BURST_PODS: Final = 500
"""Pods that are sent to the watches before other tasks run."""


class Backend:
    """HTTP server of the simulated cluster and its controls.

    Args:
        fleet: the cluster.
        scrape_seconds: scrape interval of the exporters.
    """

    def __init__(self, fleet: BenchFleet, *, scrape_seconds: float) -> None:
        self._fleet = fleet
        self._api = BenchApiServer(fleet)
        self._prometheus = Prometheus(fleet, scrape_seconds=scrape_seconds)

    def build_app(self) -> web.Application:
        """Build the application."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(self._api.routes())
        app.add_routes(self._prometheus.routes())
        posts: Mapping[str, Callable[[Answer], Awaitable[Answer]]] = {
            "refresh": self._refresh,
            "touch": self._touch,
            "pods": self._create,
            "bind": self._bind,
            "delete": self._delete,
            "close-watches": self._close_watches,
            "drop-nodes": self._drop_nodes,
            "add-nodes": self._add_nodes,
        }
        for name, act in posts.items():
            app.router.add_post(f"/control/{name}", _control(act))
        app.router.add_get("/control/state", self._state)
        app.router.add_get("/control/nodes", self._nodes)
        app.router.add_get("/control/pods", self._pods)
        return app

    async def refresh_every(self, seconds: float) -> None:
        """Refresh the readings at a fixed interval."""
        while True:
            await asyncio.sleep(seconds)
            self._prometheus.refresh()

    async def _state(self, _: web.Request) -> web.Response:
        fleet = self._fleet
        return _json(
            {
                "nodes": len(fleet.nodes),
                "cards": 8 * len(fleet.nodes),
                "devices": len(fleet.devices),
                "pods": len(fleet.pods),
                "gpu_pods": sum(bool(pod.resource) for pod in fleet.pods.values()),
                "generation": fleet.generation,
                "watches": len(self._api.watchers),
                "writes": self._api.writes,
                "queries": self._prometheus.queries,
                "sent_bytes": self._prometheus.sent_bytes,
            }
        )

    async def _nodes(self, _: web.Request) -> web.Response:
        return _json({"nodes": [node.name for node in self._fleet.nodes]})

    async def _pods(self, request: web.Request) -> web.Response:
        kind = request.query.get("kind", "gpu")
        pods = self._fleet.pods.values()
        return _json({"uids": [pod.uid for pod in pods if pod.kind == kind and pod.node]})

    async def _refresh(self, _: Answer) -> Answer:
        self._prometheus.refresh()
        return {"generation": self._fleet.generation}

    async def _touch(self, arguments: Answer) -> Answer:
        nodes = self._fleet.nodes[: int(str(arguments.get("nodes", len(self._fleet.nodes))))]
        if "broken" in arguments:
            for node in nodes:
                node.has_broken = bool(arguments["broken"])
        return {"nodes": self._api.send_nodes("MODIFIED", nodes)}

    async def _create(self, arguments: Answer) -> Answer:
        fleet = self._fleet
        kind = str(arguments.get("kind", "gpu"))
        resource = str(arguments.get("resource", "nvidia.com/gpu")) if kind == "gpu" else ""
        gpus = int(str(arguments.get("gpus", 1))) if resource else 0
        annotations = arguments.get("annotations")
        wishes = tuple(annotations.items()) if isinstance(annotations, dict) else ()
        pods = [
            fleet.new_pod(kind, resource=resource, count=gpus, wishes=wishes)
            for _ in range(int(str(arguments.get("count", 1))))
        ]
        fleet.pods.update((pod.uid, pod) for pod in pods)
        for start in range(0, len(pods), BURST_PODS):
            some = pods[start : start + BURST_PODS]
            self._api.send_pods("ADDED", some)
            self._start(some, str(arguments.get("life")))
            await asyncio.sleep(0)
        answer: dict[str, object] = {"uids": [pod.uid for pod in pods]}
        if arguments.get("objects"):
            answer["objects"] = [orjson.Fragment(render_pod(pod)) for pod in pods]
        return answer

    def _start(self, pods: list[BenchPod], life: str) -> None:
        """Let pods go through their first states, up to the state that `life` names."""
        fleet = self._fleet
        match life:
            case "running":
                bound = [(pod, fleet.random.choice(fleet.nodes)) for pod in pods]
            case "mixed":
                bound = [(pod, fleet.node_with_room(pod.resource, pod.count)) for pod in pods[::2]]
            case _:
                return
        for pod, node in bound:
            fleet.bind(pod, node.name)
        started = [pod for pod, _ in bound]
        self._api.send_pods("MODIFIED", started)
        self._run(started)

    async def _bind(self, arguments: Answer) -> Answer:
        pod = self._fleet.pods[str(arguments["uid"])]
        self._fleet.bind(pod, str(arguments["node"]))
        self._api.send_pods("MODIFIED", [pod])
        self._run([pod])
        return {"devices": len(pod.devices)}

    def _run(self, pods: list[BenchPod]) -> None:
        for pod in pods:
            pod.is_running = True
        self._api.send_pods("MODIFIED", pods)

    async def _delete(self, arguments: Answer) -> Answer:
        uids = arguments.get("uids")
        found = [
            self._fleet.pods[uid]
            for uid in (uids if isinstance(uids, list) else [])
            if uid in self._fleet.pods
        ]
        for start in range(0, len(found), BURST_PODS):
            some = found[start : start + BURST_PODS]
            for pod in some:
                self._fleet.remove(pod)
            self._api.send_pods("DELETED", some)
            await asyncio.sleep(0)
        return {"deleted": len(found)}

    async def _close_watches(self, arguments: Answer) -> Answer:
        self._api.close_watches(expired=bool(arguments.get("expired")))
        return {}

    async def _drop_nodes(self, arguments: Answer) -> Answer:
        return {"nodes": self._api.send_nodes("DELETED", self._named(arguments))}

    async def _add_nodes(self, arguments: Answer) -> Answer:
        return {"nodes": self._api.send_nodes("ADDED", self._named(arguments))}

    def _named(self, arguments: Answer) -> list[BenchNode]:
        names = arguments.get("nodes")
        return [self._fleet.by_name[name] for name in (names if isinstance(names, list) else [])]


def _control(act: Callable[[Answer], Awaitable[Answer]]) -> Handler:
    """Return the handler of a control that reads and answers JSON."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        return _json(await act(orjson.loads(body) if body else {}))

    return handle


def _json(value: Answer) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


async def serve(backend: Backend, port: int, refresh_seconds: float) -> None:
    """Serve until cancelled."""
    runner = web.AppRunner(backend.build_app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        if refresh_seconds:
            await backend.refresh_every(refresh_seconds)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m bench.backend", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    parser.add_argument("--nodes", type=int, default=5000, help="GPU nodes, 8 cards each")
    parser.add_argument("--gpu-pods", type=int, default=10_000, help="pods with GPUs that run")
    parser.add_argument("--other-pods", type=int, default=0, help="pods without GPUs that run")
    parser.add_argument("--no-mig", action="store_true", help="whole and shared cards alone")
    parser.add_argument("--scrape-seconds", type=float, default=15.0, help="between two scrapes")
    parser.add_argument(
        "--refresh-seconds", type=float, default=10.0, help="interval of new values; 0: on demand"
    )
    options = parser.parse_args()
    fleet = BenchFleet(
        FleetSpec(
            nodes=options.nodes,
            gpu_pods=options.gpu_pods,
            other_pods=options.other_pods,
            has_mig=not options.no_mig,
        )
    )
    backend = Backend(fleet, scrape_seconds=options.scrape_seconds)
    gc.collect()
    gc.freeze()  # a full garbage collection would look like a slow cluster
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(backend, options.port, options.refresh_seconds))


if __name__ == "__main__":
    main()
