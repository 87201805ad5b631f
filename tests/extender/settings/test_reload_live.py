"""Changes of the settings file of a running extender, with requests over HTTP meanwhile."""

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extender.app import Extender, start
from extender.runtime import logs
from extender.runtime.logs import LogFormat, LogLevel
from extender.settings.config import Settings, load_settings
from extender.settings.reload import SettingsFile
from extender.sources.source_manager import INVENTORY
from simulation.cluster import SimulatedCluster, run_cluster
from simulation.demo_fleet import demo_fleet
from simulation.objects import JsonObject, pod_object
from testkit.fake_kube import eventually
from tests.extender.settings.config_map import ConfigMap

DEADLINE_SECONDS = 60.0  # a worker process starts late on a busy machine


@dataclass
class Live:
    """Extender whose settings file is that of a ConfigMap."""

    cluster: SimulatedCluster
    extender: Extender
    session: aiohttp.ClientSession
    mounted: ConfigMap
    values: dict[str, Any]
    statuses: set[int] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.extender.addresses[0]

    async def metric(self, name: str, **labels: str) -> float | None:
        async with self.session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if (sample.name, sample.labels) == (f"idlegpu_{name}", labels):
                    return float(sample.value)
        return None

    async def change(self, **changes: Any) -> None:
        """Change settings in the file, None to remove them; wait until they are in force."""
        name = "settings_reloads_total"
        before = await self.metric(name, outcome="applied") or 0.0
        self.values = {**self.values, **changes}
        self.values = {key: value for key, value in self.values.items() if value is not None}
        self.mounted.write(yaml.safe_dump(self.values))
        async with asyncio.timeout(DEADLINE_SECONDS):
            now = before
            while now == before:
                await asyncio.sleep(0.02)
                now = await self.metric(name, outcome="applied") or 0.0
        assert await self.metric(name, outcome="fault") == 0
        assert await self.metric(name, outcome="rejected") == 0

    async def get(self, path: str) -> Any:
        async with self.session.get(f"{self.url}{path}") as answer:
            self.statuses.add(answer.status)
            return await answer.json()

    async def filter(self, pod: JsonObject, *nodes: str) -> dict[str, Any]:
        answer: dict[str, Any] = await self._ask("filter", pod, nodes)
        return answer

    async def prioritize(self, pod: JsonObject, *nodes: str) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = await self._ask("prioritize", pod, nodes)
        return answer

    async def _ask(self, verb: str, pod: JsonObject, nodes: Sequence[str]) -> Any:
        request = orjson.dumps({"Pod": pod, "Nodes": None, "NodeNames": nodes})
        async with self.session.post(f"{self.url}/{verb}", data=io.BytesIO(request)) as answer:
            self.statuses.add(answer.status)
            return await answer.json()

    async def degraded(self, part: str, *, is_so: bool) -> str:
        """Wait until a part is degraded or recovered; return the text about it."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                degraded: dict[str, str] = (await self.get("/readyz"))["degraded"]
                if (part in degraded) is is_so:
                    return degraded.get(part, "")
                await asyncio.sleep(0.05)


@asynccontextmanager
async def live(folder: Path, **changes: Any) -> AsyncIterator[Live]:
    """Run an extender on the demo's fleet; yield it once it is ready and not degraded."""
    async with run_cluster(demo_fleet(), interval_seconds=0.5) as cluster:
        values = {
            "listen": "127.0.0.1:0",
            "kubeconfig": str(cluster.kubeconfig),
            "prometheus": {"url": cluster.prometheus_url, "interval_seconds": 0.5},
            **changes,
        }
        mounted = ConfigMap(folder / "etc", yaml.safe_dump(values))
        file = SettingsFile(mounted.path, {}, poll_seconds=0.5)
        async with (
            start(load_settings(mounted.path, {}), file=file) as extender,
            aiohttp.ClientSession() as session,
        ):
            part = Live(cluster, extender, session, mounted, values)
            await eventually(lambda: extender.is_ready, deadline_seconds=DEADLINE_SECONDS)
            await part.degraded("prometheus", is_so=False)
            part.statuses.clear()
            yield part


IDLE, BUSY = "gpu-h100-01", "gpu-h100-02"


def nodes(part: Live) -> list[str]:
    return sorted(part.extender.fleet.nodes)


