"""Test idle and busy by the recent window, ranking by the hour, and power only as a hint."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extender.core.decision.filtering import Code
from extender.core.devices.readings import History, Signal
from extender.core.policy import Policy
from extender.core.steps import finish
from testkit.agent.fleet_reports import windows
from testkit.agent.replay import RECORDED
from testkit.builders import GIB, ranking, rejected, request
from testkit.world import World, one_node

MINUTE = 60.0
NAN = float("nan")


def on_a_shared_card(**values: float) -> World:
    """Return a world with one time-sliced card whose tenant has run for an hour."""
    world = one_node(1, replicas=4)
    world.bind("tenant", on=[world.card()])
    world.read_after(30, 120, **values)
    return world


def state_of(world: World) -> str:
    decision = world.rank(request(requires_idle=True))
    return "busy" if decision.codes[0] == Code.NOT_IDLE else "idle"


# --- idle and busy --------------------------------------------------------------------------------


def test_a_shared_card_whose_tenant_went_idle_ten_minutes_ago_is_idle() -> None:
    world = on_a_shared_card(GRAPHICS_ACTIVE=0.9, GPU_UTILIZATION=0.9)
    assert state_of(world) == "busy"

    world.read_after(30, 20, GRAPHICS_ACTIVE=0.0, GPU_UTILIZATION=0.0)

    assert state_of(world) == "idle"
    assert world.estimated(world.card(), "peak") == 0.0
    assert world.estimated(world.card(), "utilization") > 0.5


def test_a_tenant_that_rests_for_a_minute_does_not_make_its_card_idle() -> None:
    world = on_a_shared_card(GRAPHICS_ACTIVE=0.9, GPU_UTILIZATION=0.9)

    world.read_after(30, 2, GRAPHICS_ACTIVE=0.0, GPU_UTILIZATION=0.0)

    assert state_of(world) == "busy"


def test_the_latest_reading_alone_makes_a_card_busy() -> None:
    world = on_a_shared_card()

    world.read_after(30, GRAPHICS_ACTIVE=0.9)

    assert state_of(world) == "busy"


@settings(max_examples=25, deadline=None)
@given(
    past=st.lists(st.sampled_from([0.0, 0.2, 0.6, 1.0]), min_size=4, max_size=30),
    recent=st.lists(st.sampled_from([0.0, 0.2, 0.6, 1.0]), min_size=20, max_size=20),
    minutes=st.sampled_from([5, 8, 10]),
)
def test_load_before_the_last_minutes_does_not_decide_between_idle_and_busy(
    past: list[float], recent: list[float], minutes: int
) -> None:
    world = World(Policy(recent_seconds=minutes * MINUTE))
    world.add_node("node", 1, replicas=4)
    world.read()
    world.bind("tenant", on=[world.card()])
    for value in [*past, *recent]:
        world.read_after(30, GRAPHICS_ACTIVE=value, GPU_UTILIZATION=0.0)

    peak = world.estimated(world.card(), "peak")

    # The oldest part has partly expired: it counts for between five sixths and all of its time.
    most = int(minutes * 2) + 1
    means = [float(np.mean(recent[-count:])) for count in range(int(most * 5 / 6) - 2, most + 1)]
    assert max(recent[-1], min(means)) - 1e-6 <= peak <= max(recent[-1], *means) + 1e-6


def test_the_idle_card_with_the_calmer_hour_comes_first() -> None:
    world = World()
    for name in ("a-was-busy", "b-was-calm"):
        world.add_node(name, 1, replicas=4)
    world.read()
    for name in ("a-was-busy", "b-was-calm"):
        world.bind(name, name, on=[world.card(name)])
    world.read_after(30, 60)
    world.card("a-was-busy").values[Signal.GRAPHICS_ACTIVE] = 0.8
    world.read_after(30, 20)

    world.read_after(30, 20, GRAPHICS_ACTIVE=0.0)

    assert ranking(world.rank()) == ["b-was-calm", "a-was-busy"]


# --- tenants that come and go ---------------------------------------------------------------------

WORKS = {"GRAPHICS_ACTIVE": 0.95, "GPU_UTILIZATION": 0.95}
PAUSES = {"GRAPHICS_ACTIVE": 0.0, "GPU_UTILIZATION": 0.0}


def test_a_new_tenant_does_not_make_a_pause_of_the_others_idleness() -> None:
    world = on_a_shared_card(**WORKS)
    world.bind("new", on=[world.card()])

    world.read_after(1, 1, **PAUSES)
    assert state_of(world) == "busy"
    world.read_after(15, 1, **PAUSES)

    assert state_of(world) == "busy"
    assert windows(world, world.card())[2] <= 2, "the hour is of the tenants as they are"


def test_an_empty_card_does_not_hide_the_load_of_its_first_tenant() -> None:
    world = one_node(1, replicas=4)
    world.read_after(30, 20)
    world.bind("tenant", on=[world.card()])
    world.read_after(30, 4, **WORKS)

    world.read_after(30, 1, **PAUSES)

    assert state_of(world) == "busy"


def test_load_from_before_the_first_tenant_stays() -> None:
    world = one_node(1, replicas=4)
    world.read_after(30, 20, **WORKS)
    world.bind("tenant", on=[world.card()])

    world.read_after(30, 2, **PAUSES)

    assert state_of(world) == "busy"


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "without-labels"])
def test_a_leaving_tenant_takes_an_even_share_of_the_recent_load(*, is_mapped: bool) -> None:
    world = one_node(1, replicas=4)
    world.is_mapped = is_mapped
    leaver, _ = (world.bind(name, on=[world.card()]) for name in ("leaver", "stays"))
    world.read_after(30, 40, **WORKS)

    world.end(leaver)
    world.read_after(30, 1, **PAUSES)

    assert world.estimated(world.card(), "peak") == pytest.approx(0.95 / 2, abs=0.05)
    assert state_of(world) == "busy"
    world.read_after(30, 9, **PAUSES)
    assert state_of(world) == "idle"


def test_after_a_restart_the_last_minutes_are_those_of_all_tenants() -> None:
    world = World()
    world.add_node("node", 1, replicas=4)
    for name, age in (("old", 3600.0), ("new", 30.0)):
        at = world.clock.now - age
        world.bind(name, on=[world.card()], bound_at=at, started_at=at)
    world.read(**PAUSES)
    times = world.clock.now - np.arange(600.0, 0.0, -30.0)

    finish(
        world.fleet.history_in_steps(
            History(
                times=times,
                devices=(world.card().info.key,),
                utilization=np.full((len(times), 1), 0.95),
            )
        )
    )

    assert state_of(world) == "busy"


# --- power ----------------------------------------------------------------------------------------

AT_REST = {
    "t4": (28.0, 70.0),
    "a10": (62.0, 150.0),
    "l4": (30.0, 72.0),
    "h200-capped": (130.0, 300.0),
    "half-of-its-limit": (150.0, 300.0),
}
"""Watts at rest and power limit of cards that were seen idle."""


@pytest.mark.parametrize("name", AT_REST)
def test_power_at_rest_is_no_foreign_use_and_refuses_nothing(name: str) -> None:
    watts, limit = AT_REST[name]
    world = one_node(1)

    world.read_after(30, 4, POWER=watts, POWER_LIMIT=limit)

    decision = world.rank(request(requires_idle=True))
    assert rejected(decision) == {}


def test_power_alone_proves_no_use_even_at_the_limit() -> None:
    world = one_node(1)

    world.read_after(30, 4, POWER=700.0, POWER_LIMIT=700.0)

    assert rejected(world.rank(request(requires_idle=True))) == {}
    assert world.estimated(world.card(), "utilization") == 1.0


@pytest.mark.parametrize(
    "agreeing",
    [{"MEMORY_USED": 2 * GIB}, {"DRAM_ACTIVE": 0.3}, {"SM_ACTIVE": 0.3}],
    ids=["memory", "memory-traffic", "multiprocessors"],
)
def test_power_with_another_sign_of_use_is_foreign_use(agreeing: dict[str, float]) -> None:
    world = one_node(1)

    world.read_after(30, 4, POWER=350.0, POWER_LIMIT=700.0, **agreeing)

    assert rejected(world.rank()) == {"node": Code.FOREIGN_USE}


def test_measured_power_at_rest_is_the_cards_rest_power() -> None:
    world = one_node(1)
    world.read_after(30, POWER=130.0, POWER_LIMIT=300.0)
    assert world.estimated(world.card(), "utilization") == pytest.approx(40 / 210)

    world.bind("tenant", on=[world.card()])
    world.read_after(30, 20)

    assert world.estimated(world.card(), "latest") == 0.0
    world.read_after(30, POWER=215.0)
    assert world.estimated(world.card(), "latest") == pytest.approx(0.5, abs=0.04)


def test_a_busy_card_does_not_change_its_rest_power() -> None:
    world = on_a_shared_card(GRAPHICS_ACTIVE=0.3, POWER=400.0, POWER_LIMIT=700.0)

    world.read_after(30, 5, GRAPHICS_ACTIVE=0.0, GPU_UTILIZATION=0.0)

    assert world.estimated(world.card(), "latest") == pytest.approx((400 - 210) / 490)


@pytest.mark.parametrize("load", ["idle", "loaded_but_idle_60GiB"])
@pytest.mark.parametrize("limit", [300.0, 700.0])
def test_a_real_card_at_rest_counts_as_idle_with_any_limit(load: str, limit: float) -> None:
    world = one_node(1)
    world.bind("tenant", on=[world.card()])
    for watts in RECORDED["h200"]["series"][load]["power_w"]:
        world.read_after(30, POWER=watts, POWER_LIMIT=limit)

    assert world.estimated(world.card(), "latest") < 0.02


# --- foreign use of shared cards ------------------------------------------------------------------


def test_foreign_use_of_a_shared_card_ranks_and_refuses_nothing() -> None:
    world = World()
    for name in ("a-foreign", "b-calm"):
        world.add_node(name, 1, replicas=4)
    world.card("a-foreign").values |= {
        Signal.GRAPHICS_ACTIVE: 0.6,
        Signal.MEMORY_USED: 20 * GIB,
        Signal.MEMORY_FREE: 60 * GIB,
    }
    world.read_after(30, 5)

    assert world.estimated(world.card("a-foreign"), "is_foreign")
    assert ranking(world.rank()) == ["b-calm", "a-foreign"]
    assert ranking(world.rank(request(requires_idle=True))) == ["b-calm"]
    assert rejected(world.rank(request(memory_bytes=int(70 * GIB)))) == {
        "a-foreign": Code.NO_MEMORY
    }


def test_paused_foreign_use_counts_for_an_hour() -> None:
    world = one_node(1, replicas=4)
    used: dict[str, Any] = {"MEMORY_USED": 20 * GIB, "MEMORY_FREE": 60 * GIB}
    for _ in range(20):
        world.read_after(30, GRAPHICS_ACTIVE=0.8, **used)
        world.read_after(30, GRAPHICS_ACTIVE=0.0)

    assert world.estimated(world.card(), "latest") == 0.0
    assert world.estimated(world.card(), "utilization") == pytest.approx(0.4, abs=0.03)


def test_foreign_use_of_a_whole_card_refuses_it() -> None:
    world = one_node(1)

    world.read_after(30, 3, GRAPHICS_ACTIVE=0.6, SM_ACTIVE=0.6)

    assert rejected(world.rank()) == {"node": Code.FOREIGN_USE}


LONE = [
    {"GPU_UTILIZATION": 1.0},
    {"GPU_UTILIZATION": 1.0, "GRAPHICS_ACTIVE": NAN},
    {"MEMORY_COPY_UTILIZATION": 0.12},
    {"DRAM_ACTIVE": 0.35},
    {"SM_ACTIVE": 0.9, "POWER": 100.0, "POWER_LIMIT": 700.0},
    {"GRAPHICS_ACTIVE": 0.9, "MEMORY_USED": 0.5 * GIB},
]
"""Activity by a single signal, without support by others."""


@pytest.mark.parametrize("values", LONE, ids=lambda values: "-".join(values).lower())
def test_one_signal_of_activity_alone_refuses_no_card_and_calls_none_idle(
    values: dict[str, float],
) -> None:
    world = one_node(1)
    world.add_node("silent", 1)
    world.card("silent").is_shown = False

    world.read_after(30, 6, **values)

    assert rejected(world.rank()) == {}
    if max(values[name] for name in values if name.endswith(("ACTIVE", "UTILIZATION"))) >= 0.3:
        assert ranking(world.rank()) == ["silent", "node"]
        assert "node" in rejected(world.rank(request(requires_idle=True)))


@pytest.mark.parametrize("values", LONE[:3], ids=lambda values: "-".join(values).lower())
@pytest.mark.parametrize(
    "agreeing", [{"TENSOR_ACTIVE": 0.11}, {"MEMORY_USED": 2 * GIB}, {"POWER": 400.0}], ids=str
)
def test_a_second_sign_that_agrees_makes_it_foreign_use(
    values: dict[str, float], agreeing: dict[str, float]
) -> None:
    world = one_node(1)

    world.read_after(30, 6, **values, **agreeing, POWER_LIMIT=700.0)

    assert rejected(world.rank()) == {"node": Code.FOREIGN_USE}
