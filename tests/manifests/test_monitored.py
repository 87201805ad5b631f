"""Every query of dashboard and alerts has a correct result in a real Prometheus.

It scrapes two extenders that run as in their manifests, a real agent and the fleet's exporters;
kube-scheduler calls the extenders. No metric is set by the test.
"""

import asyncio
import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from agent.app import start as start_agent
from agent.gpu.backend import Call, ProcessList, ProcessUse, XidEvent
from agent.options import Options
from extender.core.devices.readings import Signal
from simulation.agents import PERIOD_SECONDS, run_agents
from simulation.models import H100
from simulation.nodes import NodeSpec
from testkit.agent.fake_kubelet import FakeKubelet, container
from testkit.agent.fake_kubelet import pod as held
from testkit.agent.fake_machine import FakeMachine
from testkit.agent.scripted import GIB, IDLE_GPM, ScriptedBackend, ScriptedCard
from testkit.controlplane.agents import Tokens, tokens_of
from testkit.controlplane.deployed import ExtenderServer, merged
from testkit.controlplane.monitoring import (
    AGENT_JOB,
    EXTENDER_JOB,
    alerts,
    always,
    panel_queries,
    requested_metrics,
)
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.services import Services
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.ways import Way, set_up, take_down
from testkit.controlplane.world import World, open_world
from tests.manifests.scraping import fetch

FATAL_XID: Final = 48
FOREIGN_PID: Final = 7
"""PID of a process outside Kubernetes."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Scraped programs, and their Prometheus.

    Attributes:
        world: nodes, pods and exporters; its extender is the first of two replicas.
        second: second replica.
        node: node of the real agent.
        backend: scripted driver of that agent.
        settings: settings of the first replica.
        tokens: issuer of agents' tokens.
    """

    world: World
    second: ExtenderServer
    node: str
    backend: ScriptedBackend
    settings: Object
    tokens: Tokens

    @property
    def prometheus_url(self) -> str:
        """Base URL of Prometheus."""
        return self.world.services.prometheus.url

    async def answers(self, queries: Mapping[str, str]) -> dict[str, list[float]]:
        """Return the current result values of queries, by name of the query."""
        async with aiohttp.ClientSession() as session:
            return {
                name: [
                    float(sample["value"][1])
                    for sample in await fetch(session, self.prometheus_url, query)
                ]
                for name, query in queries.items()
            }

    async def wait_scraped(self) -> None:
        """Wait until every target has been scraped twice since its start."""

        async def are_scraped() -> bool:
            jobs = {
                "extenders": f'up{{job="{EXTENDER_JOB}"}}',
                "agents": f'up{{job="{AGENT_JOB}"}}',
            }
            queries = {name: f"sum_over_time({job}[1m]) >= 2" for name, job in jobs.items()}
            found = await self.answers(queries)
            return (len(found["extenders"]), len(found["agents"])) == (2, 1)

        await wait_for(are_scraped, "extenders and agent are scraped")

    def let_xid_happen(self) -> None:
        """Let the driver report an XID error of the agent's first GPU."""
        uuid = self.backend.cards[0].uuid
        self.backend.happen(XidEvent(uuid=uuid, gpu_instance_id=None, xid=FATAL_XID))

    def let_call_hang(self) -> None:
        """Let a driver call for the agent's second GPU hang."""
        self.backend.hangs.add((Call.POWER, self.backend.cards[1].uuid))


@asynccontextmanager
async def everything_watched(world: World, folder: Path) -> AsyncIterator[Watched]:
    """Run all programs while the context is open: real ones, with simulated GPUs.

    Args:
        world: world with its nodes, to which the agent's node is added; its services run as in the
            manifests.
        folder: empty folder.
    """
    services = world.services
    second = services.replica("second-extender")
    node = world.add("watched-agent", 3)
    addresses = [urlsplit(server.webhooks).netloc for server in (services.extender, second)]
    status = [urlsplit(server.url).netloc for server in (services.extender, second)]
    async with AsyncExitStack() as stack:
        tokens = await stack.enter_async_context(tokens_of(world, folder))
        settings: Object = {"peers": {"addresses": addresses}, "agents": tokens.settings}
        await world.register()
        await tokens.issue_all([node])
        await world.start(settings)
        stack.push_async_callback(second.process.stop)
        without_agents = {key: value for key, value in settings.items() if key != "agents"}
        await second.ensure({**services.extender.settings, **without_agents, "agents": {}})

        backend = _backend(world, node)
        stack.callback(backend.released.set)
        address = await stack.enter_async_context(_agent(tokens, node, backend, folder))
        services.prometheus.add_job(EXTENDER_JOB, *status, __scheme__="https")
        services.prometheus.add_job(AGENT_JOB, address, node=node)
        services.prometheus.set_targets(sorted(world.fleet.nodes))
        watched = Watched(
            world=world,
            second=second,
            node=node,
            backend=backend,
            settings=services.extender.settings,
            tokens=tokens,
        )
        await world.wait_gpu(node, 0, lambda gpu: gpu["source"] == "agent", "comes from the agent")
        await watched.wait_scraped()
        yield watched


