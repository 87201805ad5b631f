"""Number of access reviews for one caller, independent of the caller's requests."""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import StreamReader, web
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from extender.api import caller as callers
from extender.api.access import Access
from extender.api.caller import _REFUSED_SECONDS, _RETRY_SECONDS, SESSION_PATH, Caller
from extender.kube.client import KubeError
from extender.kube.token_review import ALL_NAMESPACES, User
from extender.runtime.metrics import Metrics
from extender.server.json_api import json_answer
from extender.server.redaction import AccessError
from extender.settings.api import ApiSettings
from testkit.fake_kube import eventually
from testkit.reviewers import Reviewers, reviewing
from testkit.webhook_requests import Client, MakeClient

NAMESPACES = frozenset({"blue", "green", "red"})
TOKEN = "token-of-alice"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
AT_ONCE = 20


@dataclass
class Server:
    """API server and clock; it answers one loop iteration later, as a real one would."""

    now: float = 1000.0
    is_down: bool = False
    reviews: int = 0
    requested: list[str] = field(default_factory=list)
    namespaces: frozenset[str] = NAMESPACES
    at_once: int = 0
    most_at_once: int = 0

    async def review(self) -> User:
        self.reviews += 1
        await self._answer()
        return User(name="alice")

    async def may_list(self, _: User, namespace: str) -> bool:
        self.requested.append(namespace)
        await self._answer()
        return namespace == "blue"

    async def _answer(self) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.is_down:
            raise KubeError("cannot ask: out of order")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def caller(server: Server) -> Caller:
    return Caller(
        User(name="alice"),
        review=server.review,
        may_list=server.may_list,
        namespaces=lambda: server.namespaces,
        token_seconds=60.0,
        rights_seconds=30.0,
        monotonic=lambda: server.now,
    )


async def test_concurrent_requests_share_one_review(server: Server, caller: Caller) -> None:
    server.now += 60.0

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(caller.renew())

    assert server.reviews == 1
    assert sorted(server.requested) == [ALL_NAMESPACES, *sorted(NAMESPACES)]
    assert caller.sees("blue")
    assert not caller.sees("red")


class Counted(frozenset[str]):
    """Set of names that counts its iterations."""

    looked = 0

    @override
    def __or__(self, other: AbstractSet[object]) -> frozenset[str]:
        Counted.looked += 1
        return frozenset(self).union(map(str, other))


async def test_unchanged_namespaces_are_not_searched_again(server: Server, caller: Caller) -> None:
    server.namespaces = Counted(NAMESPACES)
    await caller.renew()
    looked = Counted.looked
    assert looked

    server.now += 29.0
    for _ in range(AT_ONCE):
        await caller.renew()
        await caller.learn({"red"})
        await caller.learn(NAMESPACES)

    assert Counted.looked == looked
    assert len(server.requested) == 1 + len(NAMESPACES)


async def test_new_namespace_is_reviewed_at_once(server: Server, caller: Caller) -> None:
    await caller.renew()
    server.requested.clear()

    server.namespaces |= {"new"}
    await caller.renew()
    await caller.learn({"elsewhere"})

    assert server.requested == ["new", "elsewhere"]


async def test_expired_rights_are_reviewed_without_new_namespaces(
    server: Server, caller: Caller
) -> None:
    await caller.renew()
    server.now += 20.0
    server.namespaces |= {"new"}
    await caller.renew()
    server.requested.clear()

    server.now += 10.0
    await caller.renew()

    assert sorted(server.requested) == [ALL_NAMESPACES, *sorted(NAMESPACES)]


async def test_a_failed_review_is_repeated_even_without_a_new_namespace(
    server: Server, caller: Caller
) -> None:
    await caller.renew()
    server.namespaces |= {"new"}
    server.is_down = True
    await caller.renew()
    server.is_down, server.requested[:] = False, []

    server.now += _RETRY_SECONDS
    await caller.renew()

    assert server.requested == ["new"]


async def test_an_api_server_that_does_not_answer_is_left_alone_for_a_moment(
    server: Server, caller: Caller
) -> None:
    server.is_down = True

    for _ in range(AT_ONCE):
        await caller.renew()

    assert server.requested == [ALL_NAMESPACES]
    server.is_down = False
    server.now += _RETRY_SECONDS
    await caller.renew()
    assert caller.sees("blue")


async def test_failed_token_review_is_not_repeated_at_each_request(
    server: Server, caller: Caller
) -> None:
    server.is_down = True
    server.now += 60.0

    for _ in range(AT_ONCE):
        with pytest.raises(AccessError, match="out of order"):
            await caller.renew()

    assert server.reviews == 1
    server.is_down = False
    server.now += _RETRY_SECONDS
    await caller.renew()
    assert server.reviews == 2


