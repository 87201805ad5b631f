"""Routes of the page: static files, update stream, node detail and history."""

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final

from aiohttp import web

from extender.api.page.broadcaster import Broadcaster
from extender.api.page.decision_feed import DecisionFeed
from extender.api.page.detail import node_detail_in_steps
from extender.api.page.files import file_routes
from extender.api.page.fleet_feed import FleetFeed
from extender.api.page.replica_feed import FarFeed
from extender.api.page.runners_up import Lost
from extender.api.page.stream import stream
from extender.fleet.fleet import Fleet
from extender.insight.advice import AdviceRoutes
from extender.insight.last_hour import LastHour, Plots
from extender.insight.replicas import ONE, Replicas
from extender.insight.short_memory import ShortMemory
from extender.placement.history import DecisionHistory
from extender.runtime.cooperative import YieldControl, run_in_steps
from extender.server.json_answers import error_answer, json_answer
from extender.server.readiness import SourceStatus

STREAM: Final = "/v1/page/stream"
"""Path of the update stream, which stays open."""


class PageRoutes:
    """The read-only page and its data.

    Args:
        fleet: state of the fleet.
        history: latest decisions.
        states: returns the status of each source.
        clock: seconds since the epoch.
        yield_control: yields to webhook requests.
        plots: queries Prometheus for the history; None without Prometheus.
        replicas: this replica and the others.
        pool_labels: node labels for grouping, besides `GROUP_LABELS`.
    """

    def __init__(
        self,
        fleet: Fleet,
        history: DecisionHistory,
        *,
        states: Callable[[], Iterable[SourceStatus]],
        clock: Callable[[], float],
        yield_control: YieldControl,
        plots: Plots | None = None,
        replicas: Replicas = ONE,
        pool_labels: tuple[str, ...] = (),
    ) -> None:
        self._fleet = fleet
        self._yield_control = yield_control
        self.memory = ShortMemory(fleet, clock)
        self._past = LastHour(fleet, self.memory, plots)
        self.advice = AdviceRoutes(fleet, self.memory, plots, clock)  # uses the same history
        self.lost = Lost(history, replicas, yield_control)
        self.broadcaster = Broadcaster(
            FleetFeed(fleet, pool_labels),
            DecisionFeed(history, replicas),
            FarFeed(fleet, replicas),
            pods=fleet.pod_changes,
            states=states,
            clock=clock,
            yield_control=yield_control,
        )

    def set_pool_labels(self, labels: tuple[str, ...]) -> None:
        """Group nodes by other labels from the next update on."""
        self.broadcaster.fleet.pool_labels = labels

    def add_to(self, app: web.Application) -> None:
        """Add the page's routes to an application."""
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
        """Send updates to viewers and record the history, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.broadcaster.run(), name="page news")
            group.create_task(self.broadcaster.hear(), name="page replicas")
            group.create_task(self.memory.run(self._yield_control), name="page memory")

    async def _close(self, _: web.Application) -> None:
        self.broadcaster.close()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        return await stream(self.broadcaster, request)

    async def _node(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        detail = await run_in_steps(node_detail_in_steps(self._fleet, name), self._yield_control)
        return _unknown(name) if detail is None else json_answer(detail)

    async def _hour(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._fleet.nodes:
            return _unknown(name)
        return json_answer(await self._past.of(self._fleet.snapshot(), name))


def _unknown(name: str) -> web.Response:
    return error_answer(HTTPStatus.NOT_FOUND, f"node {name!r} is not known")
