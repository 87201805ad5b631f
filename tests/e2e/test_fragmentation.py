"""Placements that leave GPUs usable for the requests that pods make."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from testkit.controlplane.objects import GPU, Object, pod
from testkit.controlplane.world import World
from tests.e2e.console import by_url

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

USUAL: Final = 12
"""Number of pods with the usual request, enough for the extender to learn it."""


def asking(name: str, cpu: int, **spec: Any) -> Object:
    """Build a pod that requests one GPU and some CPUs."""
    made = pod(name, **spec)
    resources = {"limits": {GPU: "1"}, "requests": {"cpu": str(cpu)}}
    made["spec"]["containers"][0]["resources"] = resources
    return made


async def test_a_pod_goes_where_it_leaves_gpus_that_usual_pods_can_use(
    world: World, tmp_path: Path
) -> None:
    tight, roomy = world.add("a-tight", 2), world.add("b-roomy", 4)
    others = world.add("c-others", USUAL)
    await world.start()
    await world.fill_host(tight, requests={"cpu": "98"})  # of 128: 30 are left
    await world.scheduler_synced(tight)
    large = asking("large", 25)
    file = tmp_path / "large.json"
    file.write_text(json.dumps(large))
    command = by_url(world)

    best_fit = await command("explain", "-f", str(file))
    only_others = {"kubernetes.io/hostname": others}
    usual = [asking(f"usual-{number}", 8, nodeSelector=only_others) for number in range(USUAL)]
    assert await world.place_all(usual) == [others] * USUAL
    await world.settled()
    learned = await command("explain", "-f", str(file))

    # On the tight node the pod would leave 5 CPUs for the other GPU, and usual pods need 8.
    assert f"would go to {tight}" in best_fit.out
    assert f"would go to {roomy}" in learned.out
    assert await world.place(large) == roomy
