"""The page's routes: its files, the stream of what is new, a node in full and its last hour."""

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final

from aiohttp import web

from extender.fleet.fleet import Fleet
from extender.observe.advice import Advice
from extender.observe.answers import error_answer, json_answer
from extender.observe.collector import SourceStatus
from extender.observe.page.decision_feed import DecisionFeed
from extender.observe.page.detail import node_detail_in_steps
from extender.observe.page.far_feed import FarFeed
from extender.observe.page.files import file_routes
from extender.observe.page.fleet_feed import FleetFeed
from extender.observe.page.history import ShortMemory
from extender.observe.page.hub import Hub
from extender.observe.page.lost import Lost
from extender.observe.page.past import Past, Plots
from extender.observe.page.stream import stream
from extender.observe.replicas import ONE, Replicas
from extender.placement.history import DecisionHistory
from extender.stepping import GiveWay, in_turns

STREAM: Final = "/v1/page/stream"
"""Stays open: it is no question that waits for its answer."""


class Page:
    """What a browser shows of an extender; nothing of it changes anything.

    Args:
        fleet: the fleet.
        history: the last decisions.
        states: how each source fares.
        clock: seconds since the epoch.
        give_way: lets others have a turn.
        plots: asks Prometheus for the last hour; None for never.
        replicas: this one and the others.
        pool_labels: labels by which nodes may be grouped, besides those that are known anyway.
    """

    def __init__(
        self,
        fleet: Fleet,
        history: DecisionHistory,
        *,
        states: Callable[[], Iterable[SourceStatus]],
        clock: Callable[[], float],
        give_way: GiveWay,
        plots: Plots | None = None,
        replicas: Replicas = ONE,
        pool_labels: tuple[str, ...] = (),
    ) -> None:
        self._fleet = fleet
        self._give_way = give_way
        self.memory = ShortMemory(fleet, clock)
        self._past = Past(fleet, self.memory, plots)
        self.advice = Advice(fleet, self.memory, plots, clock)  # rests on the same memory
        self.lost = Lost(history, replicas, give_way)
        self.hub = Hub(
            FleetFeed(fleet, pool_labels),
            DecisionFeed(history, replicas),
            FarFeed(fleet, replicas),
            pods=fleet.pod_changes,
            states=states,
            clock=clock,
            give_way=give_way,
        )

    def set_pool_labels(self, labels: tuple[str, ...]) -> None:
        """Have nodes grouped by other labels from the next look at the fleet on."""
        self.hub.fleet.pool_labels = labels

    def add_to(self, app: web.Application) -> None:
        """Serve the page."""
        app.add_routes(
            [
                *file_routes(),
                *self.advice.routes(),
                *self.lost.routes(),
                web.get(STREAM, self._stream),
                web.get("/v1/page/nodes/{name:.+}", self._node),
                web.get("/v1/page/past/{name:.+}", self._hour),
            ]
        )
        app.on_shutdown.append(self._close)

    async def run(self) -> None:
        """Tell viewers what is new, and keep the last hour, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.hub.run(), name="page news")
            group.create_task(self.hub.hear(), name="page replicas")
            group.create_task(self.memory.run(self._give_way), name="page memory")

    async def _close(self, _: web.Application) -> None:
        self.hub.close()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        return await stream(self.hub, request)

    async def _node(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        told = await in_turns(node_detail_in_steps(self._fleet, name), self._give_way)
        return _unknown(name) if told is None else json_answer(told)

    async def _hour(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._fleet.nodes:
            return _unknown(name)
        return json_answer(await self._past.of(self._fleet.snapshot(), name))


def _unknown(name: str) -> web.Response:
    return error_answer(HTTPStatus.NOT_FOUND, f"node {name!r} is not known")
