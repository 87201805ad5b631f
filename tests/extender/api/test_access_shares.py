"""Fair shares of the API server's reviews among callers, and protection from other sites."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from pydantic import ValidationError

from extender.api import caller as callers
from extender.api.access import make_access
from extender.core.nodes.inventory import PodRecord
from extender.server.json_api import json_answer
from extender.server.redaction import _ANOTHER_POD, pod_name
from extender.settings.api import ApiAccess, ApiSettings
from extender.settings.config import Settings
from testkit.fake_kube import eventually
from testkit.reviewers import EVERYWHERE
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World
from tests.extender.api.guarded_api import BEARER, TOKEN, GuardedApi, guarded_api, shown


@pytest_asyncio.fixture
async def guarded(tmp_path: Path, aiohttp_client: MakeClient) -> AsyncIterator[GuardedApi]:
    async with guarded_api(tmp_path, aiohttp_client) as found:
        yield found


async def guess(client: Client, guesses: int, source: str = "") -> list[int]:
    """Send unknown tokens concurrently; return the statuses of the answers."""

    async def one(number: int) -> int:
        headers = {"Authorization": f"Bearer guess{source}{number}"}
        return (await client.get("/v1/pods", headers=headers)).status

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(guesses)]
    return [task.result() for task in tasks]


async def test_guessed_tokens_are_reviewed_at_a_limited_rate(
    guarded: GuardedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_STRANGERS_SECONDS", 0.1)
    guarded.reviewers.rights["alice"] = {EVERYWHERE}
    monkeypatch.setattr(callers, "_REVIEWS_PER_SECOND", 5.0)
    client = await guarded.open()
    clock = asyncio.get_running_loop().time
    begun = clock()
    await shown(client)

    assert set(await guess(client, 50)) == {401, 429}
    # One second's quota, minus alice's request, plus what accrued since.
    assert len(guarded.reviewers.reviewed_tokens) <= 5 + 5 * (clock() - begun) + 1
    assert await shown(client) == ["blue/a", "red/b"]  # known callers are not affected


async def test_guessed_tokens_do_not_block_another_address(
    guarded: GuardedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_STRANGERS_SECONDS", 20.0)
    guarded.reviewers.rights["alice"] = {EVERYWHERE}
    monkeypatch.setattr(callers, "_REVIEWS_PER_SECOND", 5.0)
    client = await guarded.open()
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector) as greedy:

        async def guess_on(who: int) -> None:
            number = 0
            while True:
                number += 1
                headers = {"Authorization": f"Bearer guess{who}-{number}"}
                async with greedy.get(client.make_url("/v1/pods"), headers=headers) as response:
                    await response.read()

        guessing = [asyncio.create_task(guess_on(who)) for who in range(40)]
        await eventually(lambda: len(guarded.reviewers.reviewed_tokens) > 5)  # the burst is used up

        before = len(guarded.reviewers.reviewed_tokens)
        assert await shown(client) == ["blue/a", "red/b"]
        after = guarded.reviewers.reviewed_tokens[before:]
        for task in guessing:
            task.cancel()
        await asyncio.wait(guessing)

    # alice sends as soon as her previous request was served: one after the other she would be the
    # 21st.
    assert TOKEN in after[:10]


async def test_a_user_with_many_tokens_does_not_have_others_forgotten(
    guarded: GuardedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_MOST_CALLERS", 5)
    guarded.reviewers.rights["alice"] = {EVERYWHERE}
    monkeypatch.setattr(callers, "_REVIEWS_PER_SECOND", 1000.0)
    client = await guarded.open()
    await shown(client)
    for number in range(10):
        guarded.reviewers.users[f"mallory{number}"] = "mallory"
        await client.get("/v1/pods", headers={"Authorization": f"Bearer mallory{number}"})

    async def reviewed(token: str) -> bool:
        before = len(guarded.reviewers.reviewed_tokens)
        await client.get("/v1/pods", headers={"Authorization": f"Bearer {token}"})
        return len(guarded.reviewers.reviewed_tokens) > before

    assert not await reviewed(TOKEN)
    assert not await reviewed("mallory6")  # one of the latest five with alice's
    assert await reviewed("mallory5")
    assert not await reviewed("mallory6")  # it was used after the others
    assert not await reviewed(TOKEN)


async def test_reviews_of_one_user_do_not_delay_others(
    guarded: GuardedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_USER_REVIEWS", 2)
    guarded.reviewers.rights["alice"] = {EVERYWHERE}
    for number in range(8):
        guarded.reviewers.users[f"mallory{number}"] = "mallory"
    guarded.reviewers.hold = asyncio.Event()
    monkeypatch.setattr(callers, "_REVIEWS_PER_SECOND", 1000.0)
    client = await guarded.open()

    def get(token: str) -> asyncio.Task[object]:
        headers = {"Authorization": f"Bearer {token}"}
        return asyncio.create_task(client.get("/v1/pods", headers=headers))

    greedy = [get(f"mallory{number}") for number in range(8)]
    await eventually(lambda: len(guarded.reviewers.reviewed_rights) == 2)  # as many as permitted
    modest = get(TOKEN)
    await eventually(lambda: TOKEN in guarded.reviewers.reviewed_tokens)
    guarded.reviewers.hold.set()
    await asyncio.wait([modest, *greedy])

    # alice's one request comes before those of mallory's other tokens.
    assert ("alice", "") in guarded.reviewers.reviewed_rights[:5]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8889", 200),
        ("127.0.0.1", 200),
        ("127.8.8.8:8889", 200),
        ("[::1]:8889", 200),
        ("::1", 200),
        ("localhost:", 200),
        ("localhost.:8889", 200),
        ("GPUs.example.com:8889", 200),
        ("evil.example", 421),
        ("evil.example:8889", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:8889", 421),
        ("10.0.0.7:8889", 421),
        ("", 421),
        ("x" * 100, 421),
    ],
)
async def test_on_this_machine_alone_another_sites_name_is_not_answered(
    guarded: GuardedApi, aiohttp_client: MakeClient, host: str, status: int
) -> None:
    settings = Settings(api=ApiSettings(hosts=("gpus.example.com",)))
    client = await aiohttp_client(app_of(guarded, settings))

    for path in ("/v1/pods", "/metrics"):
        response = await client.get(path, headers={"Host": host})

        assert response.status == status
    assert (await client.get("/healthz", headers={"Host": host})).status == 200
    if status != 200:
        refusal = await (await client.get("/v1/pods", headers={"Host": host})).text()
        assert f"Host {host[:80]!r} is not allowed here" in refusal
        assert "must be gpus.example.com, localhost or a loopback address" in refusal


async def test_a_request_without_host_is_not_from_a_browser_and_is_answered(
    guarded: GuardedApi, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(app_of(guarded, Settings()))

    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b"GET /v1/pods HTTP/1.0\r\n\r\n")

    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"status_listen": "0.0.0.0:8889", "api": ApiSettings(allow_plain=True)},
            id="others-come",
        ),
        pytest.param({"api": ApiSettings(access=ApiAccess.TOKEN)}, id="tokens"),
        pytest.param(
            {
                "status_listen": "0.0.0.0:8889",
                "api": ApiSettings(access=ApiAccess.OPEN, allow_plain=True),
            },
            id="open-to-others",
        ),
    ],
)
async def test_where_others_come_or_a_token_is_needed_any_name_is_answered(
    guarded: GuardedApi, aiohttp_client: MakeClient, settings: dict[str, Any]
) -> None:
    guarded.reviewers.rights["alice"] = {EVERYWHERE}
    client = await aiohttp_client(app_of(guarded, Settings(**settings)))

    assert await shown(client, **BEARER, Host="gpus.example.com") == ["blue/a"]


async def test_a_pod_is_shown_at_once_in_a_namespace_that_has_just_come(
    guarded: GuardedApi, aiohttp_client: MakeClient
) -> None:
    guarded.reviewers.rights["alice"] = {"blue"}
    world = World()
    client = await aiohttp_client(
        app_of(guarded, Settings(api=ApiSettings(access=ApiAccess.TOKEN)), world)
    )
    assert await shown(client, **BEARER) == [_ANOTHER_POD]

    world.fleet.apply_pod(PodRecord(uid="uid-a", namespace="blue", name="a"))

    assert await shown(client, **BEARER) == ["blue/a"]


def app_of(guarded: GuardedApi, settings: Settings, world: World | None = None) -> web.Application:
    """Return the API as served with these settings."""
    world = world or World()
    access = make_access(
        guarded.kube, settings, world.fleet, world.history, world.metrics.api_requests
    )

    async def pods(_: web.Request) -> web.Response:
        return json_answer({"pods": [pod_name("blue", "a")]})

    app = web.Application(middlewares=[access.guard()])
    for path in ("/v1/pods", "/healthz", "/metrics"):
        app.router.add_get(path, pods)
    return app


@pytest.mark.parametrize("host", ["", "http://gpus", "gpus:8889", "gpus/"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match="without scheme and port"):
        ApiSettings(hosts=(host,))
