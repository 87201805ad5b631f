"""Refused agents, and broken or hostile senders."""

import asyncio
import contextlib
import gc
import weakref
from pathlib import Path

import msgspec
import pytest

from agent.report.contract import (
    LENGTH_BYTES,
    MAX_UPDATE_BYTES,
    UPGRADE,
    Layout,
    LayoutDevice,
    frame,
)
from extender.core.devices.readings import Signal
from extender.sources.agents import source
from extender.sources.agents.connection import _MAX_UPDATES, _UPDATE_BYTES
from extender.sources.agents.refusal import AgentRefusal, Refusals, RefusedError
from extender.sources.agents.tokens import TokenReviewer
from simulation.agents import run_agents
from simulation.fleet import SimulatedFleet
from testkit.agent.report_server import (
    FLEET_CLOCK,
    ReportServer,
    connected,
    eventually,
    farewell,
    raw_connection,
    report_server,
    request,
    settings,
    two_nodes,
    update,
)
from testkit.agent.reviews import reviewing, token


@pytest.fixture
def fleet() -> SimulatedFleet:
    return two_nodes()


# --- refused agents -------------------------------------------------------------------------------


async def refused_with(server: ReportServer, text: str | None) -> tuple[int, str]:
    reader, _writer = await raw_connection(server, request(text))
    async with asyncio.timeout(30):
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


async def test_a_request_without_a_token_is_refused(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        status, text = await refused_with(server, None)

        assert (status, server.refused(AgentRefusal.NO_TOKEN)) == (401, 1)
        assert "no token" in text
        assert server.reviews.requested == []


async def test_a_request_sent_byte_by_byte_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_REQUEST_TIMEOUT_SECONDS", 0.2)
    async with report_server(tmp_path) as server:
        reader, writer = await raw_connection(server, b"GET / HTTP/1.1\r\nX: ")

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):  # a byte came after the answer
                assert b"no request in time" in await reader.read()
        dripping.cancel()

        assert server.refused(AgentRefusal.SILENT) == 1


