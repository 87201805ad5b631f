"""Test what the extender takes from an agent's updates, and the readings that it makes of them."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest

from agent.report.contract import (
    AGE,
    FOREIGN_MEMORY,
    FOREIGN_UTILIZATION,
    MAX_DEVICE_PROCESSES,
    MAX_PROCESSES,
    MEAN,
    MEAN_SQUARE,
    XID_AGE,
    ForeignProcess,
    Holders,
    Layout,
    LayoutDevice,
    Update,
)
from extender.core.devices.readings import DeviceKey, Readings, Signal
from extender.core.policy import Foreign
from extender.sources.agents.refusal import AgentRefusal, RefusedError
from extender.sources.agents.states import (
    _MAX_AHEAD_SECONDS,
    _MAX_DEVICES,
    _MAX_PID,
    _MAX_ROWS,
    _MAX_SHARES,
    _MAX_VALUE,
    AgentState,
    readings_of,
)

NOW: Final = 1000.0
NAN: Final = math.nan
ROWS: Final = ("unknown", Signal.POWER.value, AGE, FOREIGN_MEMORY, FOREIGN_UTILIZATION, MEAN)
KEYS: Final = [DeviceKey(("GPU-0", "")), DeviceKey(("GPU-1", ""))]


def layout(*devices: LayoutDevice, rows: Sequence[str] = ()) -> Layout:
    known = devices or (LayoutDevice(uuid="GPU-0"), LayoutDevice(uuid="GPU-1"))
    return Layout(devices=known, rows=tuple(rows))


def update(*values: Sequence[float], node: str = "node", **changes: Any) -> Update:
    described = {"at": NOW, "sent_at": NOW, **changes}
    return Update(node=node, values=np.array(values, dtype="<f8").tobytes(), **described)


def state_of(*updates: Update) -> AgentState:
    state = AgentState("node")
    for one in updates:
        state.apply(one, NOW)
    return state


def refused(one: Update) -> str:
    """Return why an update of two devices without values is refused."""
    state = state_of(update(layout=layout()))
    with pytest.raises(RefusedError) as caught:
        state.apply(one, NOW)
    assert caught.value.refusal is AgentRefusal.BAD_REPORT
    return str(caught.value)


# --- layouts --------------------------------------------------------------------------------------


def test_shares_that_the_kubelet_offers_are_known_by_profile() -> None:
    devices = (
        LayoutDevice(uuid="GPU-0", replicas=1),
        LayoutDevice(uuid="GPU-1", gpu_instance_id="7", mig_profile="1g.10gb", replicas=4),
        LayoutDevice(uuid="GPU-2", gpu_instance_id="7", mig_profile="2g.20gb", replicas=0),
        LayoutDevice(uuid="GPU-3", gpu_instance_id="7", mig_profile="3g.40gb"),
    )

    assert AgentState("node").replicas == {}
    assert state_of(update(layout=layout(*devices))).replicas == {"": 1, "1g.10gb": 4}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (LayoutDevice(uuid="GPU-0"), None),
        (LayoutDevice(uuid="GPU-0", numa_node=1), ("GPU-0", 1, ())),
        (LayoutDevice(uuid="GPU-0", nvlink_peers=("GPU-1",)), ("GPU-0", None, ("GPU-1",))),
        (LayoutDevice(uuid="GPU-0", gpu_instance_id="7", numa_node=0), ("", 0, ())),
    ],
    ids=["unknown", "numa", "nvlink", "instance"],
)
def test_a_device_has_a_place_as_far_as_its_agent_knows(
    device: LayoutDevice, expected: tuple[str, int | None, tuple[str, ...]] | None
) -> None:
    (info,) = state_of(update(layout=layout(device))).infos

    place = info.place
    assert (place and (place.uuid, place.numa_node, place.nvlink_peers)) == expected


def test_an_update_without_a_layout_is_of_the_last_one() -> None:
    state = state_of(update([1.0, 2.0], layout=layout(rows=["a"])), update([3.0, 4.0]))

    assert [info.key for info in state.infos] == KEYS
    with pytest.raises(RefusedError, match="the first update has no layout"):
        AgentState("node").apply(update(), NOW)
    with pytest.raises(RefusedError, match="from node 'other'") as caught:
        state.apply(update([3.0, 4.0], node="other"), NOW)
    assert caught.value.refusal is AgentRefusal.WRONG_NODE


@pytest.mark.parametrize(("devices", "rows"), [(_MAX_DEVICES, 1), (1, _MAX_ROWS)])
def test_a_layout_has_a_limited_size(devices: int, rows: int) -> None:
    def sized(more_devices: int, more_rows: int) -> Layout:
        listed = (LayoutDevice(uuid=f"GPU-{at}") for at in range(devices + more_devices))
        return layout(*listed, rows=[str(at) for at in range(rows + more_rows)])

    state_of(update(*[[0.0] * devices] * rows, layout=sized(0, 0)))
    more = sized(devices > 1, rows > 1)

    assert "must be at most 256 and 256" in refused(update(layout=more))


@pytest.mark.parametrize("count", [1, 3])
def test_values_are_of_all_rows_and_devices(count: int) -> None:
    assert "must be 0 rows of 2 devices" in refused(update([0.0] * count))


def test_two_devices_of_one_identity_are_refused() -> None:
    twice = layout(LayoutDevice(uuid="GPU-0"), LayoutDevice(uuid="GPU-0"))

    assert "layout has a device twice" in refused(update(layout=twice))


# --- pods and processes ---------------------------------------------------------------------------


def test_holders_are_known_by_device_and_their_uids_by_pod() -> None:
    pods = ((("ns", "a", "uid-a"), ("ns", "b", "")), ())
    state = state_of(update(layout=layout(), holders=Holders(pods=pods)))

    found = state.holders()
    assert found is not None
    assert found.pods == {KEYS[0]: ("ns/a", "ns/b")}
    assert (found.uids, found.at) == ({"ns/a": "uid-a"}, NOW - 5.0)

    state.apply(update(), NOW)
    assert state.holders() == found, "they are unchanged"
    state.apply(update(holders=Holders(pods=((("ns", "a", "uid-a"),), None))), NOW)
    assert (state.holders(), state.uids) == (None, {})
    state.apply(update(holders=Holders(pods=pods)), NOW)
    state.apply(update(layout=layout()), NOW)
    assert (state.holders(), state.uids) == (None, {})


def test_holders_of_more_devices_than_there_are_and_too_many_are_refused() -> None:
    one = ("ns", "a", "")
    most = Holders(pods=((one,) * (_MAX_SHARES - 1), (one,)))
    more = Holders(pods=((one,) * _MAX_SHARES, (one,)))

    state_of(update(layout=layout(), holders=most))

    assert "8193 holders: must be at most 8192" in refused(update(holders=more))
    assert "holders of 1 devices: must be of 2" in refused(update(holders=Holders(pods=((one,),))))


def test_memory_of_pods_is_known_by_device() -> None:
    shares = ((1, "uid-a", 0), (0, "uid-b", 5))
    state = state_of(update(layout=layout(), shares=shares))

    assert list(state.shares) == [(KEYS[1], "uid-a", 0), (KEYS[0], "uid-b", 5)]
    state.apply(update(), NOW)
    assert not state.shares


@pytest.mark.parametrize(
    "shares",
    [
        ((2, "uid", 1),),
        ((-1, "uid", 1),),
        ((0, "uid", -1),),
        ((0, "uid", int(_MAX_VALUE) + 1),),
        ((0, "uid", 1),) * (_MAX_SHARES + 1),
    ],
    ids=["no such device", "negative device", "negative", "too large", "too many"],
)
def test_impossible_memory_of_pods_is_refused(shares: tuple[tuple[int, str, int], ...]) -> None:
    assert "shares of memory: must be at most" in refused(update(shares=(*shares, (0, "uid", 1))))
    state_of(update(layout=layout(), shares=((0, "uid", int(_MAX_VALUE)),)))


def test_the_largest_foreign_processes_of_a_device_come_first() -> None:
    sizes = (3, None, 9, 5, 7, 1)
    processes = tuple(
        ForeignProcess(device=0, pid=pid, memory_bytes=size)
        for pid, size in enumerate(sizes, start=1)
    )
    state = state_of(update(layout=layout(), foreign=processes))

    (found,) = state.foreign.values()
    assert [one.pid for one in found] == [3, 5, 4, 1]
    assert len(found) == MAX_DEVICE_PROCESSES
    state.apply(update(), NOW)
    assert list(state.foreign) == [KEYS[0]], "they are unchanged"
    state.apply(update(layout=layout()), NOW)
    assert state.foreign == {}


@pytest.mark.parametrize(
    ("started_at", "expected"),
    [
        (None, None),
        (0.0, 0.0),
        (-1.0, None),
        (NOW + _MAX_AHEAD_SECONDS, NOW + _MAX_AHEAD_SECONDS),
        (NOW + _MAX_AHEAD_SECONDS + 1, None),
        (NAN, None),
    ],
    ids=["unknown", "epoch", "negative", "a day ahead", "more ahead", "no number"],
)
def test_an_impossible_start_of_a_process_is_unknown(
    started_at: float | None, expected: float | None
) -> None:
    process = ForeignProcess(device=1, pid=_MAX_PID - 1, memory_bytes=1, started_at=started_at)

    (found,) = state_of(update(layout=layout(), foreign=(process,))).foreign[KEYS[1]]

    assert (found.started_at, found.pid) == (expected, _MAX_PID - 1)


@pytest.mark.parametrize(
    ("memory_bytes", "expected"),
    [(int(_MAX_VALUE), int(_MAX_VALUE)), (int(_MAX_VALUE) + 1, None), (None, None), (0, 0)],
    ids=["most", "too much", "unknown", "none"],
)
def test_an_impossible_memory_of_a_process_is_unknown(
    memory_bytes: int | None, expected: int | None
) -> None:
    process = ForeignProcess(device=0, pid=1, memory_bytes=memory_bytes)

    (found,) = state_of(update(layout=layout(), foreign=(process,))).foreign[KEYS[0]]

    assert found.memory_bytes == expected


@pytest.mark.parametrize(
    "process",
    [
        ForeignProcess(device=2, pid=1),
        ForeignProcess(device=-1, pid=1),
        ForeignProcess(device=0, pid=0),
        ForeignProcess(device=0, pid=_MAX_PID),
        ForeignProcess(device=0, pid=1, memory_bytes=-1),
    ],
    ids=["no such device", "negative device", "no process", "no process id", "negative"],
)
def test_impossible_foreign_processes_are_refused(process: ForeignProcess) -> None:
    possible = ForeignProcess(device=0, pid=1)

    text = refused(update(foreign=(possible, process)))

    assert "2 foreign processes: must be at most" in text


def test_the_number_of_foreign_processes_is_limited() -> None:
    most = (ForeignProcess(device=0, pid=1),) * MAX_PROCESSES

    state_of(update(layout=layout(), foreign=most))

    assert "65 foreign processes" in refused(update(foreign=(*most, most[0])))


# --- readings -------------------------------------------------------------------------------------


def readings(*states: AgentState, foreign: Foreign | None = None) -> Readings:
    return readings_of(states, foreign or Foreign(), NOW + 1, 7)


@pytest.mark.parametrize(
    ("at", "sent_at", "expected"),
    [
        (90.0, 100.0, NOW - 10.0),
        (100.0, 100.0, NOW),
        (110.0, 100.0, NOW),
        (0.0, 1e9, 0.0),
        (NAN, 100.0, NOW),
    ],
    ids=["before it was sent", "then", "afterwards", "ages ago", "unknown"],
)
def test_a_report_is_as_old_as_its_agent_says(at: float, sent_at: float, expected: float) -> None:
    assert state_of(update(layout=layout(), at=at, sent_at=sent_at)).at == expected


def test_readings_hold_the_known_rows_of_all_agents_side_by_side() -> None:
    first = state_of(
        update(
            [0.1, 0.2],
            [300.0, NAN],
            [4.0, -4.0],
            [2.0, 3.0],
            [0.5, 0.0],
            [1.5, 0.25],
            layout=layout(rows=ROWS),
            is_news=True,
        )
    )
    other = AgentState("other")
    other.apply(
        update(
            [2 * _MAX_VALUE],
            [-5.0],
            [9.0],
            node="other",
            layout=layout(LayoutDevice(uuid="GPU-9"), rows=[AGE, FOREIGN_MEMORY, XID_AGE]),
        ),
        NOW - 100.0,
    )

    found = readings(first, other, foreign=Foreign(memory_bytes=2, utilization=0.4))

    assert [info.key for info in found.devices] == [*KEYS, DeviceKey(("GPU-9", ""))]
    assert (found.source, found.at, found.tenants) == ("agent", NOW + 1, None)
    np.testing.assert_equal(found.columns, {Signal.POWER: [300.0, NAN, NAN]})
    np.testing.assert_equal(found.measured_at, [NOW - 4.0, NOW, NAN])
    own = found.own
    assert own is not None
    assert (own.nodes, set(own.news), own.devices) == (("node", "other"), {"node"}, 7)
    assert (own.holders, own.replicas) == ({"node": None, "other": None}, {})
    assert own.is_foreign.tolist() == [True, True, False]
    np.testing.assert_equal(own.foreign_bytes, [2.0, 3.0, 0.0])
    np.testing.assert_equal(own.mean, [1.0, 0.25, NAN])
    np.testing.assert_equal(own.mean_square, [NAN] * 3)
    np.testing.assert_equal(own.xid_age, [NAN, NAN, 9.0])
    assert MEAN_SQUARE not in ROWS


def test_no_agents_give_no_devices() -> None:
    assert (readings().devices, readings().columns) == ((), {})
