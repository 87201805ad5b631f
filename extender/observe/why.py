"""What answers why: pods that wait, pods that hold GPUs unused, and decisions explained."""

from collections.abc import Callable

from aiohttp import web

from extender.core.resources import ResourceNames
from extender.observe.decisions import Others
from extender.observe.explain_api import Explain
from extender.observe.holders import Holders
from extender.observe.idleness import Idleness
from extender.observe.pending import Pending
from extender.placement.placer import Placer


class Why:
    """The routes /v1/pending, /v1/holders and /v1/explain.

    Args:
        placer: ranks, and remembers decisions.
        resources: says which resources are GPUs.
        clock: seconds since the epoch.
        others: the other replicas.
        tells_others: whether they may be told all, as `Decisions` has it.
    """

    def __init__(
        self,
        placer: Placer,
        resources: Callable[[], ResourceNames],
        clock: Callable[[], float],
        *,
        others: Others | None = None,
        tells_others: bool = False,
    ) -> None:
        fleet = placer.fleet
        self.idleness = Idleness(fleet, clock)
        self.pending = Pending(fleet, placer.history, clock)
        self.holders = Holders(fleet, self.idleness, clock)
        self.explain = Explain(
            fleet,
            placer,
            self.pending,
            resources=resources,
            others=others,
            tells_others=tells_others,
        )

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [*self.pending.routes(), *self.holders.routes(), *self.explain.routes()]

    async def run(self) -> None:
        """Watch which GPUs are used until cancelled."""
        await self.idleness.run()
