"""A node's score is a number for any numbers of its agent."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.report.contract import AGE, MEAN, XID_AGE, Holders, Layout, LayoutDevice, Update
from extender.core.devices.readings import Signal
from extender.core.policy import Foreign, Strategy
from extender.sources.agents.refusal import RefusedError
from extender.sources.agents.states import _MAX_SHARES, _ROWS, AgentState, readings_of
from testkit.builders import request
from testkit.world import World, one_node

ODD = st.sampled_from(
    [0.0, -0.0, 0.5, 1.0, -1.0, 1e12, 1e300, -1e300, 5e-324, math.inf, -math.inf, math.nan]
)
ROUNDS = 3


@given(
    values=st.lists(
        st.lists(ODD | st.floats(), min_size=len(_ROWS), max_size=len(_ROWS)),
        min_size=ROUNDS,
        max_size=ROUNDS,
    ),
    times=st.lists(st.tuples(ODD, ODD), min_size=ROUNDS, max_size=ROUNDS),
    is_shared=st.booleans(),
)
def test_scores_are_numbers_for_any_values_of_an_agent(
    values: list[list[float]], times: list[tuple[float, float]], is_shared: bool
) -> None:
    world = one_node(1, replicas=4) if is_shared else one_node(1)
    world.read()
    state = AgentState("node")
    (device,) = world.devices.values()
    for row, (at, sent_at) in zip(values, times, strict=True):
        world.clock.now += 5.0
        state.apply(said(device.info.uuid, row, at, sent_at), world.clock.now)
        with np.errstate(all="ignore"):
            readings = readings_of([state], Foreign(), world.clock.now, 1)
            world.fleet.apply_readings(readings)
            decisions = [world.rank(request(strategy=strategy)) for strategy in Strategy]

        assert not any(np.isinf(column).any() for column in readings.columns.values())
        for decision in decisions:
            assert ((decision.scores >= 0) & (decision.scores <= 1)).all()


def test_a_mean_without_its_square_leaves_the_score_a_number() -> None:
    world = World()
    world.add_node("node", 1)
    (device,) = world.devices.values()
    row = [math.nan] * len(_ROWS)
    row[_ROWS.index(Signal.GPU_UTILIZATION)] = row[_ROWS.index(MEAN)] = 0.5
    row[_ROWS.index(AGE)] = 0.0
    world.bind("held")
    world.fleet.snapshot()
    world.clock.now += 60.0
    state = AgentState("node")

    for _ in range(ROUNDS):
        world.clock.now += 5.0
        state.apply(said(device.info.uuid, row, 1.0, 1.0), world.clock.now)
        world.fleet.apply_readings(readings_of([state], Foreign(), world.clock.now, 1))

    assert math.isfinite(world.estimated(device, "next_hour"))
    assert math.isfinite(world.rank().scores[0])


def test_an_xids_age_arrives_unchanged() -> None:
    state = AgentState("node")
    rows = [math.nan] * len(_ROWS)
    rows[_ROWS.index(Signal.XID)], rows[_ROWS.index(XID_AGE)] = 48.0, 42.0

    state.apply(said("GPU-0", rows, 100.0, 100.0), 100.0)
    own = readings_of([state], Foreign(), 100.0, 1).own

    assert own is not None
    assert own.xid_age.tolist() == [42.0]


@pytest.mark.parametrize(
    "lie",
    [
        *({"uuid": ""}, {"uuid": "x" * 200}, {"uuid": "GPU-\x9b31m"}, {"uuid": "GPU-\u202e0"}),
        *(
            {"gpu_instance_id": "9" * 5000},
            {"gpu_instance_id": "-1"},
            {"gpu_instance_id": "\u00b2"},
        ),
    ],
    ids=range(7),
)
def test_a_device_whose_ids_the_driver_cannot_have_reported_is_refused(lie: dict[str, str]) -> None:
    device = msgspec.structs.replace(LayoutDevice(uuid="GPU-0"), **lie)

    with pytest.raises(RefusedError, match="valid UUID"):
        AgentState("node").apply(described(device), 100.0)


@pytest.mark.parametrize(
    ("index", "expected"), [(0, 0), (15, 15), (-1, None), (1 << 63, None)], ids=range(4)
)
def test_an_impossible_index_is_unknown(index: int, expected: int | None) -> None:
    state = AgentState("node")

    state.apply(described(LayoutDevice(uuid="GPU-0", index=index)), 100.0)

    assert [info.index for info in state.infos] == [expected]


def test_descriptions_and_names_of_pods_are_short_and_printable() -> None:
    state, odd = AgentState("node"), "\x9b31m\u202e" + "x" * 1000
    device = LayoutDevice(uuid="GPU-0", model=odd, mig_profile=odd)

    state.apply(described(device, Holders(pods=(((odd, odd, "uid"),),)), driver=odd), 100.0)

    (info,) = state.infos
    (pods,) = (state.pods or {}).values()
    for shown in (info.model, info.mig_profile, info.driver_version, *pods, *state.uids):
        assert shown.isprintable()
        assert len(shown) < 320


def test_a_card_has_at_most_64_nvlinks() -> None:
    state = AgentState("node")

    state.apply(described(LayoutDevice(uuid="GPU-0", nvlink_peers=("GPU-1",) * 1000)), 100.0)

    assert [info.place and info.place.nvlink_peers for info in state.infos] == [("GPU-1",) * 64]


def test_too_many_holders_are_refused() -> None:
    most = Holders(pods=((("ns", "pod", "uid"),) * _MAX_SHARES,))
    AgentState("node").apply(described(LayoutDevice(uuid="GPU-0"), most), 100.0)

    more = Holders(pods=((("ns", "pod", "uid"),) * (_MAX_SHARES + 1),))
    with pytest.raises(RefusedError, match="8193 holders: must be at most 8192"):
        AgentState("node").apply(described(LayoutDevice(uuid="GPU-0"), more), 100.0)


@pytest.mark.parametrize("count", [-1, (1 << 64) - 1], ids=range(2))
def test_a_share_of_impossible_size_is_refused(count: int) -> None:
    lie = msgspec.structs.replace(
        described(LayoutDevice(uuid="GPU-0")), shares=((0, "uid", count),)
    )

    with pytest.raises(RefusedError, match=r"1 shares of memory: .* from 0 to 1e\+18 bytes"):
        AgentState("node").apply(lie, 100.0)


def described(device: LayoutDevice, holders: Holders | None = None, driver: str = "") -> Update:
    layout = Layout(driver_version=driver, devices=(device,))
    return Update(node="node", at=100.0, sent_at=100.0, layout=layout, holders=holders)


def said(uuid: str, row: Sequence[float], at: float, sent_at: float) -> Update:
    layout = Layout(devices=(LayoutDevice(uuid=uuid, index=0),), rows=_ROWS)
    values = np.array(row, dtype="<f8").tobytes()
    return Update(node="node", at=at, sent_at=sent_at, is_news=True, layout=layout, values=values)
