"""Last hour of a node's devices, from Prometheus or else from our own samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from extender.core.devices.readings import DeviceKey
from extender.core.steps import finish
from extender.insight import last_hour
from extender.insight.last_hour import (
    _KEPT_SECONDS,
    _STEPS,
    LastHour,
    ShortMemory,
    Values,
    half_percents,
)
from testkit.cards import BUSY, CARD_BYTES, IDLE
from testkit.mig import mig_world
from testkit.world import World


def note(memory: ShortMemory) -> None:
    finish(memory.note_in_steps())


async def last_hour_of(past: LastHour, world: World, node: str = "node") -> Any:
    return await past.of(world.fleet.snapshot(), node)


# --- our own samples ------------------------------------------------------------------------------


async def test_the_history_keeps_only_an_hour() -> None:
    world = World()
    world.add({"node": [IDLE]})
    memory = ShortMemory(world.fleet, lambda: world.now)
    for minute in range(_STEPS + 5):
        world.now += 60.0
        world.report({"node": [BUSY if minute % 2 else IDLE]})
        note(memory)

    reported = await last_hour_of(LastHour(world.fleet, memory, None), world)

    assert reported["source"] == "memory"
    assert reported["times"] == [world.now - 60.0 * ago for ago in reversed(range(_STEPS))]
    assert reported["series"]["activity"] == [[0.9, 0.0] * (_STEPS // 2)]
    assert reported["series"]["memory"] == [[0.75, 0.0] * (_STEPS // 2)]


async def test_history_of_a_device_is_not_reported_of_the_next_in_its_row() -> None:
    world = World()
    world.add({"old": [BUSY]})
    memory = ShortMemory(world.fleet, lambda: world.now)
    note(memory)
    world.fleet.remove_node("old")
    world.add({"new": [IDLE]}, readings=1)
    note(memory)

    reported = await last_hour_of(LastHour(world.fleet, memory, None), world, "new")

    assert reported["series"] == {"activity": [[None, 0.0]], "memory": [[None, 0.0]]}


def test_no_value_is_known_of_minutes_without_a_fresh_reading() -> None:
    world = World()
    world.add({"node": [BUSY]})
    memory = ShortMemory(world.fleet, lambda: world.now)
    note(memory)
    world.now += 300.0
    note(memory)

    _, activity, used = memory.columns([0])

    for column, first in ((activity, 0.9), (used, 0.75)):
        assert column[0, 0] == first
        assert np.isnan(column[1, 0])


def test_devices_without_samples_have_no_values() -> None:
    world = World()
    memory = ShortMemory(world.fleet, lambda: world.now)
    assert [column.shape for column in memory.columns([0, 7])] == [(0,), (0, 2), (0, 2)]

    world.add({"node": [BUSY]})
    note(memory)
    world.add({"later": [BUSY]})

    _, activity, _ = memory.columns([7, 0, 1])
    assert np.isnan(activity[0, [0, 2]]).all()
    assert activity[0, 1] == 0.9


def test_a_minute_shows_once_all_devices_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_hour, "_PIECE", 2)
    world = World()
    world.add({"node": [IDLE] * 5})
    memory = ShortMemory(world.fleet, lambda: world.now)
    for _ in range(_STEPS):  # from now on, each minute replaces one
        note(memory)
        world.now += 60.0
        world.report({"node": [IDLE] * 5})
    world.report({"node": [BUSY] * 5})

    steps = 0
    for _ in memory.note_in_steps():
        steps += 1
        times, activity, _ = memory.columns([0])
        assert (len(times), activity.max()) == (_STEPS - 1, 0.0)

    rows = len(world.fleet.snapshot().telemetry.latest)  # with spare ones
    assert steps == 1 + rows // 2
    times, activity, _ = memory.columns([0, 4])
    assert (len(times), times[-1]) == (_STEPS, world.now)
    assert activity[-1].tolist() == [0.9, 0.9]


def test_ratios_are_kept_in_half_percents() -> None:
    ratios = np.array([-0.1, 0.0, 0.004, 0.5, 1.0, 1.7, 0.5])

    kept = half_percents(ratios, np.array([True] * 6 + [False]))

    assert kept.tolist() == [0, 0, 1, 100, 200, 200, 255]


async def test_instances_of_a_card_are_in_the_order_of_their_ids() -> None:
    world = mig_world()
    memory = ShortMemory(world.fleet, lambda: world.now)
    note(memory)

    reported = await last_hour_of(LastHour(world.fleet, memory, None), world, "node-m")

    assert reported["series"]["activity"] == [[0.9], [0.0], [0.0], [0.9]]


# --- Prometheus -----------------------------------------------------------------------------------


@dataclass
class _Hour:
    times: tuple[float, ...] = ()
    activity: Mapping[DeviceKey, Values] = field(default_factory=dict)
    memory_bytes: Mapping[DeviceKey, Values] = field(default_factory=dict)
    error: str = ""


@dataclass
class FakePlots:
    """Stand-in for the queries to Prometheus."""

    answer: _Hour
    is_configured: bool = True
    requested: list[list[str]] = field(default_factory=list)

    async def hour(self, devices: Sequence[DeviceKey]) -> _Hour:
        self.requested.append([uuid for uuid, _ in devices])
        return self.answer

    async def past(self, devices: Sequence[DeviceKey], *, seconds: float, steps: int) -> _Hour:
        raise AssertionError((devices, seconds, steps))


KNOWN = DeviceKey(("GPU-node-0", ""))
HOUR = _Hour((1.0, 2.0), {KNOWN: [0.5, None]}, {KNOWN: [CARD_BYTES / 4, None]})


@pytest.fixture
def world() -> World:
    world = World()
    world.add({"node": [IDLE, IDLE], "other": [IDLE]})
    return world


def past_of(world: World, plots: FakePlots) -> LastHour:
    memory = ShortMemory(world.fleet, lambda: world.now)
    note(memory)
    return LastHour(world.fleet, memory, plots)


async def test_prometheus_answers_for_all_devices_of_a_node(world: World) -> None:
    plots = FakePlots(HOUR)

    reported = await last_hour_of(past_of(world, plots), world)

    assert reported == {
        "source": "prometheus",
        "times": (1.0, 2.0),
        "series": {"activity": [[0.5, None], [None, None]], "memory": [[0.25, None], [None, None]]},
    }
    assert plots.requested == [["GPU-node-0", "GPU-node-1"]]


async def test_prometheus_is_queried_again_after_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_hour, "_KEPT_NODES", 2)
    world.add({"third": [IDLE]})
    plots = FakePlots(HOUR)
    past = past_of(world, plots)

    async def queries(*nodes: str) -> int:
        """Return the number of queries that an answer about each of these nodes took."""
        before = len(plots.requested)
        for node in nodes:
            await last_hour_of(past, world, node)
        return len(plots.requested) - before

    assert await queries("node", "node", "other", "node") == 2
    world.now += _KEPT_SECONDS
    assert await queries("node") == 1
    assert await queries("third", "node", "third") == 1
    assert await queries("other") == 1  # the oldest answer made room for the third node's
    world.now -= 3600.0  # the clock was set back
    assert await queries("other") == 1


@pytest.mark.parametrize(
    "plots",
    [
        pytest.param(None, id="no Prometheus"),
        pytest.param(FakePlots(HOUR, is_configured=False), id="none configured"),
        pytest.param(FakePlots(_Hour(error="cannot query")), id="an error"),
        pytest.param(
            FakePlots(_Hour((1.0,), {KNOWN: [None]}, {KNOWN: [None]}, "no series")), id="no value"
        ),
    ],
)
async def test_without_values_of_prometheus_our_own_samples_are_reported(
    world: World, plots: Any
) -> None:
    reported = await last_hour_of(past_of(world, plots), world)

    assert reported.pop("note", "") == (plots.answer.error if plots and plots.is_configured else "")
    assert reported == {
        "source": "memory",
        "times": [world.now],
        "series": {"activity": [[0.0], [0.0]], "memory": [[0.0], [0.0]]},
    }


def test_a_memory_ratio_needs_the_total() -> None:
    assert last_hour._shares([8.0, None], 16.0) == [0.5, None]
    assert last_hour._shares([8.0], 0.0) == [None]