async def test_every_kind_of_change_under_load_loses_no_answer_and_stays_ready(
    tmp_path: Path,
) -> None:
    async with live(tmp_path) as part:
        fleet, prometheus = part.extender.fleet, part.values["prometheus"]
        names, devices, pods = nodes(part), len(fleet.store), len(fleet.pods)
        answers = 0

        def are_answered(count: int) -> bool:
            return answers >= count

        async def call(requester: int) -> None:
            nonlocal answers
            while True:
                answers += 1
                pod = pod_object(f"requester-{requester}-{answers}")
                passed = await part.filter(pod, *names)
                assert not passed["Error"]
                assert set(passed["NodeNames"] or ()) <= set(names)
                scores = await part.prioritize(pod, *names)
                assert {score["Host"] for score in scores} == set(names)
                await asyncio.sleep(0.02)  # a core is left for the changes

        async def watch() -> None:
            while True:
                assert (await part.get("/readyz"))["status"] in {"ready", "degraded"}
                assert sorted(fleet.nodes) == names
                assert len(fleet.store) >= devices
                assert len(fleet.pods) >= pods
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(requester), name="requester") for requester in range(3)]
            tasks.append(group.create_task(watch(), name="watcher"))
            changes: list[dict[str, Any]] = [
                {"thresholds": {"utilization": 60}, "strategy": "pack"},
                {"shared_policy": "packed", "assumed": {"warm_up_seconds": 5}},
                {"recent_seconds": 600, "foreign": {"memory": "4Gi"}},
                {"prometheus": {**prometheus, "interval_seconds": 1.0}},
                {"cluster": {"exporter_words": ["exporter"]}},
                {"resources": ["nvidia.com/gpu", "nvidia.com/*"]},
                {"wake": {"enabled": False}, "events": {"enabled": False}},
                {"wake": {"enabled": True, "target": "node"}},
                {"decisions": {"history": 10, "detailed_nodes": 2}},
                {"wire": {"max_score": 100, "shortlist": 3}},
            ]
            for change in changes:
                await part.change(**change)
                enough = answers + 10
                await eventually(partial(are_answered, enough), deadline_seconds=DEADLINE_SECONDS)
            for task in tasks:
                task.cancel()

        assert part.statuses == {200}
        assert answers > 100
        assert await part.metric("faults_total", verb="filter") == 0
        assert await part.metric("settings_reloads_total", outcome="applied") == len(changes)


async def test_fault_midway_leaves_nothing_of_the_new_settings_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live(tmp_path) as part:
        extender, before = part.extender, part.extender.settings
        adopt, tried = extender.shadow_mode.adopt, list[Settings]()

        async def fail_once(settings: Settings) -> None:
            tried.append(settings)
            if len(tried) == 1:
                raise ValueError("no such thing")
            await adopt(settings)

        monkeypatch.setattr(extender.shadow_mode, "adopt", fail_once)
        changes = {
            "thresholds": {"utilization": 60},
            "wire": {"shortlist": 1},
            "wake": {"enabled": False},
        }
        part.mounted.write(yaml.safe_dump({**part.values, **changes}))
        assert "stay in force" in await part.degraded("settings", is_so=True)

        assert (len(tried), extender.settings) == (2, before)
        assert extender.fleet.policy == before.policy()
        assert extender.webhooks.shortlist == before.wire.shortlist
        assert extender.waker_runner.waker is not None

        part.mounted.write(yaml.safe_dump(part.values))
        await part.degraded("settings", is_so=False)
        assert part.statuses == {200}


async def test_bad_file_degrades_and_stays_ready_and_a_good_one_mends_it(tmp_path: Path) -> None:
    async with live(tmp_path) as part:
        part.mounted.write("thresholds: {utilization: 300}")
        cause = await part.degraded("settings", is_so=True)

        assert "thresholds.utilization" in cause
        assert (await part.get("/readyz"))["status"] == "degraded"
        assert part.extender.settings.thresholds.utilization == 30
        assert await part.metric("settings_file_bad") == 1

        part.mounted.write(yaml.safe_dump(part.values))
        await part.degraded("settings", is_so=False)
        assert part.statuses == {200}


# --- each setting takes effect --------------------------------------------------------------------


async def test_each_part_works_as_is_set_now(tmp_path: Path) -> None:
    async with live(tmp_path, events={"enabled": False}) as part:
        extender, control = part.extender, part.cluster.control
        await part.change(bypassed={"schedulers": ["another"]})
        control.create_pod(pod_object("not-ours"))
        await eventually(
            lambda: any(pod.name == "not-ours" for pod in extender.fleet.pods.values()),
            deadline_seconds=DEADLINE_SECONDS,
        )
        assert not extender.bypassed_pods._waiting

        before = await part.filter(pod_object("a"), IDLE, BUSY)
        await part.change(load_filter={"enabled": True})
        after = await part.filter(pod_object("a"), IDLE, BUSY)
        await part.change(load_filter=None)
        again = await part.filter(pod_object("a"), IDLE, BUSY)
        assert sorted(before["NodeNames"]) == sorted(again["NodeNames"]) == [IDLE, BUSY]
        assert after["NodeNames"] == [IDLE]

        for number in range(6):
            await part.filter(pod_object(f"pod-{number}"), IDLE, BUSY)
        await part.change(decisions={"history": 2, "detailed_nodes": 1})
        assert len(extender.history) == 2
        await part.filter(pod_object("last"), IDLE, BUSY)
        assert len(extender.history) == 2
        assert extender.placer.detailed == 1

        await part.filter(control.create_pod(typo("silent")), IDLE)
        await part.change(events={"enabled": True})
        await part.filter(control.create_pod(typo("warned")), IDLE)
        await eventually(lambda: control.events, deadline_seconds=DEADLINE_SECONDS)
        events: list[Any] = list(control.events)
        assert [event["regarding"]["name"] for event in events] == ["warned"]

        await part.change(wire={"max_score": 1000, "shortlist": 1})
        scores = await part.prioritize(pod_object("a"), IDLE, BUSY)
        passed = await part.filter(pod_object("a"), IDLE, BUSY)
        assert max(score["Score"] for score in scores) == 1000
        assert passed["NodeNames"] == [IDLE]


