"""The whole extender over a simulated cluster: everything between the sockets is real."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extender.app import start
from extender.server import request_tracker as in_flight_module
from extender.server.request_tracker import RequestTracker
from extender.settings.config import Settings
from extender.settings.service import Ready
from extender.settings.sources import Prometheus
from simulation.cluster import run_cluster
from simulation.demo_fleet import demo_fleet
from simulation.objects import JsonObject, pod_object
from testkit.app import DEADLINE_SECONDS, Running, running
from testkit.fake_kube import eventually


async def makes_wait(request_tracker: RequestTracker) -> None:
    """Wait until background work yields to a request.

    Raises:
        TimeoutError: background work does not yield in time.
    """
    async with asyncio.timeout(30):
        while True:
            work = asyncio.create_task(request_tracker.yield_control())
            for _ in range(3):
                await asyncio.sleep(0)
            if not work.done():
                work.cancel()
                return
            await asyncio.sleep(0.001)


async def until(part: Running, path: str, is_so: Callable[[JsonObject], bool]) -> JsonObject:
    """Poll until the answer meets a condition; return the answer."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        _, body = await part.get(path)
        while not is_so(body):
            await asyncio.sleep(0.05)
            _, body = await part.get(path)
    return body


async def until_degraded(part: Running, *words: str) -> JsonObject:
    """Wait until /readyz reports these words, or none, as degraded; return its answer."""

    def is_so(body: JsonObject) -> bool:
        degraded = str(body["degraded"]) if body["degraded"] else ""
        return all(word in degraded for word in words) and bool(degraded) == bool(words)

    return await until(part, "/readyz", is_so)


async def test_ready_and_undegraded_once_inventory_and_telemetry_are_there() -> None:
    async with running() as part:
        body = await until_degraded(part)

        assert body["status"] == "ready"


async def test_telemetry_that_is_down_degrades_and_leaves_it_ready() -> None:
    down = Prometheus(url="http://127.0.0.1:1", interval_seconds=0.5)

    async with running(prometheus=down, ready=Ready(wait_seconds=0.5)) as part:
        body = await until_degraded(part, "prometheus", "http://127.0.0.1:1")

        assert body["status"] == "degraded"
        assert (await part.get("/readyz"))[0] == 200


async def test_missing_prometheus_url_names_the_setting() -> None:
    async with running(prometheus=Prometheus()) as part:
        await until_degraded(part, "prometheus", "set prometheus.url")


async def test_not_ready_before_the_first_inventory() -> None:
    async with run_cluster(demo_fleet()) as cluster, aiohttp.ClientSession() as session:
        kubeconfig = cluster.kubeconfig.read_text(encoding="utf-8")
        cluster.kubeconfig.write_text(
            kubeconfig.replace(cluster.apiserver_url, "http://127.0.0.1:1"), encoding="utf-8"
        )
        settings = Settings(listen="127.0.0.1:0", kubeconfig=cluster.kubeconfig)

        async with start(settings) as extender:
            part = Running(cluster, extender, session)
            status, body = await part.get("/readyz")
            passed = await part.filter(pod_object("early"), "gpu-h100-01", "gpu-h100-02")

    assert (status, body["status"]) == (503, "starting")
    assert passed["NodeNames"] == ["gpu-h100-01", "gpu-h100-02"]


async def test_bad_annotation_is_logged_once_and_becomes_an_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pod = pod_object("typo", annotations={"idlegpu.io/gpu-memory": "20Gb"})

    async with running() as part:
        created = part.cluster.control.create_pod(pod)
        with caplog.at_level(logging.WARNING, logger="extender.app"):
            await part.filter(created, "gpu-h100-01")
            await part.filter(created, "gpu-h100-01")
        events = part.cluster.control.events
        await eventually(lambda: events, deadline_seconds=DEADLINE_SECONDS)

    lines: list[Any] = [record for record in caplog.records if "annotation" in record.message]
    assert len(lines) == 1
    assert (lines[0].annotation, lines[0].value) == ("idlegpu.io/gpu-memory", "20Gb")
    assert "20Gi" in lines[0].allowed
    assert "20Gb" in str(events[0]["note"])


async def test_request_still_arriving_at_shutdown_is_answered() -> None:
    body = orjson.dumps({"Pod": pod_object("late"), "NodeNames": ["gpu-h100-01", "unknown"]})
    head = f"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async with running() as part:
        port = urlsplit(part.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body[:20])
        await writer.drain()
        request_tracker = part.extender.request_tracker
        await eventually(lambda: request_tracker.requests == 1, deadline_seconds=DEADLINE_SECONDS)

        async def finish() -> bytes:
            await eventually(lambda: request_tracker.is_draining, deadline_seconds=DEADLINE_SECONDS)
            writer.write(body[20:])
            await writer.drain()
            return await reader.read()

        answering = asyncio.create_task(finish())

    answer = await answering
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"NodeNames":["gpu-h100-01","unknown"]' in answer


async def test_new_connection_stays_open_at_shutdown_until_its_first_answer() -> None:
    body = orjson.dumps({"Pod": pod_object("first"), "NodeNames": ["gpu-h100-01", "unknown"]})
    head = f"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async with running() as part:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(part.url).port)
        request_tracker = part.extender.request_tracker
        looks, callers = 0, part.extender.server_ports.callers

        def count_looks() -> Iterable[object]:
            nonlocal looks
            looks += 1
            return callers()

        leaving = asyncio.create_task(request_tracker.drain_connections(0.0, 60.0, count_looks))
        await eventually(lambda: looks >= 5, deadline_seconds=DEADLINE_SECONDS)
        assert not leaving.done()

        writer.write(head + body)
        answer = await reader.read()
        writer.close()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await leaving

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"Connection: close" in answer
    assert b'"NodeNames":["gpu-h100-01","unknown"]' in answer


async def test_other_work_waits_from_the_first_bytes_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = orjson.dumps({"Pod": {}, "Nodes": None, "NodeNames": ["gpu-h100-01"]})
    head = f"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request)}\r\n\r\n"
    async with running() as part:
        request_tracker = part.extender.request_tracker
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(part.url).port)
        writer.write(head.encode() + request)
        await reader.readuntil(b'"Error":""}')
        await request_tracker.yield_control()  # no request waits any more

        monkeypatch.setattr(in_flight_module, "_MAX_YIELD_SECONDS", DEADLINE_SECONDS)
        writer.write(b"POST")
        await makes_wait(request_tracker)

        writer.close()
        async with asyncio.timeout(DEADLINE_SECONDS / 2):
            await request_tracker.yield_control()


async def test_bound_pod_is_counted_and_the_decision_says_where_it_went() -> None:
    async with running() as part:
        created = part.cluster.control.create_pod(pod_object("stock"))
        await part.filter(created, "gpu-h100-01", "gpu-v100-01")
        part.cluster.control.bind("default", "stock", "gpu-h100-01")

        def is_bound(answer: JsonObject) -> bool:
            decisions: Any = answer["decisions"]
            return [decision["bound_node"] for decision in decisions] == ["gpu-h100-01"]

        await until(part, "/v1/decisions?pod=default/stock", is_bound)
        async with part.session.get(f"{part.url}/metrics") as answer:
            families = list(text_string_to_metric_families(await answer.text()))

    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples["idlegpu_bound_pods_total", "other"] == 1
