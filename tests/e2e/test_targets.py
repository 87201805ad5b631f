"""Pods that name their node and GPUs, or the models that they accept."""

import pytest

from testkit.controlplane.objects import pod
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def target(text: str, **annotations: str) -> dict[str, str]:
    named = {f"idlegpu.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return {"idlegpu.io/target": text} | named


async def test_a_pod_goes_to_the_node_that_it_names_and_nowhere_else(world: World) -> None:
    wanted, other = world.add("z-wanted", 2), world.add("a-other", 2)
    await world.start()

    first = pod("first", gpus=2, annotations=target(f"{wanted}::0,1"))
    assert await world.place(first) == wanted
    assert "GPU 0,1 as requested" in await world.describe(first, "GPU placement: ")

    second = pod("second", annotations=target(wanted))
    await world.client.create(second)
    message = await world.client.wait_unschedulable(second)
    assert "were not named in the pod's idlegpu.io/target" in message
    assert "Insufficient nvidia.com/gpu" in message

    assert await world.place(pod("third", annotations=target(f"{wanted};{other}"))) == other
    assert await world.place(pod("fourth", annotations=target(wanted, target_policy="prefer"))) == (
        other
    )
    await world.client.delete(first)
    assert await world.bound([second]) == [wanted]
