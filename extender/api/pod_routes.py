"""Routes about pods: waiting pods, holders of GPUs and their cost, and explanations."""

from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import web

from extender.core.policy import Prices
from extender.core.prices import PriceList
from extender.core.request.gpu_resources import ResourceNames
from extender.insight.explain import Explain
from extender.insight.holders import Holders
from extender.insight.last_active import Idleness
from extender.insight.pending import Pending
from extender.insight.pods import PodList
from extender.insight.replicas import ONE, Replicas
from extender.insight.usage import CostRoutes, UsageRecord
from extender.insight.what_if import SizeRoute, WhatIf
from extender.placement.placer import Placer
from extender.runtime.metrics import Metrics
from extender.settings.config import Settings

_NO_PRICES: Final = Prices()


class PodRoutes:
    """The routes /v1/pending, /v1/pods, /v1/holders, /v1/costs, /v1/usage, /v1/size, /v1/explain.

    Args:
        placer: ranks nodes, and remembers decisions.
        resources: returns the names of GPU resources.
        clock: seconds since the epoch.
        replicas: this replica and the others.
        prices: prices of a GPU-hour.
        metrics: metrics to update; None for none.
    """

    def __init__(
        self,
        placer: Placer,
        resources: Callable[[], ResourceNames],
        clock: Callable[[], float],
        *,
        replicas: Replicas = ONE,
        prices: Prices = _NO_PRICES,
        metrics: Metrics | None = None,
    ) -> None:
        fleet = placer.fleet
        self.idleness = Idleness(fleet, clock)
        self.pending = Pending(fleet, placer.history, clock, replicas)
        self.holders = Holders(fleet, self.idleness, clock)
        self._pods = PodList(fleet, self.holders, self.pending, clock)
        self._costs = CostRoutes(self.holders, clock)
        self.usage = UsageRecord(fleet, self.holders, clock, metrics)
        self.set_prices(prices.entries, prices.spot_share)
        self.explain = Explain(fleet, placer, self.pending, replicas=replicas)
        self._size = SizeRoute(fleet)
        self._what_if = WhatIf(fleet, placer, resources)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for pending pods, holders, costs and explanations."""
        parts = (
            self.pending, self.holders, self._costs, self.explain, self._what_if, self._size,
            self.usage, self._pods,
        )  # fmt: skip
        return [route for part in parts for route in part.routes()]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the routes at which other replicas query explanations and latest decisions."""
        return [*self.explain.peer_routes(), *self.pending.last.peer_routes()]

    def adopt(self, settings: Settings) -> None:
        """Apply new settings."""
        self.set_prices(settings.prices, settings.spot_share)

    def set_prices(self, prices: Mapping[str, float], spot_share: float = 1.0) -> None:
        """Replace the price list."""
        self.holders.prices = PriceList(prices, spot_share)

    async def run(self) -> None:
        """Watch the GPUs' activity until cancelled."""
        await self.idleness.run()
