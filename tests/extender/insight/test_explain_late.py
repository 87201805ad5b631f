"""Pod that is bound long after its decision: the explanation shows the node at the binding."""

from testkit.api_requests import decide, get
from testkit.cards import BUSY, IDLE
from testkit.webhook_requests import MakeClient
from testkit.world import World


async def test_a_node_shown_as_it_was_at_the_binding_says_so(
    aiohttp_client: MakeClient,
) -> None:
    world = World()
    world.add({"idle": [IDLE, IDLE], "half": [IDLE, BUSY]})
    client = await aiohttp_client(world.build_app())
    world.placer.detailed = 1
    await decide(client, "idle", "half", name="p")
    world.now += 60.0
    world.report({"half": [IDLE, IDLE]})
    await decide(client, "idle", name="another")
    world.history.note_bound(world.add_pod("p", "half"), "half")

    first, second = (await get(client, "/v1/explain", pod="team/p"))["nodes"]

    assert [first["is_late"], second["is_late"]] == [False, True]
    assert (second["node"], second["rank"], second["rejection"]) == ("half", 2, None)
    assert second["lost_by"].startswith("scored ")
    assert second["lost_by"].endswith(f"in the decision, idle {first['score']:.6f}")
