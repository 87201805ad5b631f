"""Trivial extender that accepts every node and records kube-scheduler's requests."""

from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Final, Self

from aiohttp import web

from testkit.controlplane.objects import Object

BODY_LIMIT_BYTES: Final = 256 * 1024 * 1024
BEST_SCORE: Final = 10


class StubExtender:
    """Server of filter, prioritize and preempt: an async context manager, bound to one event loop.

    Attributes:
        url: base URL of the webhooks while it serves.
        bodies: exact bytes of all requests by verb, oldest first.
    """

    def __init__(self, *, best: str = "") -> None:
        """Prepare a stub.

        Args:
            best: the only node with the best score; "" for none.
        """
        self.url = ""
        self.bodies: dict[str, list[bytes]] = {"filter": [], "prioritize": [], "preempt": []}
        self._best = best
        app = web.Application(client_max_size=BODY_LIMIT_BYTES)
        app.add_routes(
            [
                web.post("/filter", self._recorded("filter", self._filter)),
                web.post("/prioritize", self._recorded("prioritize", self._prioritize)),
                web.post("/preempt", self._recorded("preempt", self._preempt)),
            ]
        )
        self._runner = web.AppRunner(app, keepalive_timeout=120.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    def _recorded(
        self, verb: str, answer: Callable[[Object], object]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            self.bodies[verb].append(await request.read())
            return web.json_response(answer(await request.json()))

        return handler

    def _filter(self, arguments: Object) -> object:
        return {"Nodes": arguments["Nodes"], "NodeNames": arguments["NodeNames"]}

    def _prioritize(self, arguments: Object) -> object:
        names = arguments["NodeNames"] or [
            node["metadata"]["name"] for node in arguments["Nodes"]["items"]
        ]
        return [{"Host": name, "Score": BEST_SCORE if name == self._best else 0} for name in names]

    def _preempt(self, arguments: Object) -> object:
        return {
            "NodeNameToMetaVictims": arguments.get("NodeNameToMetaVictims")
            or {
                node: _meta_victims(victims)
                for node, victims in arguments["NodeNameToVictims"].items()
            }
        }


def _meta_victims(victims: Mapping[str, object]) -> object:
    """Convert victims to the answer's form: pods by UID."""
    pods = victims["Pods"]
    if not isinstance(pods, list):
        raise TypeError(f"cannot read victims: Pods is {pods!r}, must be a list")
    return {**victims, "Pods": [{"UID": pod["metadata"]["uid"]} for pod in pods]}
