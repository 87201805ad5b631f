import asyncio
import gzip
import io
import json
import logging

import msgspec
import pytest
from aiohttp import ClientSession, web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from extender.placement.history import DecisionRecord
from extender.placement.placer import Placer
from extender.webhook import handlers, wire
from testkit.fake_kube import eventually
from testkit.webhook_requests import (
    VERBS,
    Client,
    MakeClient,
    call,
    meta,
    names_request,
    objects_request,
    pod,
)
from testkit.world import World


class BrokenPlacer(Placer):
    """Placer that fails at every call."""

    @override
    def place(self, *_: object, **__: object) -> DecisionRecord:
        raise RuntimeError("a fault of our own")

    @override
    def accepts_without(self, *_: object, **__: object) -> frozenset[str]:
        raise RuntimeError("a fault of our own")


# --- faults ---------------------------------------------------------------------------------------


@pytest.fixture
async def broken(world: World, aiohttp_client: MakeClient) -> Client:
    world.placer = BrokenPlacer(world.fleet, world.history, lambda: world.now)
    return await aiohttp_client(world.build_app())


async def test_a_fault_of_our_own_in_filter_passes_every_candidate(
    world: World, broken: Client, caplog: pytest.LogCaptureFixture
) -> None:
    names = await call(broken, "filter", names_request("dead", "idle-a"))
    whole = await call(broken, "filter", objects_request("dead", "idle-a"))

    assert names["NodeNames"] == ["dead", "idle-a"]
    assert names["FailedNodes"] == names["FailedAndUnresolvableNodes"] == {}
    assert names["Error"] == whole["Error"] == ""
    assert [node["metadata"]["name"] for node in whole["Nodes"]["items"]] == ["dead", "idle-a"]
    faults = [record for record in caplog.records if record.exc_info]
    assert [record.levelno for record in faults] == [logging.ERROR] * 2
    assert "a fault of our own" in (faults[0].exc_text or str(faults[0].exc_info))
    assert world.count("idlegpu_faults_total", verb="filter") == 2
    assert world.count("idlegpu_requests_total", verb="filter", outcome="fault") == 2


async def test_a_fault_before_the_candidates_are_known_fails_the_call_with_an_error(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: bytes) -> wire.ExtenderRequest:
        raise RuntimeError("cannot decode")

    monkeypatch.setattr(wire, "decode_request", fail)

    answer = await call(client, "filter", names_request("idle-a"))

    assert answer["Error"] == "internal error: see the extender's log"
    assert world.count("idlegpu_faults_total", verb="filter") == 1


@pytest.mark.parametrize("verb", ["prioritize", "preempt"])
async def test_a_fault_elsewhere_is_answered_500_without_a_traceback(
    world: World, broken: Client, verb: str
) -> None:
    request = names_request("busy") | meta("busy")

    response = await broken.post(f"/{verb}", data=json.dumps(request))

    assert response.status == 500
    assert await response.json() == {"Error": "internal error: see the extender's log"}
    assert world.count("idlegpu_faults_total", verb=verb) == 1


async def test_a_failed_explanation_costs_no_answer(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: DecisionRecord) -> None:
        raise RuntimeError("cannot explain")

    monkeypatch.setattr(world.placer, "detail", fail)

    assert (await call(client, "filter", names_request("idle-a")))["NodeNames"] == ["idle-a"]
    await eventually(lambda: world.count("idlegpu_faults_total", verb="explain") == 1)


# --- HTTP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
async def test_a_wrong_method_is_405_and_an_unknown_path_404(client: Client, verb: str) -> None:
    assert (await client.get(f"/{verb}")).status == 405
    assert (await client.put(f"/{verb}", data=b"{}")).status == 405
    assert (await client.post(f"/{verb}/", data=b"{}")).status == 404
    assert (await client.post(f"/v1/{verb}", data=b"{}")).status in {404, 405}
    assert (await client.post("/bind", data=b"{}")).status == 404


@pytest.mark.parametrize("content_type", ["text/plain", "application/xml; charset=x", ""])
async def test_the_content_type_does_not_matter(client: Client, content_type: str) -> None:
    response = await client.post(
        "/filter",
        data=json.dumps(names_request("idle-a")).encode(),
        headers={"Content-Type": content_type},
    )

    assert (await response.json())["NodeNames"] == ["idle-a"]


async def test_a_compressed_request_is_decoded(client: Client) -> None:
    body = gzip.compress(json.dumps(names_request("idle-a", "dead")).encode())

    response = await client.post("/filter", data=body, headers={"Content-Encoding": "gzip"})

    assert (await response.json())["NodeNames"] == ["idle-a"]


