"""Properties of every score, for any readings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import Signal
from extender.core.request.request import GpuRequest
from testkit.builders import GIB, ranking, request
from testkit.world import World

READABLE = st.sampled_from([0.0, 0.1, 0.25, 0.35, 0.9, 1.0, float("nan"), -1.0, float("inf")])
ACTIVITIES = (
    Signal.GPU_UTILIZATION,
    Signal.GRAPHICS_ACTIVE,
    Signal.SM_ACTIVE,
    Signal.TENSOR_ACTIVE,
    Signal.DRAM_ACTIVE,
)


@given(
    readings=st.lists(st.tuples(st.sampled_from(ACTIVITIES), READABLE), min_size=1, max_size=8),
    which=st.integers(0, 7),
    more=st.floats(0, 1),
    replicas=st.sampled_from([1, 4]),
    data=st.data(),
)
def test_more_activity_in_any_reading_never_raises_the_score(
    readings: list[tuple[Signal, float]],
    which: int,
    more: float,
    replicas: int,
    data: st.DataObject,
) -> None:
    at = which % len(readings)
    signal, value = readings[at]
    if not 0 <= value <= 1:  # a missing value is not less load
        return
    busier = [*readings[:at], (signal, max(value, more)), *readings[at + 1 :]]
    requested = data.draw(st.builds(request, st.just(1), requires_idle=st.booleans()))

    before, after = (
        score_after(readings, replicas, requested),
        score_after(busier, replicas, requested),
    )

    assert after[0] <= before[0]
    assert after[1] or not before[1]


def score_after(
    readings: list[tuple[Signal, float]], replicas: int, requested: GpuRequest
) -> tuple[float, int]:
    """Return score and code of a node whose only card had these readings, one each 30 s."""
    world = World()
    world.add_node("node-0", 1, replicas=replicas)
    if replicas > 1:
        world.bind("a", "node-0", on=[world.card("node-0")])
    for signal, value in readings:
        world.card("node-0").values[signal] = value
        world.read_after(30)
    decision = world.rank(requested)
    assert 0.0 <= decision.scores[0] <= 1.0
    return float(decision.scores[0]), int(decision.codes[0])


@pytest.mark.parametrize(
    "lost",
    [{Signal.XID}, {Signal.MEMORY_USED, Signal.MEMORY_FREE}, set(Signal) - {Signal.TEMPERATURE}],
    ids=["health", "memory", "died-in-the-middle-of-a-round"],
)
def test_a_node_known_to_be_bad_stays_so_while_queries_fail(lost: set[Signal]) -> None:
    world = World()
    for name in ("dead", "full", "good"):
        world.add_node(name, 1)
    for device in world.devices.values():
        device.values |= {Signal.XID: 0.0, Signal.TEMPERATURE: 40.0}
    world.card("dead").values[Signal.XID] = 48.0
    world.card("full").values |= {Signal.MEMORY_USED: 70 * GIB, Signal.MEMORY_FREE: 10 * GIB}
    world.read()
    requested = request(memory_bytes=int(20 * GIB))
    assert ranking(world.rank(requested)) == ["good"]

    for device in world.devices.values():
        for signal in lost & device.values.keys():
            del device.values[signal]
    for _ in range(4):
        world.read_after(30)
        assert ranking(world.rank(requested)) == ["good"]
    world.clock.now += 100  # and then no answer at all

    assert ranking(world.rank(requested)) == ["good"]