def typo(name: str) -> JsonObject:
    return pod_object(name, annotations={"idlegpu.io/gpu-memory": "20Gb"})


async def test_prometheus_gets_new_queries_and_its_readings_stay(tmp_path: Path) -> None:
    async with live(tmp_path) as part:
        fleet, good = part.extender.fleet, part.values["prometheus"]
        before, devices = fleet.sources["prometheus"], len(fleet.store)
        down = {"url": "http://127.0.0.1:1", "interval_seconds": 0.5}
        await part.change(prometheus=down)
        cause = await part.degraded("prometheus", is_so=True)
        assert "http://127.0.0.1:1" in cause
        assert len(fleet.store) == devices

        await part.change(prometheus=None)
        assert "set prometheus.url" in await part.degraded("telemetry", is_so=True)
        await part.change(prometheus=good)
        await part.degraded("prometheus", is_so=False)
        await eventually(
            lambda: fleet.sources["prometheus"].at > before.at, deadline_seconds=DEADLINE_SECONDS
        )
        restarts = await part.metric("source_worker_restarts_total", source="prometheus")

    assert restarts == 0, "a worker that we ended was not lost"


async def test_sources_that_nothing_changed_for_are_left_alone(tmp_path: Path) -> None:
    async with live(tmp_path) as part:
        source_manager = part.extender.source_manager
        status = source_manager.cluster.status

        def watching() -> object:
            return source_manager._tasks._tasks[INVENTORY]

        prometheus, task = source_manager.prometheus, watching()
        assert prometheus is not None
        worker = prometheus._worker
        await part.change(
            thresholds={"utilization": 60}, recent_seconds=600, wake={"enabled": False}
        )
        assert (source_manager.prometheus, prometheus._worker) == (prometheus, worker)
        assert worker.starts == 1
        assert watching() is task

        await part.change(cluster={"max_backoff_seconds": 10})
        await eventually(lambda: watching() is not task, deadline_seconds=DEADLINE_SECONDS)
        assert prometheus._worker is worker
        assert [status[resource].lists for resource in ("nodes", "pods")] == [1, 1]


async def test_resources_that_come_and_go_are_counted_and_forgotten(tmp_path: Path) -> None:
    mig = "gpu-a100-mig-01"

    async with live(tmp_path) as part:
        fleet = part.extender.fleet
        pods, names, offered = set(fleet.pods), nodes(part), dict(fleet.nodes[IDLE].allocatable)
        await part.change(resources=["nvidia.com/mig-*"])
        await eventually(
            lambda: not fleet.nodes[IDLE].allocatable, deadline_seconds=DEADLINE_SECONDS
        )
        await eventually(
            lambda: {pod.node for pod in fleet.pods.values()} == {mig},
            deadline_seconds=DEADLINE_SECONDS,
        )
        outcome = {"verb": "filter", "outcome": "no-gpu"}
        await part.filter(pod_object("a"), IDLE, BUSY)
        assert await part.metric("requests_total", **outcome) == 1
        assert nodes(part) == names

        await part.change(resources=None)
        await eventually(
            lambda: fleet.nodes[IDLE].allocatable == offered, deadline_seconds=DEADLINE_SECONDS
        )
        await eventually(lambda: set(fleet.pods) == pods, deadline_seconds=DEADLINE_SECONDS)
        wanted = part.extender.settings.resource_patterns
        await eventually(
            lambda: part.extender.source_manager.resources() == wanted,
            deadline_seconds=DEADLINE_SECONDS,
        )


async def test_waking_keeps_its_state_when_switched_off_and_on(tmp_path: Path) -> None:
    async with live(tmp_path) as part:
        waker = part.extender.waker_runner.waker
        assert waker is not None
        waker.counts.wakes = 7
        await part.change(wake={"target": "node"})
        other = part.extender.waker_runner.waker
        assert other is not None
        assert (other is waker, other.counts.wakes) == (False, 7)

        await part.change(wake={"enabled": False})
        is_off = part.extender.waker_runner.waker is None
        assert is_off
        assert "waker" not in {task.get_name() for task in asyncio.all_tasks()}

        await part.change(wake=None)
        assert part.extender.waker_runner.waker is not None
        assert "waker" in {task.get_name() for task in asyncio.all_tasks()}


@pytest.fixture
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.mark.usefixtures("_restore_logging")
async def test_log_is_written_as_is_set_now(tmp_path: Path) -> None:
    async with live(tmp_path) as part:
        logs.configure(LogLevel.INFO, LogFormat.JSON)
        await part.change(log={"level": "error", "format": "text"})

        root = logging.getLogger()
        assert root.level == logging.ERROR
        assert [type(handler.formatter) for handler in root.handlers] == [logs.TextFormatter]
