import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from agent.app import Agent, _freeze_gc_once, sample_once, start, watch_reports
from agent.gpu.backend import Call, Code
from agent.gpu.session import Cadence
from agent.options import Options
from agent.report.contract import Report
from extender.runtime import native_memory
from testkit.agent.fake_kubelet import FakeKubelet, container, pod
from testkit.agent.json_report import decode_report
from testkit.agent.scripted import ScriptedBackend, ScriptedCard
from testkit.controlplane.process import free_port
from worker_device.agent_loads import SIGNALS, fetch_loads

OPTIONS = Options(
    port=0,
    node="gpu-7",
    period_seconds=0.25,
    cadence=Cadence(slow_seconds=1.0, retry_seconds=1.0),
    call_seconds=0.1,
    liveness_seconds=0.2,
    kubelet_socket="",
    proc="",
    pod_logs="",
)

OTHER = "GPU-43202e14-7a41-4c0e-9d53-5e0b8c110005"


class Served:
    """A running agent with an HTTP client."""

    def __init__(self, agent: Agent, backend: ScriptedBackend, http: aiohttp.ClientSession) -> None:
        self.agent = agent
        self.backend = backend
        self._http = http

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self._http.get(path) as answer:
            return answer.status, await answer.read()

    async def until(self, path: str, condition: Callable[[int, bytes], bool]) -> tuple[int, bytes]:
        async with asyncio.timeout(30):
            while True:
                status, body = await self.get(path)
                if condition(status, body):
                    return status, body
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def served(
    options: Options = OPTIONS, *cards: ScriptedCard, fault: Code | None = None
) -> AsyncIterator[Served]:
    backend = ScriptedBackend(*cards)
    if fault is not None:
        backend.faults["start", ""] = fault
    async with (
        start(options, backend) as (agent, (host, port)),
        aiohttp.ClientSession(f"http://{host}:{port}") as http,
    ):
        try:
            yield Served(agent, backend, http)
        finally:
            backend.released.set()


async def test_start_up_objects_are_frozen_once_and_free_memory_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    monkeypatch.setattr(native_memory, "give_back", lambda: given.append(gc.get_freeze_count()))
    async with served(replace(OPTIONS, period_seconds=0.01), ScriptedCard("GPU-0")) as it:
        await _freeze_gc_once(it.agent)
        gc.unfreeze()

    assert len(given) == 1
    assert given[0] > 0


async def test_the_report_is_served_with_the_time_of_sending() -> None:
    async with served(OPTIONS, ScriptedCard("GPU-0")) as one:
        _, body = await one.until("/v1/report", lambda status, _: status == 200)

    report = decode_report(body)
    assert report.node == "gpu-7"
    assert [device.uuid for device in report.devices] == ["GPU-0"]
    assert report.sent_at >= report.at


async def test_the_loads_report_contains_device_loads_but_no_pods(tmp_path: Path) -> None:
    with FakeKubelet(tmp_path / "kubelet.sock") as kubelet:
        kubelet.pods = [pod("trainer", container("main", OTHER), namespace="red-team")]
        kubelet.allocatable = [{"resource_name": "nvidia.com/gpu", "device_ids": [OTHER]}]
        options = replace(
            OPTIONS,
            loads_host="127.0.0.1",
            loads_port=free_port(),
            kubelet_socket=str(kubelet.socket),
        )
        async with served(options, ScriptedCard(OTHER)) as one:
            await one.until("/v1/report", lambda _, body: b"trainer" in body)
            url = f"http://127.0.0.1:{options.loads_port}"
            async with aiohttp.ClientSession(url) as pods:
                async with pods.get("/v1/report") as answer:
                    body = await answer.read()
                async with pods.get("/metrics") as answer:
                    status = answer.status
            loads = await asyncio.to_thread(fetch_loads, url, 2.0)

    assert b"trainer" not in body
    assert b"red-team" not in body
    assert set(json.loads(body)["signals"]) <= set(SIGNALS)
    assert loads.keys() == {OTHER}
    assert loads[OTHER].memory_used_ratio is not None
    assert status == 404


async def test_metrics_include_dcgm_names_only_if_enabled() -> None:
    def has_power(_: int, body: bytes) -> bool:
        return b"idlegpu_agent_power_watts{" in body

    async with served(OPTIONS, ScriptedCard("GPU-0")) as one:
        _, own = await one.until("/metrics", has_power)
    async with served(replace(OPTIONS, dcgm_names=True), ScriptedCard("GPU-0")) as one:
        _, both = await one.until("/metrics", has_power)

    assert b"DCGM_FI_DEV_GPU_TEMP" not in own
    assert b"DCGM_FI_DEV_GPU_TEMP{" in both


@pytest.mark.parametrize("version", ["abc", "1.0.0-beta", "1..0"])
async def test_metrics_are_served_for_any_accept_header(version: str) -> None:
    async with served(OPTIONS, ScriptedCard("GPU-0")) as one:
        accept = f"application/openmetrics-text; version={version}"
        answer = one.agent.routes()["/metrics"]({"accept": accept})

        assert answer.status == 200
        assert b"idlegpu_agent_passes" in answer.body