async def test_rights_end_when_neither_they_nor_the_token_are_reviewed_again(
    server: Server, caller: Caller
) -> None:
    await caller.renew()
    server.is_down = True

    server.now += 60.0
    assert caller.sees("blue")
    server.now += 0.5
    assert not caller.sees("blue")

    server.is_down = False
    server.now += 59.5
    await caller.learn(())  # reviews the rights alone
    assert caller.sees("blue")
    server.now += 0.5
    assert not caller.sees("blue")


async def test_only_some_rights_are_reviewed_at_once(server: Server, caller: Caller) -> None:
    server.namespaces = frozenset(f"n-{number}" for number in range(2 * callers._PARALLEL))

    await caller.renew()

    assert len(server.requested) == 1 + 2 * callers._PARALLEL
    assert server.most_at_once == callers._PARALLEL


async def test_rights_for_too_many_namespaces_are_reviewed_in_part_and_not_all_kept(
    server: Server, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_MOST_NAMESPACES", 2)
    server.namespaces = frozenset({"a", "b", "c"})

    await caller.renew()
    assert server.requested == [ALL_NAMESPACES, "a", "b"]
    for _ in range(3):
        await caller.renew()
    assert server.requested == [ALL_NAMESPACES, "a", "b", "c"]

    server.namespaces |= {"d"}
    await caller.renew()
    await caller.renew()
    assert server.requested[4:] == ["d", ALL_NAMESPACES]  # too many: what is denied is forgotten


@dataclass
class GuardedApi:
    reviewers: Reviewers
    client: Client
    now: float = 1000.0


@pytest_asyncio.fixture
async def guarded(tmp_path: Path, aiohttp_client: MakeClient) -> AsyncIterator[GuardedApi]:
    async with reviewing(tmp_path) as (reviewers, kube):
        access = Access(
            kube,
            ApiSettings(),
            is_open=False,
            namespaces=lambda: NAMESPACES,
            requests=Metrics().api_requests,
            monotonic=lambda: found.now,
        )

        async def nothing(_: web.Request) -> web.Response:
            return json_answer({})

        app = web.Application(middlewares=[access.guard()])
        app.add_routes([*access.routes(), web.get("/v1/nothing", nothing)])
        reviewers.users[TOKEN] = "alice"
        found = GuardedApi(reviewers, await aiohttp_client(app))
        yield found


async def test_revoked_token_is_not_reviewed_at_each_request(guarded: GuardedApi) -> None:
    assert (await guarded.client.get("/v1/nothing", headers=BEARER)).status == 200
    del guarded.reviewers.users[TOKEN]
    guarded.now += 60.0

    for _ in range(AT_ONCE):
        assert (await guarded.client.get("/v1/nothing", headers=BEARER)).status == 401

    assert len(guarded.reviewers.reviewed_tokens) == 2
    guarded.reviewers.users[TOKEN] = "alice"
    guarded.now += _REFUSED_SECONDS
    assert (await guarded.client.get("/v1/nothing", headers=BEARER)).status == 200


async def test_a_browser_learns_at_once_that_its_token_was_revoked(guarded: GuardedApi) -> None:
    assert (await guarded.client.get("/v1/nothing", headers=BEARER)).status == 200
    del guarded.reviewers.users[TOKEN]
    guarded.now += 60.0

    answer = await guarded.client.post(SESSION_PATH, json={"token": TOKEN})

    assert answer.status == 401
    assert not answer.cookies


async def test_a_token_may_come_in_pieces(
    guarded: GuardedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, pieces = StreamReader.readany, list[bytes]()

    async def readany(self: StreamReader) -> bytes:
        pieces.append(await read(self))
        return pieces[-1]

    monkeypatch.setattr(StreamReader, "readany", readany)

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"token": "'
        await eventually(lambda: pieces)
        yield TOKEN.encode() + b'"}'

    headers = {"Content-Type": "application/json"}
    answer = await guarded.client.post(SESSION_PATH, data=slowly(), headers=headers)

    assert answer.status == 204
    assert pieces[0] == b'{"token": "'


async def test_a_body_without_end_is_refused(guarded: GuardedApi) -> None:
    async def endlessly() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 4096

    headers = {"Content-Type": "application/json"}
    answer = await guarded.client.post(SESSION_PATH, data=endlessly(), headers=headers)

    assert answer.status == 413
