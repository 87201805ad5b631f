import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import ConfigException

from extender.kube.client import KubeClient, KubeError, OnceLogger, _hang_up, _LineSplitter
from extender.kube.kubeconfig import KubeConfigError, load_kubeconfig
from testkit.fake_kube import FakeKube, answer, refusal, running_kube
from testkit.kube_objects import Object, node


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with running_kube() as server:
        yield server


@pytest.fixture(autouse=True)
def quick_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extender.kube.client._RELOGIN_SECONDS", 0.0)


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[KubeClient]:
    client = await KubeClient.connect(path)
    try:
        yield client
    finally:
        await client.close()


async def list_nodes(client: KubeClient, *, timeout_seconds: float = 5.0) -> list[Object]:
    page = await client.get("/api/v1/nodes", action="list nodes", timeout_seconds=timeout_seconds)
    items = page["items"]
    assert isinstance(items, list)
    return items


async def test_a_changed_token_file_is_read_again(kube: FakeKube, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    config = kube.write_kubeconfig(tmp_path / "config", {"tokenFile": str(token)})
    kube.put("nodes", node("n"))
    kube.bearer = "old"
    async with connected(config) as client:
        assert len(await list_nodes(client)) == 1
        kube.bearer = "new"
        token.write_text("new\n")

        assert len(await list_nodes(client)) == 1


async def test_persistently_bad_credentials_raise_an_error(kube: FakeKube, tmp_path: Path) -> None:
    kube.bearer = "right"
    config = kube.write_kubeconfig(tmp_path / "config", {"token": "wrong"})
    async with connected(config) as client:
        with pytest.raises(KubeError, match="status 401: Unauthorized: check the token") as error:
            await list_nodes(client)

    assert error.value.status == 401
    assert len(kube.lists) == 0


async def test_refused_requests_log_in_once_in_a_while(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube.bearer = "right"
    config = kube.write_kubeconfig(tmp_path / "config", {"token": "wrong"})
    async with connected(config) as client:
        monkeypatch.setattr("extender.kube.client._RELOGIN_SECONDS", 60.0)
        kube.write_kubeconfig(config, {"token": "right"})

        with pytest.raises(KubeError, match="status 401"):
            await list_nodes(client)


async def test_a_kubeconfig_that_vanishes_breaks_only_the_request(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.bearer = "right"
    config = kube.write_kubeconfig(tmp_path / "config", {"token": "wrong"})
    async with connected(config) as client:
        config.unlink()
        with pytest.raises(KubeError, match=r"cannot read kubeconfig .*: no such file"):
            await list_nodes(client)


async def test_a_token_file_that_vanishes_breaks_only_the_request(
    kube: FakeKube, tmp_path: Path
) -> None:
    def read_token(_: object) -> None:
        raise ConfigException("Token file exists but empty.")

    async def load() -> Configuration:
        configuration = await load_kubeconfig(
            kube.write_kubeconfig(tmp_path / "config", {"token": "t"})
        )
        configuration.refresh_api_key_hook = read_token
        return configuration

    client = KubeClient(load)
    await client.login()
    with pytest.raises(KubeError, match=r"cannot list nodes: .*Token file exists but empty"):
        await list_nodes(client)
    await client.close()


async def test_many_new_logins_leave_requests_under_way_their_connection(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with connected(kube.write_kubeconfig(tmp_path / "config")) as client:
        lines = client.watch_lines(
            "/api/v1/nodes",
            {"watch": "1", "resourceVersion": "0"},
            action="watch nodes",
            silence_seconds=60.0,
            limit_bytes=1000,
        )
        assert await anext(lines) == b""
        await client.login()
        kube.say("nodes", b"still here\n")
        assert await anext(lines) == b"still here"

        await client.login()

        with pytest.raises((KubeError, StopAsyncIteration)):
            await anext(lines)


async def watched(client: KubeClient) -> list[bytes]:
    """Watch nodes until the watch ends, and return its lines."""
    lines = client.watch_lines(
        "/api/v1/nodes",
        {"watch": "1", "resourceVersion": "0"},
        action="watch nodes",
        silence_seconds=0.2,
        limit_bytes=10,
    )
    return [line async for line in lines]


async def test_a_watch_has_lines_up_to_the_limit_until_it_is_silent(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with connected(kube.write_kubeconfig(tmp_path / "config")) as client:
        kube.faults["watch"].append(answer(b"0123456789\n\n{}\n"))
        assert await watched(client) == [b"", b"0123456789", b"{}"]

        with pytest.raises(KubeError, match=r"cannot watch nodes: .* was silent for 0\.2 s"):
            await watched(client)

        kube.faults["watch"].append(answer(b"0123456789a"))
        with pytest.raises(KubeError, match="a line is longer than 10 bytes"):
            await watched(client)


@pytest.mark.parametrize(("status", "is_gone"), [(410, True), (500, False)])
async def test_a_watch_from_a_version_that_is_too_old_must_list_again(
    kube: FakeKube, tmp_path: Path, status: int, *, is_gone: bool
) -> None:
    kube.faults["watch"].append(refusal(status, "too old resource version"))
    async with connected(kube.write_kubeconfig(tmp_path / "config")) as client:
        with pytest.raises(KubeError, match="too old resource version") as error:
            await watched(client)

    assert error.value.is_gone is is_gone


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"message": "no such node"}', "no such node"),
        (b'{"message": ""}', """'{"message": ""}'"""),
        (b'{"message": 7}', """'{"message": 7}'"""),
        (b"[]", "'[]'"),
        (b"<html>\n  Bad  gateway" + 300 * b"!", "'<html> Bad gateway" + 179 * "!" + "'"),
    ],
)
async def test_a_refusal_is_quoted(kube: FakeKube, tmp_path: Path, body: bytes, shown: str) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=502, body=body)

    kube.faults["list"].append(refuse)
    async with connected(kube.write_kubeconfig(tmp_path / "config")) as client:
        with pytest.raises(KubeError) as error:
            await list_nodes(client)

    assert str(error.value) == f"cannot list nodes: status 502: {shown}"


def test_a_stream_is_aborted_because_its_peer_may_not_answer() -> None:
    transport = Mock()
    with_peer = Mock(connection=Mock(transport=transport))

    for response in (with_peer, Mock(connection=None), Mock(connection=Mock(transport=None))):
        _hang_up(response)

        response.close.assert_called_once_with()
    transport.abort.assert_called_once_with()


async def test_no_answer_is_compressed(kube: FakeKube, tmp_path: Path) -> None:
    accepted = []

    async def listed(request: web.Request) -> web.StreamResponse:
        accepted.append(request.headers.getall("Accept-Encoding"))
        return await kube.answer(request)

    kube.faults["list"].append(listed)
    async with connected(kube.write_kubeconfig(tmp_path / "config")) as client:
        await list_nodes(client)

    assert accepted == [["identity"]]


async def test_a_hanging_api_server_times_out(kube: FakeKube, tmp_path: Path) -> None:
    released = asyncio.Event()

    async def hang(_: object) -> web.StreamResponse:
        await released.wait()
        raise ConnectionResetError

    kube.faults["list"].append(hang)
    async with connected(kube.write_kubeconfig(tmp_path / "config")) as client:
        with pytest.raises(KubeError, match=r"cannot list nodes: .* was silent for 0\.1 s"):
            await list_nodes(client, timeout_seconds=0.1)
    released.set()


async def test_an_oversized_answer_is_refused(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.kube.client._ANSWER_BYTES", 10)
    async with connected(kube.write_kubeconfig(tmp_path / "config")) as client:
        with pytest.raises(KubeError, match="larger than 10 bytes"):
            await list_nodes(client)


async def test_an_oversized_answer_to_a_write_is_refused(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.kube.client._ANSWER_BYTES", 10)
    async with connected(kube.write_kubeconfig(tmp_path / "kubeconfig")) as client:
        with pytest.raises(KubeError, match="larger than 10 bytes"):
            await client.send(
                "POST",
                "/apis/events.k8s.io/v1/namespaces/ns/events",
                {"metadata": {"name": "long enough"}},
                action="create events",
                timeout_seconds=5.0,
            )


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
        ({}, 0.0),
    ],
)
async def test_retry_after_is_read(
    kube: FakeKube, tmp_path: Path, headers: dict[str, str], seconds: float
) -> None:
    kube.faults["list"].append(refusal(429, "busy", **headers))
    async with connected(kube.write_kubeconfig(tmp_path / "config")) as client:
        with pytest.raises(KubeError) as error:
            await list_nodes(client)

    assert error.value.retry_after_seconds == seconds
    assert KubeError("no answer").retry_after_seconds == 0.0


def test_each_cause_of_a_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    once_logger = OnceLogger(logging.getLogger("test"), "failed", "recovered")
    broken = KubeError("the connection broke")
    timed_out = KubeError("the API server was silent")
    refused = [KubeError(f"no right for {name}", right="patch pods") for name in ("a", "b")]

    for error in 2 * [broken, timed_out, *refused]:
        once_logger.note(error)
    causes = [record.__dict__["cause"] for record in caplog.records]
    assert causes == [str(broken), str(timed_out), "no right for a"]

    for number in range(32):
        once_logger.note(KubeError(f"cause {number}"))
    assert len(caplog.records) == 3 + 32
    once_logger.note(KubeError("cause 0"))
    assert len(caplog.records) == 3 + 32
    once_logger.note(broken)
    assert len(caplog.records) == 3 + 33


async def test_the_error_says_if_a_server_uses_no_tls(kube: FakeKube, tmp_path: Path) -> None:
    config = kube.write_kubeconfig(tmp_path / "config", server=kube.url.replace("http:", "https:"))
    async with connected(config) as client:
        with pytest.raises(
            KubeError, match=r"TLS with https://.* failed: .*: check the cluster's CA"
        ):
            await list_nodes(client)


async def test_a_closed_client_says_so(kube: FakeKube, tmp_path: Path) -> None:
    async with connected(kube.write_kubeconfig(tmp_path / "config")) as client:
        pass

    with pytest.raises(KubeError, match="the client is closed"):
        await list_nodes(client)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(None, id="missing"),
        pytest.param("", id="empty"),
        pytest.param("just words", id="a text"),
        pytest.param("[1, 2]", id="a list"),
        pytest.param("a: [", id="broken YAML"),
        pytest.param("\x00", id="binary"),
        pytest.param("- " * 1000, id="deep nesting"),
        pytest.param("{}", id="an empty object"),
        pytest.param(json.dumps({"current-context": "x", "contexts": []}), id="no such context"),
        pytest.param(
            json.dumps({
                "current-context": "x",
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "https://h"}}],
                "users": [{"name": "u", "user": {"client-certificate": "/nowhere.pem"}}],
            }),
            id="a certificate file that is missing",
        ),
    ],
)  # fmt: skip
async def test_a_bad_kubeconfig_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)

    with pytest.raises(KubeConfigError, match=f"^cannot read kubeconfig {path}: .+"):
        await KubeClient.connect(path)


async def test_error_outside_a_cluster_requests_a_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(KubeConfigError, match=r"no kubeconfig is set.*[^.]: set kubeconfig"):
        await KubeClient.connect(service_account=tmp_path)


@given(st.lists(st.binary(max_size=30)), st.integers(1, 10))
def test_lines_do_not_depend_on_chunks(parts: list[bytes], size: int) -> None:
    stream = b"\n".join(parts) + b"\n"
    splitter = _LineSplitter(1000)

    lines = [
        line
        for start in range(0, len(stream), size)
        for line in splitter.feed(stream[start : start + size])
    ]

    assert lines == [line for line in stream.split(b"\n") if line]


@pytest.mark.parametrize("chunk", [b"x" * 11, b"x" * 11 + b"\nshort"])
def test_a_line_beyond_the_limit_is_refused(chunk: bytes) -> None:
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        _LineSplitter(10).feed(chunk)
