"""Test the answers about pods that name their node."""

from testkit.webhook_requests import MakeClient, call, meta, names_request, pod
from testkit.world import World

NOT_TARGET = "node(s) were not named in the pod's idlegpu.io/target (idlegpu)"


async def test_the_answer_says_why_and_the_owner_is_warned(aiohttp_client: MakeClient) -> None:
    world = World()
    world.add({name: [] for name in ("a", "b")})
    for name in ("a", "b"):
        world.register_node(name)
    client = await aiohttp_client(world.build_app())
    request = names_request("a", "b", requester=pod(target="b"))

    answer = await call(client, "filter", request)

    assert answer["NodeNames"] == ["b"]
    assert answer["FailedAndUnresolvableNodes"] == {"a": NOT_TARGET}
    assert world.problems == []

    answer = await call(client, "filter", names_request("a", "b", requester=pod(target="c")))

    assert answer["NodeNames"] == []
    assert [problem.value for problem in world.problems] == ["c"]


async def test_a_prediction_reports_a_target_that_does_not_exist(
    aiohttp_client: MakeClient,
) -> None:
    world = World()
    for name in ("a", "b", "c"):
        world.register_node(name)
    client = await aiohttp_client(world.build_app())

    answer = await (await client.post("/v1/explain", json=pod(target="gone"))).json()

    assert answer["state"] == "unplaceable"
    (problem,) = answer["problems"]
    assert problem["message"].endswith("a, b, c; used instead: nothing, the pod waits for it")


async def test_no_pod_is_evicted_from_a_node_that_is_not_the_target(
    aiohttp_client: MakeClient,
) -> None:
    world = World()
    for name in ("a", "b"):
        world.register_node(name)
        world.add_pod(f"holder-{name}", name, gpus=2)
    client = await aiohttp_client(world.build_app())
    victims = meta("a", "b", uids=("uid-holder-a", "uid-holder-b"))
    request = {"Pod": pod(target="b;gone"), **victims}

    answer = await call(client, "preempt", request)

    assert list(answer["NodeNameToMetaVictims"]) == ["b"]


async def test_a_target_is_binding_while_the_inventory_is_incomplete(
    aiohttp_client: MakeClient,
) -> None:
    world = World(is_ready=False)
    client = await aiohttp_client(world.build_app())
    request = names_request("a", "b", requester=pod(target="b"))

    answer = await call(client, "filter", request)

    assert answer["NodeNames"] == ["b"]


async def test_the_pods_owner_is_warned_when_no_gpu_has_the_memory(
    aiohttp_client: MakeClient,
) -> None:
    world = World()
    world.add_node("n-0")
    world.read()
    client = await aiohttp_client(world.build_app())

    answer = await call(client, "filter", names_request("n-0", requester=pod(gpu_memory="81Gi")))

    assert answer["NodeNames"] == []
    assert [problem.annotation for problem in world.problems] == ["idlegpu.io/gpu-memory"]