def _backend(world: World, node: str) -> ScriptedBackend:
    """Return a scripted driver with a node's GPUs: one in use, an old one, an idle one."""
    uuids = [card.uuid for card in world.fleet.node(node).cards]
    new = ScriptedCard(uuids[0], gpm={**IDLE_GPM, Signal.GRAPHICS_ACTIVE: 0.6})
    new.set(Call.MEMORY, MEMORY_USED=5.0 * GIB)
    new.processes[ProcessList.COMPUTE] = (ProcessUse(pid=FOREIGN_PID, memory_bytes=5 * GIB),)
    old = ScriptedCard(uuids[1], gpm=None)
    old.set(Call.RATES, GPU_UTILIZATION=0.5)
    return ScriptedBackend(new, old, ScriptedCard(uuids[2]))


@asynccontextmanager
async def _agent(
    tokens: Tokens, node: str, backend: ScriptedBackend, folder: Path
) -> AsyncIterator[str]:
    """Run the real agent with a scripted driver; yield host and port of its metrics."""
    machine = FakeMachine(folder)
    machine.run(FOREIGN_PID)
    sockets = Path(tempfile.mkdtemp())  # a socket's path must be short
    try:
        with FakeKubelet(sockets / "kubelet.sock") as kubelet:
            uuid = backend.cards[1].uuid
            kubelet.pods = [held("train-0", container("main", uuid), namespace="ml")]
            options = Options(
                port=0,
                node=node,
                period_seconds=PERIOD_SECONDS,
                call_seconds=0.5,
                kubelet_socket=str(kubelet.socket),
                proc=str(machine.proc),
                pod_logs=str(machine.logs),
                reports=replace(
                    tokens.reporting(), service=tokens.address, token_file=str(tokens.file(node))
                ),
            )
            async with start_agent(options, backend) as (_, (host, port)):
                yield f"{host}:{port}"
    finally:
        await asyncio.to_thread(shutil.rmtree, sockets)


pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(360)]

INTERVAL: Final = "2m"
"""Longer than a test, so that ranges include all of its events."""

NO_SERIES_YET: Final = {
    "idlegpu_agent_xid_errors_total": "the first XID error of its kind makes the series",
    "idlegpu_agent_device_unhealthy": "no GPU is unhealthy",
    "idlegpu_unhealthy_gpus": "no GPU is unhealthy",
    "idlegpu_held_": "no pod holds GPUs",
    "idlegpu_gpu_hours_total": "no pod holds GPUs",
    "idlegpu_unplaced_": "no pod waits",
}
"""Metrics whose queries are correctly empty before the first event."""

STILL: Final = {
    "idlegpu_assumed_pods": "lasts milliseconds: hardly a scrape falls between choice and binding",
    "idlegpu_faults_total": "a fault of ours would be a bug",
    "idlegpu_background_faults_total": "likewise",
    "idlegpu_unreadable_objects_total": "likewise",
    "idlegpu_events_dropped_total": "takes more events than the API server lets through",
    "idlegpu_pods_bound_unjudged_total": "takes a replica that is silent, or gone",
    "idlegpu_source_failed_queries": "takes a Prometheus that answers some queries only",
    "idlegpu_source_partial_answers_total": "takes a Thanos that has lost a store",
    "idlegpu_source_worker_restarts_total": "takes a worker process that dies",
    "idlegpu_held_idle_gpus": "the pods here use their GPUs",
    "idlegpu_held_hour_idle_gpus": "takes an hour",
    "idlegpu_placement_activity": "is measured minutes after the binding",
    "idlegpu_placement_regret": "likewise",
    "idlegpu_signal_disagreements": "takes a scrape while a GPU's sensors contradict each other",
}
"""Metrics that may stay 0 here, with the reason; their series exist."""


