"""The whole way of an XID: NVML's event, the agent's report, the extender's decision."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from agent.options import Options
from agent.push.updates import Digest, DigestBuilder, UpdateBuilder
from agent.report.contract import LENGTH_BYTES, Report, decode_update, frame
from agent.sampler import Sampler
from extender.core.decision.decision import Decision
from extender.core.policy import Foreign, Policy
from extender.sources.agents.states import AgentState, readings_of
from testkit.agent.replay import Replay, error, nvml_on
from testkit.cards import IDLE
from testkit.world import World

TIMEOUT = 10
WHOLE_CARD = 0xFFFFFFFF
OPTIONS = Options(node="gpu-7", period_seconds=60.0)


class Way:
    """A card of node `gpu-7` whose agent reports to an extender; the node `other` is idle."""

    def __init__(self) -> None:
        self.world = World()
        for name in ("gpu-7", "other"):
            self.world.register_node(name, gpus=1)
        self.events: SimpleQueue[Any] = SimpleQueue()
        replay = Replay(has_gpm=False)  # without GPM the first pass knows the load already
        replay.instead |= {
            "nvmlEventSetCreate": lambda: "set",
            "nvmlEventSetFree": lambda _: None,
            "nvmlDeviceRegisterEvents": lambda *_: None,
            "nvmlEventSetWait_v2": self._wait,
        }
        self.sampler = Sampler(nvml_on(replay), OPTIONS, clock=self.world.clock)
        thresholds = OPTIONS.verdict_policy.thresholds
        self._digests = DigestBuilder(OPTIONS.reports, thresholds, OPTIONS.foreign)
        self._updates, self._state = UpdateBuilder(), AgentState("gpu-7")
        self._sent = Digest()

    def _wait(self, _: object, __: int) -> Any:
        try:
            return self.events.get(timeout=0.05)
        except Empty:
            raise error(TIMEOUT) from None

    def happen(self, xid: int, instance: int = WHOLE_CARD) -> None:
        self.events.put(SimpleNamespace(eventType=8, eventData=xid, gpuInstanceId=instance))

    async def next_pass(self) -> Report:
        latest = self.sampler.latest
        async with asyncio.timeout(30):
            return await latest.wait_newer(latest.report.sequence if latest.report else 0)

    def decide(self, report: Report) -> Decision:
        """Send a report to the extender, and return its decision for a pod."""
        world, digest = self.world, self._digests.build(report)
        is_news = not self._sent.sequence or self._digests.is_news(self._sent, digest)
        self._sent = digest
        update = self._updates.build(report, digest, is_news=is_news, sent_at=world.now)
        self._state.apply(decode_update(frame(update)[LENGTH_BYTES:]), world.now)
        world.report({"other": [IDLE]})
        world.fleet.apply_readings(readings_of([self._state], Foreign(), world.now, 1))
        assert self._state.is_news is is_news
        self._state.is_news = False
        return world.rank()


@pytest.fixture
async def way() -> AsyncIterator[Way]:
    way = Way()
    running = asyncio.create_task(way.sampler.run())
    yield way
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    way.sampler.close()


def score(decision: Decision) -> float:
    return float(decision.scores[decision.candidates.index("gpu-7")])


@pytest.mark.parametrize(
    ("xid", "feasible"), [(48, 1), (79, 1), (63, 2), (13, 2)], ids=["card", "node", "less", "no"]
)
async def test_an_xid_reaches_the_decision_at_once(way: Way, xid: int, feasible: int) -> None:
    before = way.decide(await way.next_pass())
    way.happen(xid)

    after = way.decide(await way.next_pass())

    assert (before.feasible, after.feasible) == (2, feasible)
    assert (score(after) < score(before)) is (xid != 13)


async def test_it_is_news_once_and_counts_from_the_time_it_happened(way: Way) -> None:
    way.decide(await way.next_pass())
    way.happen(48)
    way.decide(await way.next_pass())
    happened_at = way.world.now

    found = {}
    for after in (10.0, Policy().health.xid_seconds - 1.0, Policy().health.xid_seconds + 1.0):
        way.world.now = happened_at + after
        found[after] = way.decide(await way.sampler.sample()).feasible

    assert list(found.values()) == [1, 1, 2]


async def test_an_xid_of_another_instance_changes_nothing(way: Way) -> None:
    before = way.decide(await way.next_pass())
    way.happen(79, instance=5)

    after = way.decide(await way.next_pass())

    assert (after.feasible, score(after)) == (2, score(before))
    assert way.sampler.xids.counts == {(card_of(way), 79): 1}


def card_of(way: Way) -> str:
    report = way.sampler.latest.report
    assert report is not None
    return report.devices[0].uuid
