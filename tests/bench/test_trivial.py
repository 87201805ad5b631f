import pytest

from bench.trivial import build_app
from testkit.webhook_questions import Client, MakeClient

NODES = ["c", "a", "b"]


def question(pod: str) -> dict[str, object]:
    return {"Pod": {"metadata": {"uid": pod}}, "Nodes": None, "NodeNames": NODES}


async def counted(client: Client) -> int:
    """Return about how many pods it says that filter was answered."""
    return int(await (await client.get("/healthz")).text())


@pytest.mark.parametrize(("shortlist", "named"), [(0, NODES), (2, ["c", "a"]), (9, NODES)])
async def test_the_first_names_are_given_back(
    aiohttp_client: MakeClient, shortlist: int, named: list[str]
) -> None:
    client = await aiohttp_client(build_app(shortlist))

    answer = await (await client.post("/filter", json=question("p"))).json()

    assert (answer["NodeNames"], answer["Error"]) == (named, "")


async def test_every_name_has_the_same_score(aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(build_app())

    answer = await (await client.post("/prioritize", json=question("p"))).json()

    assert [one["Host"] for one in answer] == NODES
    assert len({one["Score"] for one in answer}) == 1


async def test_pods_about_which_filter_was_answered_are_counted_once(
    aiohttp_client: MakeClient,
) -> None:
    client = await aiohttp_client(build_app())
    assert await counted(client) == 0

    for pod in ("p", "q", "p"):
        await client.post("/filter", json=question(pod))
        await client.post("/prioritize", json=question(pod))

    assert await counted(client) == 2