async def test_without_a_driver_the_agent_serves_reports_the_problem_and_stays_live() -> None:
    async with served(fault=Code.LibraryNotFound) as one:
        status, body = await one.until("/healthz", lambda _, body: body != b"ok\n")
        await one.until("/readyz", lambda status, _: status == 200)
        _, content = await one.until("/v1/report", lambda status, _: status == 200)
        _, metrics = await one.get("/metrics")

        assert status == 200
        assert b"libnvidia-ml.so.1" in body
        report = decode_report(content)
        assert report.problem is not None
        assert report.problem.code == "LibraryNotFound"
        assert b'idlegpu_agent_reads_gpus{problem="LibraryNotFound"} 0.0' in metrics

        one.backend.cards.append(ScriptedCard("GPU-0"))
        one.backend.faults.clear()

        await one.until("/v1/report", lambda _, body: bool(decode_report(body).devices))


async def test_a_hung_driver_is_reported_and_does_not_fail_liveness() -> None:
    async with served(OPTIONS, ScriptedCard("GPU-0")) as one:
        await one.until("/v1/report", lambda status, _: status == 200)
        one.backend.hangs.add((Call.POWER, "GPU-0"))

        status, _ = await one.until("/healthz", lambda _, body: b"did not return" in body)
        _, content = await one.get("/v1/report")

        assert status == 200, "a new container would hang, too, and hide the problem"
        first = decode_report(content).devices[0]
        assert first.problem is not None
        age = first.age_seconds
        await one.until("/v1/report", lambda _, body: is_older(decode_report(body), age))


def is_older(report: Report, before: float | None) -> bool:
    age = report.devices[0].age_seconds
    return age is not None and before is not None and age > before


async def test_the_agent_serves_before_the_first_pass_ends() -> None:
    backend = ScriptedBackend(ScriptedCard("GPU-0"))
    backend.hangs.add(("start", ""))
    options = replace(OPTIONS, cadence=Cadence(start_limit_seconds=60))
    async with (
        start(options, backend) as (_, (host, port)),
        aiohttp.ClientSession(f"http://{host}:{port}") as http,
    ):
        async with http.get("/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")
        for path in ("/v1/report", "/readyz"):
            async with http.get(path) as answer:
                assert answer.status == 503
        async with http.get("/metrics") as answer:
            assert b"idlegpu_agent_passes_total 0.0" in await answer.read()
        backend.released.set()
        async with asyncio.timeout(10):
            while (await http.get("/readyz")).status != 200:
                await asyncio.sleep(0.01)


async def test_an_address_in_use_raises_oserror() -> None:
    async with start(OPTIONS, ScriptedBackend()) as (_, (_, port)):
        with pytest.raises(OSError, match=str(port)):
            async with start(replace(OPTIONS, port=port), ScriptedBackend()):
                pass


async def test_sample_once_makes_two_passes_to_measure_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = ScriptedBackend(ScriptedCard("GPU-0"))
    waits: list[tuple[float, int]] = []

    async def sleep(seconds: float) -> None:
        waits.append((seconds, backend.calls[Call.GPM, "GPU-0"]))

    monkeypatch.setattr("agent.app.asyncio", SimpleNamespace(sleep=sleep))

    report = await sample_once(replace(OPTIONS, period_seconds=3600.0), backend)

    assert waits == [(3600.0, 1)], "once, after the first pass"
    assert report.sequence == 2
    assert backend.calls[Call.GPM, "GPU-0"] == 2


async def test_sample_once_without_a_driver_makes_one_pass() -> None:
    backend = ScriptedBackend()
    backend.faults["start", ""] = Code.LibraryNotFound

    report = await sample_once(replace(OPTIONS, period_seconds=60), backend)

    assert report.problem is not None


async def test_holders_of_devices_come_from_the_kubelet(tmp_path: Path) -> None:
    uuid = "GPU-43202e14-7a41-4c0e-9d53-5e0b8c110004"
    with FakeKubelet(tmp_path / "kubelet.sock") as kubelet:
        kubelet.pods = [pod("train-0", container("main", uuid), namespace="ml")]
        kubelet.allocatable = [
            {"resource_name": "nvidia.com/gpu", "device_ids": [one]} for one in (uuid, OTHER)
        ]
        report = await sample_once(
            replace(OPTIONS, kubelet_socket=str(kubelet.socket)),
            ScriptedBackend(ScriptedCard(uuid), ScriptedCard(OTHER)),
        )
        await asyncio.sleep(0)  # a closed transport is released in the next loop iteration

    assert report.tenants_problem is None
    (tenant,) = report.devices[0].allocated_to or ()
    assert (tenant.namespace, tenant.pod) == ("ml", "train-0")
    assert report.devices[1].allocated_to == ()


async def test_watch_reports_shows_every_report() -> None:
    shown: list[Report] = []
    enough = asyncio.Event()

    def show(report: Report) -> None:
        shown.append(report)
        if len(shown) == 3:
            enough.set()

    backend = ScriptedBackend(ScriptedCard("GPU-0"))
    watching = asyncio.create_task(watch_reports(OPTIONS, backend, show))
    async with asyncio.timeout(30):
        await enough.wait()
    watching.cancel()

    assert [report.sequence for report in shown[:3]] == [1, 2, 3]
