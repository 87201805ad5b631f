"""Shadow mode: kube-scheduler places pods alone; the extender only records its decisions."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from extender.insight.decision_log.reader import LoggedBinding, LoggedDecision, read_log
from extender.insight.replay import Changes, replay
from simulation.devices import Loss
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SPREAD: Mapping[str, object] = {"strategy": "spread"}
SHADOW: Mapping[str, object] = {**SPREAD, "mode": "shadow", "wire": {"shortlist": 1}}


async def alone(world: World) -> None:
    """Run kube-scheduler without extenders."""
    config = {**world.services.scheduler_config(), "extenders": []}
    await world.services.ensure_scheduler(config)


async def test_pods_go_where_they_go_without_an_extender(world: World, tmp_path: Path) -> None:
    # The nodes that the extender prefers are full except for their GPUs, so kube-scheduler likes
    # them least.
    idle, busy = world.add("idle", 8), world.add("busy", 8)
    dead = world.add("dead", 4)
    log = tmp_path / "decisions"
    await world.start(SPREAD, kubelets=False)
    await world.tenants(busy, 6, utilization=0.9, memory="60Gi")
    world.fleet.kill_device(dead, 0, Loss.XID_79)
    await world.fill_host(idle, dead)
    await world.settled()
    await world.wait_state(dead, 1, "excluded")
    active = pod("active")
    assert await world.place(active) == idle

    await alone(world)
    bypassed = pod("bypassed")
    assert await world.place(bypassed) == busy
    for item in (active, bypassed):
        await world.end(item)
    await world.start({**SHADOW, "decision_log": {"path": str(log)}}, kubelets=False)
    shadow = pod("shadow")
    assert await world.place(shadow) == busy

    filtered, scored = sorted(await world.decisions(shadow), key=lambda one: one["number"])[-2:]
    assert [one["verb"] for one in (filtered, scored)] == ["filter", "prioritize"]
    for one in (filtered, scored):
        assert one["is_shadow"]
        assert one["node"] == idle
        # with a shortlist of one, kube-scheduler would not call prioritize
        assert one["candidates"] == 3
    await wait_bound(world, shadow, busy)

    async def is_logged() -> bool:
        # The file appears with its first lines, some time after the answer.
        return log.exists() and any(isinstance(line, LoggedBinding) for line in read_log([log]))

    await wait_for(is_logged, "the binding is in the log of decisions")
    lines = list(read_log([log]))
    assert {line.mode for line in lines if isinstance(line, LoggedDecision)} == {"shadow"}
    report = replay(lines, Changes(), {})
    assert report.exact == report.decisions >= 2
    assert (report.bound, report.followed) == (1, 0)
    assert (report.actual.placed, report.actual.activity) == (1, 0.0)


async def wait_bound(world: World, item: Object, node: str) -> None:
    """Wait until the extender knows that a pod was bound, and not to its choice."""

    async def is_recorded() -> bool:
        newest = max(await world.decisions(item), key=lambda one: int(one["number"]))
        return newest["bound_node"] == node and newest["is_followed"] is False

    await wait_for(is_recorded, "the decision records the other node")


async def test_a_pod_that_we_would_have_wait_is_placed(world: World) -> None:
    node = world.add("only")
    await world.start(SHADOW, kubelets=False)
    world.fleet.kill_device(node, 0, Loss.XID_79)
    await world.wait_state(node, 1, "excluded")
    picky = pod("picky", annotations={"idlegpu.io/require-idle": "true"})

    assert await world.place(picky) == node

    (newest, *_) = sorted(await world.decisions(picky), key=lambda one: -int(one["number"]))
    assert (newest["node"], newest["feasible"], newest["is_shadow"]) == (None, 0, True)