@pytest.mark.parametrize(
    ("verb", "status"), [("filter", 200), ("prioritize", 400), ("preempt", 400)]
)
async def test_a_request_with_a_wrong_content_encoding_is_malformed(
    client: Client, verb: str, status: int
) -> None:
    response = await client.post(f"/{verb}", data=b"{}{}{}", headers={"Content-Encoding": "gzip"})

    assert response.status == status
    assert (await response.json())["Error"].startswith("cannot read the request")


@pytest.mark.parametrize(
    ("verb", "status"), [("filter", 200), ("prioritize", 413), ("preempt", 413)]
)
async def test_the_error_of_a_body_over_the_limit_names_the_remedy(
    world: World, aiohttp_client: MakeClient, verb: str, status: int
) -> None:
    client = await aiohttp_client(world.build_app(max_body_bytes=1000))

    response = await client.post(f"/{verb}", data=b" " * 1001)

    assert response.status == status
    assert "nodeCacheCapable" in (await response.json())["Error"]
    assert world.count("idlegpu_requests_total", verb=verb, outcome="malformed") == 1


async def test_a_decompressed_body_counts_against_the_limit(
    world: World, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(world.build_app(max_body_bytes=MIB))
    bomb = gzip.compress(b" " * (20 * MIB))

    response = await client.post("/filter", data=bomb, headers={"Content-Encoding": "gzip"})

    assert response.status == 200
    assert (await response.json())["Error"]


async def test_the_limit_of_a_body_grows_with_the_number_of_nodes(client: Client) -> None:
    five_nodes = 8 * MIB + 5 * (64 << 10)

    statuses = [
        (await client.post("/prioritize", data=io.BytesIO(b" " * size))).status
        for size in (five_nodes, five_nodes + 1)
    ]

    assert statuses == [400, 413]


async def test_a_request_over_one_mebibyte_is_answered(client: Client) -> None:
    names = [f"node-{index:080}" for index in range(15_000)]
    body = json.dumps(names_request(*names)).encode()
    assert len(body) > MIB

    response = await client.post("/filter", data=io.BytesIO(body))

    assert (await response.json())["NodeNames"] == names


async def test_sixty_mebibytes_of_whole_nodes_are_answered(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_BODY_BYTES", 64 * MIB)  # as with a thousand nodes
    padding = "x" * (60 * MIB // 5000)
    head = f'{{"Pod":{json.dumps(pod())},"Nodes":{{"items":['
    nodes = [f'{{"metadata":{{"name":"n{at}"}},"x":"{padding}"}}' for at in range(5000)]
    body = f'{head}{",".join(nodes)},{{"metadata":{{"name":"dead"}}}}]}}}}'.encode()
    assert len(body) > 60 * MIB

    response = await client.post("/filter", data=io.BytesIO(body))
    answer = await response.read()

    assert response.status == 200
    assert f'"Nodes":{{"items":[{",".join(nodes)}]}}'.encode() in answer


async def test_a_slow_client_delays_no_other_and_one_that_leaves_is_counted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def left() -> float:
        return world.count("idlegpu_requests_total", verb="filter", outcome="disconnected")

    runner = web.AppRunner(world.build_app(), handler_cancellation=False, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]

    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    async with (
        ClientSession(f"http://127.0.0.1:{port}") as other,
        other.post("/filter", data=json.dumps(names_request("idle-a"))) as response,
    ):
        assert (await response.json())["NodeNames"] == ["idle-a"]
    writer.close()

    async with asyncio.timeout(30):
        while not left():
            await asyncio.sleep(0.01)
    await runner.cleanup()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# --- random input ---------------------------------------------------------------------------------

MIB = 1 << 20
FIELDS = ("metadata", "spec", "status", "containers", "initContainers", "resources", "limits")
MORE_FIELDS = ("nvidia.com/gpu", "annotations", "idlegpu.io/gpu-memory", "uid", "items", "Pods")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("1"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from((*FIELDS, *MORE_FIELDS)), inner, max_size=4)
    ),
    max_leaves=15,
)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "Pod": JSON | st.builds(pod, gpus=st.sampled_from([1, 2, 10**30]), x=st.text(max_size=3)),
        "Nodes": JSON,
        "NodeNames": JSON | st.lists(st.sampled_from(["idle-a", "dead", "busy", "new", ""])),
        "NodeNameToMetaVictims": JSON
        | st.dictionaries(st.sampled_from(["idle-a", "dead", "new"]), JSON),
        "NodeNameToVictims": JSON,
    },
)


@given(st.sampled_from(VERBS), REQUESTS.map(msgspec.json.encode) | st.binary(max_size=40))
@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_any_body_is_answered_and_never_with_a_fault(
    world: World, verb: str, body: bytes
) -> None:
    outcome, response = await getattr(world.webhooks(), verb)(body)

    assert response.status in {200, 400}
    assert outcome != "fault"
    json.loads(bytes(response.body))