@pytest.fixture(scope="module")
def services(control_plane: ControlPlane) -> Iterator[Services]:
    """Yield all processes, configured as in the manifests."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        setup = runner.run(set_up(control_plane, Way.DEFAULT))
        running = Services(control_plane, setup)
        yield running
        running.stop()
        runner.run(running.ensure_plane())
        runner.run(take_down(control_plane, setup))


@pytest_asyncio.fixture
async def world(services: Services) -> AsyncIterator[World]:
    async with open_world(services, "w") as opened:
        yield opened


@pytest_asyncio.fixture
async def watched(world: World, tmp_path: Path) -> AsyncIterator[Watched]:
    world.add("a-node")
    world.add("b-node")
    async with everything_watched(world, tmp_path) as running:
        yield running


def every_query() -> dict[str, str]:
    """Return the queries of panels and alerts by name; for alerts the compared expression."""
    queries = {query: query for query in panel_queries(INTERVAL)}
    for alert in alerts():
        expression = alert["expr"].replace("[5m]", f"[{INTERVAL}]")
        queries[alert["alert"]] = always(expression)
    return queries


async def test_each_query_has_a_true_answer_before_and_after_the_first_pods(
    watched: Watched,
) -> None:
    queries = every_query()
    fresh = await watched.answers(queries)

    empty = {queries[name] for name, values in fresh.items() if not values}
    assert [query for query in empty if not any(map(query.__contains__, NO_SERIES_YET))] == []

    await cause_work(watched)
    await cause_faults(watched)

    missing = set(queries)

    async def all_numbers() -> bool:
        # Not all at once: on a busy machine an agent's reading may be too old for one scrape.
        missing.intersection_update(await without_number(watched, queries))
        return not missing

    with suppress(TimeoutError):  # a missing result says more
        # The pods that hold GPUs are counted once a minute.
        await wait_for(all_numbers, "every query gives a number", deadline_seconds=120)
    assert missing == set()

    async def are_moved() -> bool:
        return await always_zero(watched) <= set(STILL)

    with suppress(TimeoutError):
        await wait_for(are_moved, "what happened is counted")
    assert await always_zero(watched) <= set(STILL)


async def without_number(watched: Watched, queries: dict[str, str]) -> set[str]:
    """Return the queries without a numeric result: quantiles of no values are NaN."""
    found = await watched.answers(queries)
    return {name for name, values in found.items() if all(map(math.isnan, values))}


async def always_zero(watched: Watched) -> set[str]:
    """Return the queried metrics that were always 0."""
    queries = {
        name: f'max(max_over_time({{__name__=~"{name}(_count)?"}}[10m])) != 0'
        for name in requested_metrics()
    }
    assert len(queries) > 30
    return {name for name, values in (await watched.answers(queries)).items() if not values}


async def cause_work(watched: Watched) -> None:
    """Place pods: some are bound, one fits no node, one has an invalid annotation."""
    world = watched.world
    worded = pod("badly-worded", annotations={"idlegpu.io/strategy": "sideways"})
    await world.place_all([pod("first"), pod("second"), worded])
    too_large = pod("too-large", annotations={"idlegpu.io/gpu-memory": "500Gi"})
    await world.client.create(too_large)
    await world.decided(too_large, more_than=0)
    await bind_without_a_call(world)


async def bind_without_a_call(world: World) -> None:
    """Bind a pod as a scheduler without extenders does."""
    bypassed = pod("bypassed", schedulerName="another")
    await world.client.create(bypassed)
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "bypassed"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": next(iter(world.fleet.nodes))},
    }
    await world.client.request("POST", "/api/v1/namespaces/default/pods/bypassed/binding", binding)


async def cause_faults(watched: Watched) -> None:
    """Cause the faults that the alerts report."""
    services = watched.world.services
    watched.let_xid_happen()
    watched.let_call_hang()
    # GPUs on a node that has no CPU left.
    await watched.world.fill_host(watched.node, requests={"cpu": "126"})
    # An exporter on a node that the cluster does not have.
    watched.world.fleet.add(
        NodeSpec(name="w-unregistered", model=H100, cards=1, address="10.20.9.9")
    )
    services.prometheus.set_targets(sorted(watched.world.fleet.nodes))
    # A client without TLS on the port of the webhooks.
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://{urlsplit(services.extender.webhooks).netloc}/filter")
    # An agent with an invalid token.
    stranger = next(name for name in watched.world.fleet.nodes if name != watched.node)
    watched.tokens.file(stranger).write_text("nonsense")
    async with run_agents(
        watched.world.fleet,
        [stranger],
        watched.tokens.address,
        watched.tokens.file,
        reports=watched.tokens.reporting(),
    ):
        await wait_nonzero(watched, 'idlegpu_source_failures_total{source="agents"}')
    # A setting that waits for a restart, and then an invalid file.
    fewer = merged(watched.settings, {"max_connections": 999})
    services.extender.write(fewer)
    await wait_nonzero(watched, "idlegpu_settings_restart_needed")
    services.extender.write(merged(fewer, {"max_connections": "many"}))
    await wait_nonzero(watched, "idlegpu_settings_file_bad")


async def wait_nonzero(watched: Watched, metric: str) -> None:
    """Wait until Prometheus has a nonzero value of a metric."""

    async def is_seen() -> bool:
        return bool((await watched.answers({"it": f"max({metric}) > 0"}))["it"])

    await wait_for(is_seen, f"{metric} is counted")