async def test_a_token_for_another_audience_is_refused_without_a_review(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        status, text = await refused_with(server, token("gpu-1", audience="vault"))

        assert (status, server.refused(AgentRefusal.WRONG_AUDIENCE)) == (401, 1)
        assert "'idlegpu-extender'" in text
        assert server.reviews.requested == []


async def test_a_token_of_another_account_is_refused(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        other = token("gpu-1", account="system:serviceaccount:default:default")
        status, text = await refused_with(server, other)

        assert (status, server.refused(AgentRefusal.WRONG_ACCOUNT)) == (403, 1)
        assert "default:default" in text


def test_each_agent_is_logged_once_for_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(lambda: 0.0)
    error = RefusedError(AgentRefusal.BAD_TOKEN, "no token")

    for node, address in (("", "a"), ("", "b"), ("", "a"), ("n", "c"), ("n", "d")):
        refusals.note(error, node, address)

    assert [vars(line)["address"] for line in caplog.records] == ["a", "b", "c"]
    assert refusals.counts[AgentRefusal.BAD_TOKEN] == 5


def test_a_refusal_that_is_expected_in_operation_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    refusals = Refusals(lambda: 0.0)
    for refusal in AgentRefusal:
        refusals.note(RefusedError(refusal, "why"), "n", "a")

    expected = {AgentRefusal.REPLACED, AgentRefusal.CLOSING, AgentRefusal.BUSY}
    assert {vars(line)["reason"] for line in caplog.records if line.levelname == "INFO"} == expected
    assert len(caplog.records) == len(AgentRefusal)


async def test_claims_of_a_token_are_not_trusted(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        forged = token("gpu-1")
        server.reviews.answers[forged] = {"authenticated": False, "error": "bad signature"}
        status, text = await refused_with(server, forged)
        again, _ = await refused_with(server, forged)

        assert (status, again, server.refused(AgentRefusal.BAD_TOKEN)) == (401, 401, 2)
        assert "bad signature" in text
        assert server.reviews.requested == [forged]  # a refused token is not reviewed again at once


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        ({"audiences": ["another"]}, AgentRefusal.WRONG_AUDIENCE),
        ({"audiences": None}, AgentRefusal.WRONG_AUDIENCE),
        ({"user": {"username": "admin"}}, AgentRefusal.WRONG_ACCOUNT),
        (
            {"user": {"username": "system:serviceaccount:idlegpu-agent:idlegpu-agent"}},
            AgentRefusal.NOT_BOUND,
        ),
    ],
)
async def test_the_api_servers_review_decides(
    tmp_path: Path, answer: dict[str, object], refusal: AgentRefusal
) -> None:
    async with report_server(tmp_path) as server:
        given = token("gpu-1")
        good = {
            "authenticated": True,
            "audiences": ["idlegpu-extender"],
            "user": {"username": "system:serviceaccount:idlegpu-agent:idlegpu-agent"},
        }
        server.reviews.answers[given] = {**good, **answer}
        await refused_with(server, given)

        assert server.refused(refusal) == 1


async def test_a_token_bound_to_a_pod_belongs_to_the_pods_node(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        server.reviews.has_nodes = False
        path = "/api/v1/namespaces/idlegpu-agent/pods/agent-gpu-1"
        server.reviews.pods[path] = {
            "metadata": {"uid": "uid-gpu-1"},
            "spec": {"nodeName": "gpu-2"},
        }
        reader, writer = await connected(server)
        writer.write(frame(update("gpu-1")))

        assert "from node 'gpu-1', the token from 'gpu-2'" in await farewell(reader)
        assert server.refused(AgentRefusal.WRONG_NODE) == 1


async def test_a_token_of_a_replaced_pod_is_refused(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        server.reviews.has_nodes = False
        path = "/api/v1/namespaces/idlegpu-agent/pods/agent-gpu-1"
        server.reviews.pods[path] = {"metadata": {"uid": "new"}, "spec": {"nodeName": "gpu-1"}}
        status, text = await refused_with(server, token("gpu-1"))

        assert (status, server.refused(AgentRefusal.NOT_BOUND)) == (403, 1)
        assert "is not on a node" in text


async def test_a_report_with_another_nodes_name_is_refused(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        reader, writer = await connected(server, "gpu-1")
        writer.write(frame(update("gpu-2")))

        assert "the report is from node 'gpu-2'" in await farewell(reader)
        assert server.refused(AgentRefusal.WRONG_NODE) == 1
        assert server.source.status().reports == 0


async def test_a_failed_review_is_retried(tmp_path: Path, fleet: SimulatedFleet) -> None:
    async with report_server(tmp_path) as server:
        server.reviews.is_down = True
        async with run_agents(fleet, ["gpu-1"], server.service, server.token_file):
            await eventually(lambda: server.refused(AgentRefusal.NOT_REVIEWED))
            assert server.readings == []
            server.reviews.is_down = False
            await eventually(lambda: server.readings_of("gpu-1"))


# --- broken or hostile senders --------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"\xff\xff\xff\xff", id="a-length-beyond-all-sense"),
        pytest.param(b"\0\0\0\x04oops", id="no-update"),
        pytest.param(frame(update(layout=None)), id="numbers-of-nothing"),
        pytest.param(frame(update(values=bytes(16))), id="too-many-numbers"),
        pytest.param(
            frame(
                update(
                    layout=Layout(devices=(LayoutDevice(uuid="GPU-1"),) * 2, rows=("power_watts",))
                )
            ),
            id="a-device-twice",
        ),
        pytest.param(
            frame(update(layout=Layout(devices=(LayoutDevice(uuid="GPU-1"),), rows=("x",) * 999))),
            id="too-many-rows",
        ),
    ],
)
async def test_an_invalid_report_ends_only_its_own_connection(tmp_path: Path, bad: bytes) -> None:
    async with report_server(tmp_path) as server:
        _, good = await connected(server, "gpu-2")
        reader, writer = await connected(server, "gpu-1")
        writer.write(bad)

        assert await farewell(reader)
        assert server.refused(AgentRefusal.BAD_REPORT) == 1
        good.write(frame(update("gpu-2")))
        await eventually(lambda: server.readings_of("gpu-2"))


def with_body(header: str) -> bytes:
    return request(token("gpu-1")).replace(b"\r\n\r\n", f"\r\n{header}\r\n\r\n".encode())


@pytest.mark.parametrize(
    "bad",
    [
        b"hello\r\n\r\n",
        request("x", "/metrics"),
        request("x").replace(UPGRADE.encode(), b"websocket"),
        b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000,
        with_body("Content-Length: 3") + b"abc",
        with_body("Transfer-Encoding: chunked") + b"no length",
    ],
)
async def test_anything_but_an_upgrade_request_is_refused(tmp_path: Path, bad: bytes) -> None:
    async with report_server(tmp_path) as server:
        reader, _writer = await raw_connection(server, bad)
        async with asyncio.timeout(30):
            answer = await reader.read()

        assert answer.startswith(b"HTTP/1.1 400 ")
        assert server.refused(AgentRefusal.BAD_REQUEST) == 1


async def test_updates_directly_after_the_request_are_accepted(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        _, _writer = await raw_connection(server, request(token("gpu-1")) + frame(update()))

        await eventually(lambda: server.readings_of("gpu-1"))


async def test_an_update_sent_byte_by_byte_is_accepted(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        _, writer = await connected(server)
        for byte in frame(update()):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

        await eventually(lambda: server.readings_of("gpu-1"))


async def test_a_flooding_agent_is_read_no_faster_than_batches(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        _, writer = await connected(server)
        again = frame(update(layout=None, values=bytes(8)))
        writer.write(frame(update()))
        writer.write(b"".join([again] * 200_000))
        begun = asyncio.get_running_loop().time()
        await eventually(lambda: server.source.status().reports > 3 * _MAX_UPDATES)

        batches = (asyncio.get_running_loop().time() - begun) / source._BATCH_SECONDS + 2
        assert server.source.status().reports <= batches * _MAX_UPDATES
        assert writer.transport.get_write_buffer_size() > 1 << 20  # the data waits at the sender


async def test_long_updates_are_read_no_faster_than_many_short_ones(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        _, writer = await connected(server)
        layout = Layout(
            driver_version="x" * (_MAX_UPDATES * _UPDATE_BYTES),
            devices=(LayoutDevice(uuid="GPU-1"),),
            rows=(Signal.POWER,),
        )
        writer.write(frame(update(layout=layout)) * 20)
        begun = asyncio.get_running_loop().time()
        await eventually(lambda: server.source.status().reports >= 5)

        batches = (asyncio.get_running_loop().time() - begun) / source._BATCH_SECONDS + 2
        assert server.source.status().reports <= batches


async def test_more_connections_than_allowed_are_closed(tmp_path: Path) -> None:
    async with report_server(tmp_path, max_connections=1) as server:
        await connected(server)
        reader, _ = await raw_connection(server, request(token("gpu-2")))

        with contextlib.suppress(ConnectionError):  # unread data resets the connection
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        assert server.refused(AgentRefusal.BUSY) == 1


async def test_forged_tokens_do_not_block_agents_of_other_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.sources.agents.tokens._REVIEWS_PER_SECOND", 20.0)
    async with reviewing(tmp_path) as (reviews, client):
        tokens = TokenReviewer(client, settings(), clock=FLEET_CLOCK)
        forged = [token("gpu-9", expires_at=FLEET_CLOCK() + 60 + more) for more in range(300)]
        flood = [asyncio.create_task(tokens.review(one, "10.0.0.9")) for one in forged]
        await eventually(lambda: len(reviews.requested) > 20)  # one second's quota is used up

        before = len(reviews.requested)
        own = token("gpu-1")
        sender = await tokens.review(own, "10.0.0.1")

        assert sender.node == "gpu-1"
        assert own in reviews.requested[before : before + 20]  # not the 281st
        for task in flood:
            task.cancel()
        await asyncio.wait(flood)


async def test_too_many_waiting_reviews_of_an_address_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.sources.agents.tokens._MAX_WAITING", 0)
    async with reviewing(tmp_path) as (reviews, client):
        tokens = TokenReviewer(client, settings(), clock=FLEET_CLOCK)

        with pytest.raises(RefusedError, match="try again later") as caught:
            await tokens.review(token("gpu-1"), "10.0.0.1")

    assert caught.value.refusal is AgentRefusal.BUSY
    assert not reviews.requested


class WeakToken(str):
    """A token to which weak references are possible."""

    __slots__ = ("__weakref__",)


async def test_refused_tokens_are_not_kept_in_memory(tmp_path: Path) -> None:
    async with reviewing(tmp_path) as (reviews, client):
        tokens = TokenReviewer(client, settings(), clock=FLEET_CLOCK)
        forged = WeakToken("x" * 1000)
        reviews.answers[str(forged)] = {"authenticated": False}
        kept = weakref.ref(forged)
        with contextlib.suppress(RefusedError):
            await tokens.review(forged)
        del forged
        gc.collect()

        assert kept() is None
        with pytest.raises(RefusedError, match="refuses the token"):
            await tokens.review("x" * 1000)
        assert len(reviews.requested) == 1


async def test_a_newer_agents_fields_and_rows_are_ignored(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        _, writer = await connected(server)
        said = msgspec.to_builtins(update(values=bytes(16)), builtin_types=(bytes,))
        said["layout"]["rows"] = ["aura", "power_watts"]
        said["mood"] = {"of": "the node"}
        content = msgspec.msgpack.encode(said)
        writer.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)

        await eventually(lambda: server.readings_of("gpu-1"))
        assert server.values("gpu-1", Signal.POWER) == [0.0]
        assert set(server.readings_of("gpu-1")[-1].columns) == {Signal.POWER}


async def test_an_unsupported_version_is_named(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        reader, writer = await connected(server)
        said = msgspec.to_builtins(update(), builtin_types=(bytes,)) | {"version": 99}
        content = msgspec.msgpack.encode(said)
        writer.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)

        assert "version 99: must be version 1" in await farewell(reader)


def test_an_update_of_sixteen_partitioned_cards_is_small() -> None:
    parts = tuple(
        LayoutDevice(
            uuid=f"GPU-43202e14-7a41-4c0e-9d53-5e0b8c11{number:04d}",
            gpu_instance_id=str(instance),
            index=number,
            model="NVIDIA H100 80GB HBM3",
            mig_profile="1g.10gb",
        )
        for number in range(16)
        for instance in range(7)
    )
    rows = (*(signal.value for signal in Signal), "a", "b", "c", "d", "e", "f")
    whole = update(layout=Layout(devices=parts, rows=rows), values=bytes(8 * 112 * len(rows)))

    assert len(frame(whole)) < MAX_UPDATE_BYTES // 4
