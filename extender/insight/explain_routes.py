"""Bundle the routes that answer "why": pending pods, idle holders, costs, explanations."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from aiohttp import web

from extender.core.request.gpu_resources import ResourceNames
from extender.insight.costs import CostRoutes
from extender.insight.explain import Explain
from extender.insight.holders import Holders
from extender.insight.last_active import Idleness
from extender.insight.pending import Pending
from extender.insight.prices import PriceList
from extender.insight.replicas import ONE, Replicas
from extender.insight.what_if_route import WhatIf
from extender.placement.placer import Placer

NO_PRICES: Final[Mapping[str, float]] = MappingProxyType({})


class Why:
    """The routes /v1/pending, /v1/holders, /v1/costs and /v1/explain.

    Args:
        placer: ranks nodes, and remembers decisions.
        resources: returns the names of GPU resources.
        clock: seconds since the epoch.
        replicas: this replica and the others.
        prices: price of a GPU-hour by words of the model.
    """

    def __init__(
        self,
        placer: Placer,
        resources: Callable[[], ResourceNames],
        clock: Callable[[], float],
        *,
        replicas: Replicas = ONE,
        prices: Mapping[str, float] = NO_PRICES,
    ) -> None:
        fleet = placer.fleet
        self.idleness = Idleness(fleet, clock)
        self.pending = Pending(fleet, placer.history, clock, replicas)
        self.holders = Holders(fleet, self.idleness, clock)
        self._costs = CostRoutes(self.holders, clock)
        self.set_prices(prices)
        self.explain = Explain(fleet, placer, self.pending, replicas=replicas)
        self._foresight = WhatIf(fleet, placer, resources)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for pending pods, holders, costs and explanations."""
        parts = (self.pending, self.holders, self._costs, self.explain, self._foresight)
        return [route for part in parts for route in part.routes()]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the routes at which other replicas query explanations and latest decisions."""
        return [*self.explain.peer_routes(), *self.pending.last.peer_routes()]

    def set_prices(self, prices: Mapping[str, float]) -> None:
        """Replace the price list."""
        self.holders.prices = PriceList(prices)

    async def run(self) -> None:
        """Watch the GPUs' activity until cancelled."""
        await self.idleness.run()
