"""Programs with metrics for alerts and dashboard: extenders, an agent, exporters, Prometheus."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from agent.app import start as start_agent
from agent.gpu.backend import Call, ProcessList, ProcessUse, XidEvent
from agent.options import Options
from extender.core.devices.readings import Signal
from simulation.agents import PERIOD_SECONDS
from testkit.agent.fake_kubelet import FakeKubelet, container
from testkit.agent.fake_kubelet import pod as held
from testkit.agent.fake_machine import FakeMachine
from testkit.agent.scripted import GIB, IDLE_GPM, ScriptedBackend, ScriptedCard
from testkit.controlplane.agents import Tokens, tokens_of
from testkit.controlplane.deployed import ExtenderServer
from testkit.controlplane.monitoring import AGENT_JOB, EXTENDER_JOB
from testkit.controlplane.objects import Object
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World
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
        settings: Object = {
            "peers": {"addresses": addresses},
            "agents": tokens.settings,
        }
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
                    tokens.reporting(),
                    service=tokens.address,
                    token_file=str(tokens.file(node)),
                ),
            )
            async with start_agent(options, backend) as (_, (host, port)):
                yield f"{host}:{port}"
    finally:
        await asyncio.to_thread(shutil.rmtree, sockets)
