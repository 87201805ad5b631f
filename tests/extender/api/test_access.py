"""Access control: permitted callers, visible pods, and requests to the API server."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from pydantic import ValidationError

from extender.api import caller as callers
from extender.api.access import _MAX_BODY, _MAX_COOKIE, COOKIE, make_access
from extender.api.caller import _GRACE, _REFUSED_SECONDS, HEADER
from extender.settings.api import ApiAccess, ApiSettings
from extender.settings.config import Settings
from testkit.reviewers import EVERYWHERE
from testkit.webhook_requests import MakeClient
from testkit.world import World
from tests.extender.api.guarded_api import BEARER, OPEN_PATHS, TOKEN, GuardedApi, guarded_api, shown


@pytest_asyncio.fixture
async def guarded(tmp_path: Path, aiohttp_client: MakeClient) -> AsyncIterator[GuardedApi]:
    async with guarded_api(tmp_path, aiohttp_client) as found:
        yield found


async def test_a_caller_sees_the_pods_of_the_namespaces_that_they_may_list(
    guarded: GuardedApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    guarded.reviewers.rights["alice"] = {"red"}
    client = await guarded.open()

    for _ in range(2):
        assert await shown(client) == ["another pod", "red/b"]
    assert guarded.count("admitted") == 2
    assert [vars(one)["user"] for one in caplog.records if "reads the API" in one.message] == [
        "alice"
    ]


async def test_one_review_suffices_for_a_caller_who_may_list_all_pods(guarded: GuardedApi) -> None:
    guarded.reviewers.rights["alice"] = {EVERYWHERE}
    client = await guarded.open()

    assert await shown(client) == ["blue/a", "red/b"]
    assert guarded.reviewers.reviewed_rights == [("alice", "")]


async def test_a_caller_without_rights_sees_only_that_pods_exist(guarded: GuardedApi) -> None:
    client = await guarded.open()

    assert await shown(client) == ["another pod", "another pod"]


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="none"),
        pytest.param({"Authorization": "Bearer"}, id="empty"),
        pytest.param({"Authorization": "Basic YTpi"}, id="password"),
        pytest.param({"Authorization": "Bearer stolen"}, id="unknown"),
        pytest.param({"Authorization": "Bearer a b\tc"}, id="malformed"),
        pytest.param({"Authorization": f"Bearer {'x' * 8000}=y"}, id="malformed-and-long"),
    ],
)
async def test_without_a_good_token_nothing_is_reported(
    guarded: GuardedApi, headers: dict[str, str]
) -> None:
    client = await guarded.open()

    for path in ("/v1/pods", "/v1/session"):
        response = await client.get(path, headers=headers)

        assert response.status == 401
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
        assert "kubectl create token ACCOUNT --audience idlegpu-api" in await response.text()


async def test_health_and_page_files_need_no_token(guarded: GuardedApi) -> None:
    client = await guarded.open()

    guarded.reviewers.rights["alice"] = {EVERYWHERE}
    assert await shown(client) == ["blue/a", "red/b"]  # on the reused connection
    for path in OPEN_PATHS:
        response = await client.get(path)

        assert response.status == 200
        # The caller is unknown, so the answer must contain no pod.
        assert (await response.json())["pods"] == ["another pod", "another pod"]


async def test_an_unknown_path_is_404_only_for_callers_who_may_read(guarded: GuardedApi) -> None:
    client = await guarded.open()

    assert (await client.get("/v1/nothing")).status == 401
    assert (await client.get("/v1/nothing", headers=BEARER)).status == 404


async def test_a_token_for_another_caller_is_refused(guarded: GuardedApi) -> None:
    guarded.reviewers.knows_audiences = False  # answered like a token for the API server itself
    client = await guarded.open()

    response = await client.get("/v1/pods", headers=BEARER)

    assert response.status == 401
    assert "it is not for 'idlegpu-api'" in await response.text()


async def test_tokens_for_the_api_server_are_taken_where_that_is_set(guarded: GuardedApi) -> None:
    guarded.reviewers.knows_audiences = False
    guarded.reviewers.rights["alice"] = {"blue"}
    client = await guarded.open(audience="")

    assert await shown(client) == ["blue/a", "another pod"]
    advice = await (await client.get("/v1/pods")).text()
    assert "kubectl create token ACCOUNT makes one" in advice


async def test_a_token_in_the_own_header_passes_where_a_proxy_keeps_the_other(
    guarded: GuardedApi,
) -> None:
    guarded.reviewers.rights["alice"] = {"blue"}
    client = await guarded.open()

    assert await shown(client, **{HEADER: TOKEN}) == ["blue/a", "another pod"]


async def test_rights_are_reviewed_once_until_they_expire(guarded: GuardedApi) -> None:
    guarded.reviewers.rights["alice"] = {"red"}
    client = await guarded.open()
    await shown(client)
    requested = list(guarded.reviewers.reviewed_rights)
    assert sorted(requested) == [("alice", ""), ("alice", "blue"), ("alice", "red")]

    await shown(client)
    assert guarded.reviewers.reviewed_rights == requested

    guarded.now += callers._RIGHTS_SECONDS
    guarded.reviewers.rights["alice"] = {"blue"}
    assert await shown(client) == ["blue/a", "another pod"]
    assert len(guarded.reviewers.reviewed_rights) == 2 * len(requested)


async def test_a_token_that_was_revoked_is_refused_once_its_review_is_old(
    guarded: GuardedApi,
) -> None:
    client = await guarded.open()
    await shown(client)
    del guarded.reviewers.users[TOKEN]

    await shown(client)
    assert len(guarded.reviewers.reviewed_tokens) == 1

    guarded.now += callers._TOKEN_SECONDS
    assert (await client.get("/v1/pods", headers=BEARER)).status == 401


async def test_rights_that_cannot_be_reviewed_stay_valid_for_a_limited_time(
    guarded: GuardedApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callers, "_TOKEN_SECONDS", 3600.0)
    guarded.reviewers.rights["alice"] = {EVERYWHERE}
    client = await guarded.open()
    await shown(client)
    guarded.reviewers.is_down = True

    guarded.now += callers._RIGHTS_SECONDS + 1
    assert await shown(client) == ["blue/a", "red/b"]

    guarded.now += _GRACE * callers._RIGHTS_SECONDS - callers._RIGHTS_SECONDS - 2
    assert await shown(client) == ["blue/a", "red/b"]
    warned = [one for one in caplog.records if one.message == "cannot review a caller's rights"]
    assert [vars(one)["user"] for one in warned] == ["alice"]  # once a minute

    guarded.now += 1 + callers._RIGHTS_SECONDS
    assert await shown(client) == ["another pod", "another pod"]


async def test_no_new_caller_is_admitted_while_the_api_server_does_not_answer(
    guarded: GuardedApi,
) -> None:
    guarded.reviewers.is_down = True
    client = await guarded.open()

    response = await client.get("/v1/pods", headers=BEARER)

    assert response.status == 503
    assert "cannot review the token" in await response.text()
    assert guarded.count("unknown") == 1


async def test_a_refused_token_is_not_reviewed_again_at_once(
    guarded: GuardedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_REVIEWS_PER_SECOND", 0.001)  # so no further review has a slot
    monkeypatch.setattr(callers, "_STRANGERS_SECONDS", 0.1)
    client = await guarded.open()
    stolen = {"Authorization": "Bearer stolen"}

    for _ in range(5):
        assert (await client.get("/v1/pods", headers=stolen)).status == 401
    assert guarded.reviewers.reviewed_tokens == ["stolen"]

    guarded.now += _REFUSED_SECONDS
    assert (await client.get("/v1/pods", headers=stolen)).status == 429  # it waits for a slot
    assert guarded.count("busy") == 1


async def test_rights_for_a_new_namespace_are_reviewed_before_its_pods_are_shown(
    guarded: GuardedApi,
) -> None:
    guarded.reviewers.rights["alice"] = {"green"}
    client = await guarded.open()

    response = await client.get("/v1/late", headers=BEARER)

    assert (await response.json())["pods"] == ["green/c"]


async def test_where_it_is_open_no_token_is_required(guarded: GuardedApi) -> None:
    client = await guarded.open(is_open=True)

    response = await client.get("/v1/pods")

    assert (await response.json())["pods"] == ["blue/a", "red/b"]
    session = await client.get("/v1/session")
    assert await session.json() == {"user": None, "sees_all": True, "namespaces": []}
    login = await client.post("/v1/session", json={"token": "unknown"})
    assert login.status == 204
    assert "Set-Cookie" not in login.headers
    assert guarded.reviewers.reviewed_tokens == []
    assert guarded.count("open") == 2


@pytest.mark.parametrize(
    ("proxies", "status"),
    [
        pytest.param(("127.0.0.0/8",), 200, id="from-the-proxy"),
        pytest.param(("192.0.2.7", "127.0.0.0/8"), 200, id="from-one-of-its-networks"),
        pytest.param(("192.0.2.7", "2001:db8::/64"), 401, id="from-elsewhere"),
    ],
)
async def test_requests_from_the_api_servers_proxy_need_no_token(
    guarded: GuardedApi, proxies: tuple[str, ...], status: int
) -> None:
    client = await guarded.open(proxies=proxies)

    assert (await client.get("/v1/pods")).status == status
    assert guarded.count("open" if status == 200 else "no-token") == 1


async def test_a_client_without_an_address_is_not_the_proxy(
    guarded: GuardedApi, tmp_path: Path
) -> None:
    app = (await guarded.open(proxies=("0.0.0.0/0", "::/0"))).app
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "socket")).start()
    connector = aiohttp.UnixConnector(str(tmp_path / "socket"))

    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get("http://socket/v1/pods") as response,
    ):
        assert response.status == 401
    await runner.cleanup()


async def test_callers_token_limits_the_view_behind_the_proxy(guarded: GuardedApi) -> None:
    guarded.reviewers.rights["alice"] = {"red"}
    client = await guarded.open(proxies=("127.0.0.0/8",))

    assert await shown(client, **{HEADER: TOKEN}) == ["another pod", "red/b"]
    stolen = await client.get("/v1/pods", headers={HEADER: "stolen"})
    assert stolen.status == 401


async def test_token_is_kept_in_a_cookie_hidden_from_scripts(guarded: GuardedApi) -> None:
    guarded.reviewers.rights["alice"] = {"red"}
    client = await guarded.open()

    response = await client.post("/v1/session", json={"token": TOKEN})

    assert response.status == 204
    cookie = response.headers["Set-Cookie"]
    assert cookie.startswith(f"{COOKIE}={TOKEN};")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path" not in cookie  # the path of the request: /v1, behind any proxy
    assert "Max-Age" not in cookie
    reported = await client.get("/v1/session", headers={"Cookie": f"{COOKIE}={TOKEN}"})
    assert await reported.json() == {"user": "alice", "sees_all": False, "namespaces": ["red"]}
    assert reported.headers["Cache-Control"] == "no-store"
    seen = await client.get("/v1/pods", headers={"Cookie": f"{COOKIE}={TOKEN}"})
    assert (await seen.json())["pods"] == ["another pod", "red/b"]
    client.session.cookie_jar.clear()
    gone = await client.delete("/v1/session")
    assert gone.status == 204
    assert "Max-Age=0" in gone.headers["Set-Cookie"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        pytest.param(b'{"token": "stolen"}', "application/json", 401, id="unknown"),
        pytest.param(b"[]", "application/json", 401, id="no-token"),
        pytest.param(b"{", "application/json", 400, id="no-json"),
        pytest.param(
            b"token=" + TOKEN.encode(), "application/x-www-form-urlencoded", 415, id="form"
        ),
        pytest.param(b'{"token": "token-of-alice"}', "text/plain", 415, id="another-sites-form"),
        pytest.param(
            b'{"token": "%b"}' % (b"x" * (_MAX_COOKIE + 1)), "application/json", 400, id="too-long"
        ),
        pytest.param(
            b'{"token": "%b"}' % (b"x" * _MAX_COOKIE), "application/json", 401, id="longest"
        ),
        pytest.param(b"[]".ljust(_MAX_BODY), "application/json", 401, id="longest-body"),
        pytest.param(b"[]".ljust(_MAX_BODY + 1), "application/json", 413, id="body-too-long"),
    ],
)
async def test_an_invalid_token_is_not_cached(
    guarded: GuardedApi, body: bytes, kind: str, status: int
) -> None:
    client = await guarded.open()

    response = await client.post("/v1/session", data=body, headers={"Content-Type": kind})

    assert response.status == status
    assert "Set-Cookie" not in response.headers


@pytest.mark.parametrize(
    ("access", "host", "is_open"),
    [
        (ApiAccess.AUTO, "127.0.0.1", True),
        (ApiAccess.AUTO, "::1", True),
        (ApiAccess.AUTO, "0.0.0.0", False),
        (ApiAccess.AUTO, "10.0.0.7", False),
        (ApiAccess.TOKEN, "127.0.0.1", False),
        (ApiAccess.OPEN, "0.0.0.0", True),
    ],
)
def test_token_is_required_on_shared_addresses_unless_disabled(
    access: ApiAccess, host: str, is_open: bool
) -> None:
    assert ApiSettings(access=access).is_open(host) is is_open


@pytest.mark.parametrize("proxy", ["10.0.0.0/33", "apiserver", "10.0.0.4/8", ""])
def test_a_proxy_that_is_no_address_is_refused(proxy: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ApiSettings(proxies=(proxy,))

    assert "a list of IP addresses and networks" in str(caught.value)


@pytest.mark.parametrize(
    ("status_listen", "warnings"),
    [
        pytest.param("0.0.0.0:8889", 1, id="everywhere"),
        pytest.param("127.0.0.1:8889", 0, id="here"),
    ],
)
async def test_an_api_that_is_open_to_other_machines_says_so_in_the_log(
    guarded: GuardedApi, caplog: pytest.LogCaptureFixture, status_listen: str, warnings: int
) -> None:
    settings = Settings(
        status_listen=status_listen, api=ApiSettings(access=ApiAccess.OPEN, allow_plain=True)
    )
    world = World()

    access = make_access(
        guarded.kube, settings, world.fleet, world.history, world.metrics.api_requests
    )

    assert access.is_open
    assert len([text for text in caplog.messages if text.startswith("the API is open")]) == warnings
