"""Does beforehand, and in small steps, what a question would have to wait for otherwise."""

import asyncio
import contextlib
from typing import Final

from extender.core.inventory import PodRecord
from extender.core.waiting import WaitingRequests
from extender.fleet.fleet import Fleet
from extender.following import Following
from extender.garbage import Garbage
from extender.placement.kept import EXPECTED, KeptStandings
from extender.readiness import Readiness
from extender.stepping import GiveWay, in_turns

LOOK_SECONDS: Final = 0.05
"""Time between looks for what has changed in bulk: nobody is told of that."""

GATHER_SECONDS: Final = 0.003
"""What changes so soon after something else is laid out together with it, and evaluated together
with what else has come since it was last evaluated."""


class Preparing:
    """Lays out, believes and evaluates whatever changes.

    Args:
        fleet: the fleet.
        standings: what it is worth to the requests of the last minutes.
        following: believes devices anew, in turn with what sources say.
        requests: reads what pods ask for.
        readiness: is told once all is laid out.
        garbage: searched then, for nobody is answered yet.
        give_way: lets questions go first.
    """

    def __init__(
        self,
        fleet: Fleet,
        standings: KeptStandings,
        following: Following,
        *,
        requests: WaitingRequests,
        readiness: Readiness,
        garbage: Garbage,
        give_way: GiveWay,
    ) -> None:
        self._fleet = fleet
        self._standings = standings
        self._following = following
        self._requests = requests
        self._readiness = readiness
        self._garbage = garbage
        self._give_way = give_way
        self._to_lay_out, self._to_evaluate = asyncio.Event(), asyncio.Event()
        self._newcomers: asyncio.Queue[PodRecord] = asyncio.Queue(EXPECTED)
        fleet.on_change = self._note_change
        fleet.on_waiting = self._note_newcomer

    def _note_change(self) -> None:
        self._to_lay_out.set()
        self._to_evaluate.set()

    def _note_newcomer(self, record: PodRecord) -> None:
        # Of thousands that come at once most ask for the same; the others can be evaluated later.
        if self._readiness.is_laid_out and not self._newcomers.full():
            self._newcomers.put_nowait(record)

    async def lay_out(self) -> None:
        """Lay out nodes and believe devices until cancelled."""
        while True:
            self._to_lay_out.clear()
            await in_turns(self._fleet.settle_in_steps(), self._give_way)
            if self._following.cluster.is_synced and not self._readiness.is_laid_out:
                self._fleet.snapshot_of_all()
                self._garbage.tidy()  # now, for it takes long: nobody is answered yet
                self._readiness.lay_out()
            if self._readiness.is_laid_out:
                await self._following.renew(self._standings.prepare_in_steps)
            await _change(self._to_lay_out)
            await asyncio.sleep(GATHER_SECONDS)

    async def evaluate(self) -> None:
        """Evaluate what has changed until cancelled.

        Not in turn with the above: that waits while readings are taken over, which changes
        hundreds of nodes, a few at a time; a question would have to evaluate all that came before.
        And at once: where kube-scheduler has many cores, it asks about the next pod two
        milliseconds after it has bound the last one.
        """
        while True:
            self._to_evaluate.clear()
            if self._readiness.is_laid_out:
                await in_turns(self._standings.warm_in_steps(), self._give_way)
            await asyncio.sleep(GATHER_SECONDS)
            await _change(self._to_evaluate)

    async def foresee(self) -> None:
        """Evaluate what pods ask for that have just come, until cancelled.

        kube-scheduler hears of them when we do, and asks once its own filters have looked at them:
        no time to wait for others.
        """
        while True:
            record = await self._newcomers.get()
            request = self._requests.read(record, self._fleet.policy).request
            if request is not None:
                request = self._fleet.informed(request, record.kin)
                await in_turns(self._standings.expect_in_steps(request), self._give_way)


async def _change(change: asyncio.Event) -> None:
    """Wait for something to do."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS):
            await change.wait()
