"""Pods that name their node and GPUs, or the models that they accept."""

import pytest

from simulation.models import A100_40GB, V100
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


async def test_a_node_that_does_not_exist_is_named_in_an_event(world: World) -> None:
    node = world.add("gpu-1", 1)
    await world.start()
    lost = pod("lost", annotations=target("gpu-7"))
    await world.client.create(lost)

    await world.client.wait_unschedulable(lost)
    shown = await world.describe(lost, "idlegpu.io/target")
    assert f"must be a node of the cluster: {node}; used instead: nothing, the pod waits" in shown

    anywhere = pod("anywhere", annotations=target("gpu-7", target_policy="prefer"))
    assert await world.place(anywhere) == node


async def test_no_pod_is_evicted_anywhere_but_on_the_target(world: World) -> None:
    wanted, other = world.add("wanted", 1), world.add("other", 1)
    await world.start()
    urgently = await world.priority_class("urgent", 1000)
    low = [pod(f"low-{node}", annotations=target(node)) for node in (wanted, other)]
    assert await world.place_all(low) == [wanted, other]

    urgent = pod("urgent", priorityClassName=urgently, annotations=target(wanted))
    await world.client.create(urgent)

    assert await world.bound([urgent]) == [wanted]
    assert (await world.client.get(low[1]))["spec"]["nodeName"] == other


async def test_only_the_models_that_a_pod_requires_will_do(world: World) -> None:
    old, new = world.add("a-v100", 4, V100), world.add("z-a100", 1, A100_40GB)
    await world.start()
    only = {"idlegpu.io/require-models": "A100,H100"}

    assert await world.place(pod("first", annotations=only)) == new
    waiting = pod("second", annotations=only)
    await world.client.create(waiting)
    message = await world.client.wait_unschedulable(waiting)
    assert "GPUs of other models than the pod requires" in message
    assert await world.place(pod("any")) == old


async def test_a_model_may_be_written_as_a_node_label_has_it(world: World) -> None:
    world.add("a-v100", 4, V100)
    wanted = world.add("z-a100", 2, A100_40GB)
    await world.start()

    for at, model in enumerate(("A100-40GB", "NVIDIA-A100-SXM4-40GB-SHARED")):
        only = {"idlegpu.io/require-models": model}
        assert await world.place(pod(f"only-{at}", annotations=only)) == wanted


async def test_a_target_whose_named_gpu_is_broken_is_tried_later(world: World) -> None:
    broken, sound = world.add("a-broken", 2), world.add("b-sound", 2)
    world.fleet.set_xid(broken, 0, 48)
    await world.start()
    await world.wait_state(broken, 0, "unhealthy")

    both = target(f"{broken}::0;{sound}::0")

    assert await world.place(pod("first", annotations=both)) == sound
