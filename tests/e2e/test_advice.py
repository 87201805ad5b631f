"""`idlegpu advise` and `holders` in a real cluster, with the past from a real Prometheus."""

import time
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from simulation.kubelet import MEMORY_ANNOTATION, UTILIZATION_ANNOTATION
from testkit.controlplane.backfilling import Line, backfill
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World
from tests.e2e.console import by_url

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

HOUR: Final = 3600.0
LOOK_BACK_SECONDS: Final = 360.0
"""End of the past before now: longer than Prometheus returns an old sample (five minutes), so that
current values come only from the exporter."""
GIB: Final = 1 << 30


def past(uuid: str, *, percent: float, mib: float) -> list[Line]:
    """Return two hours of past samples of a card."""

    def constant(value: float) -> Any:  # seconds before now
        return lambda ago: value if ago > LOOK_BACK_SECONDS else None

    labels = {"UUID": uuid}
    return [
        Line(name="DCGM_FI_DEV_GPU_UTIL", labels=labels, value=constant(percent)),
        Line(name="DCGM_FI_DEV_FB_USED", labels=labels, value=constant(mib)),
    ]


async def bound_long_ago(world: World, *pods: Object) -> None:
    """Set the binding of pods to three hours ago in the API server."""
    at = datetime.fromtimestamp(time.time() - 3 * HOUR, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}
    for item in pods:
        await world.client.patch(item, {"status": {"conditions": [condition]}}, "status")


async def remember(world: World, lines: list[Line]) -> None:
    """Store a past in Prometheus, and restart the extender."""
    prometheus = world.services.prometheus.process
    await prometheus.stop()
    data = world.services.plane.folder / prometheus.name
    backfill(data, lines, now=time.time(), seconds=2 * HOUR)
    await world.services.extender.process.stop()
    await world.start(kubelets=False)


async def full_and_calm(world: World) -> tuple[str, str]:
    """Return a node whose shared card was full for two hours, and one with a calm card."""
    shared, whole = world.add_shared("shared", 1, replicas=4), world.add("whole", 1)
    await world.start(kubelets=False)
    tenants = await world.tenants(shared, 2, utilization=0.5, memory="4Gi")
    small = pod(
        f"{whole}-small",
        1,
        annotations={
            "idlegpu.io/gpu-memory": "40Gi",
            UTILIZATION_ANNOTATION: "0.01",
            MEMORY_ANNOTATION: "2Gi",
        },
        nodeName=whole,
    )
    uid = (await world.client.create(small))["metadata"]["uid"]

    async def is_placed() -> bool:
        return uid in world.fleet.placements

    await wait_for(is_placed, f"{small['metadata']['name']} holds a GPU")
    await bound_long_ago(world, small, *tenants)
    await world.settled()
    (busy,), (calm,) = world.fleet.views(shared), world.fleet.views(whole)
    await remember(
        world,
        [*past(busy.uuid, percent=100.0, mib=8192.0), *past(calm.uuid, percent=1.0, mib=2048.0)],
    )
    return shared, whole


async def test_advice_rests_on_the_history_in_prometheus(world: World) -> None:
    shared, whole = await full_and_calm(world)
    command = by_url(world)

    answer = (await command("advise", "--over", "2h", "--all", "-o", "json")).json

    cards = {(one["node"], one["index"]): one for one in answer["cards"]}
    card = cards[shared, 0]
    assert (card["verdict"], card["recommended_replicas"]) == ("do-not-share", 1)
    assert card["source"] == "prometheus"
    assert card["activity_ratio"] == pytest.approx(1.0, abs=0.02)
    assert card["memory_bytes"] == pytest.approx(8 * GIB, rel=0.05)
    assert card["looked_seconds"] > HOUR
    assert cards[whole, 0]["verdict"] == "share"
    assert answer["pods_unjudged"] == 0
    pods = {one["kind"]: one for one in answer["pods"] if one["pod"].endswith("-small")}
    assert set(pods) == {"uses-a-tenth", "requests-too-much"}
    excessive = pods["requests-too-much"]
    assert (excessive["requested_memory_bytes"], excessive["source"]) == (40 * GIB, "prometheus")
    assert excessive["suggested_memory_bytes"] < 10 * GIB

    shown = await command("advise", "--over", "2h", "--node", shared)
    assert "do-not-share" in shown.out
    assert "(prometheus)" in shown.out
    assert f"{whole}::0" not in shown.out

    # A pod is idle since before the extender was there.
    async def is_idle() -> dict[str, Any] | None:
        found = (await command("holders", "--idle-for", "90m", "-o", "json")).json["holders"]
        return next((one for one in found if one["pod"].endswith("-small")), None)

    holder = await wait_for(is_idle, "what was before the extender's start is known")
    assert 1.5 * HOUR < holder["idle_seconds"] < 2.1 * HOUR  # the past before that is unknown
    assert holder["is_at_least"]
    assert "for at least " in holder["why"]


async def test_advice_omits_use_without_history(world: World) -> None:
    shared = world.add_shared("shared", 1)
    await world.start(kubelets=False)
    await world.tenants(shared, 1, utilization=0.5)

    answer = (await by_url(world)("advise", "--node", shared, "--all", "-o", "json")).json

    (card,) = answer["cards"]
    assert (card["verdict"], card["recommended_replicas"]) == ("not-measured", 2)


async def test_gpus_without_cpu_are_stranded_by_the_pods_that_hold_it(world: World) -> None:
    node = world.add("filled", 8)
    await world.start(kubelets=False)
    await world.fill_host(node, requests={"cpu": "110"})  # of 128, and 8 are assumed for each GPU
    command = by_url(world)

    async def is_found() -> dict[str, Any] | None:
        found = (await command("advise", "--node", node, "-o", "json")).json["stranded"]
        return found[0] if found else None

    found = await wait_for(is_found, "the extender has seen the pod without GPUs")
    shown = await command("advise", "--node", node)

    assert (found["stranded_gpus"], found["free_gpus"]) == (6, 8)
    assert found["lacks"] == ["cpu"]
    assert [one["gpus"] for one in found["holders"]] == [0]
    assert "6 free GPUs are stranded" in shown.out
    assert f"burden-{node}" in shown.out
    assert f"kubectl taint node {node}" in shown.out
    best = await command("best", "--gpus", "2", "--model", "H100", "-o", "json")
    assert [one["stranded"] for one in best.json["best"] if one["node"] == node] == [6]
    assert best.json["models"]["H100"] == {"gpus": 8, "held": 0, "free": 2, "stranded": 6}
    many = await command("best", "--gpus", "3", status=1)
    assert "node(s) had stranded GPUs" in many.out
