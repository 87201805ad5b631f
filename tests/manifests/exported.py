"""What extender and agent really export, with a sample of every metric that they can have."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.metrics import MetricWrapperBase

from agent.app import Agent
from agent.backend import Call, ProcessList, ProcessUse, Sample, XidEvent
from agent.options import Options
from agent.report import Foreign
from agent.tenants import Tenants
from extender.listening import Figures
from extender.metrics import Metrics
from extender.observe.certificates import CertificateCollector
from extender.observe.collector import FleetCollector, SourceStatus
from extender.observe.connections import ConnectionCollector
from tests.agent.scripted import GIB, IDLE_GPM, ScriptedBackend, ScriptedCard
from tests.agent.test_exporter import TRAIN, Holders
from tests.extender.served import BUSY, IDLE, World

EXTENDER_JOB = "idlegpu-extender"
AGENT_JOB = "idlegpu-agent"


def extender_registry() -> CollectorRegistry:
    """Return what an extender exports that has seen two nodes and met every trouble once."""
    world = World()
    world.now = time.time()
    world.add({"idle": [IDLE, IDLE], "busy": [BUSY]})
    for metric in vars(Metrics()):
        _touch(getattr(world.metrics, metric))
    for state in ("known", "answering"):
        world.metrics.peers.labels(state).set(1)
    source = SourceStatus(name="prometheus", last_success_at=world.now, failures=1, error="")
    world.metrics.registry.register(
        FleetCollector(world.fleet, lambda: [source], lambda: 0, lambda: world.now)
    )
    ends = {"webhooks": world.now + 86_400.0}
    world.metrics.registry.register(CertificateCollector(lambda: ends))
    port = SimpleNamespace(name="webhooks", is_tls=True, figures=Figures())
    world.metrics.registry.register(ConnectionCollector([port]))  # type: ignore[list-item] # no port
    return world.metrics.registry


def _touch(metric: object) -> None:
    """Give a metric with labels a first sample."""
    if isinstance(metric, MetricWrapperBase) and metric._labelnames:
        metric.labels(*(["any"] * len(metric._labelnames)))


async def agent_registry() -> CollectorRegistry:
    """Return what an agent exports that has seen a new GPU and an old one, and some trouble."""
    card = ScriptedCard("GPU-0", gpm=dict(IDLE_GPM))
    card.set(Call.MEMORY, MEMORY_USED=20.0 * GIB)
    card.processes[ProcessList.COMPUTE] = (ProcessUse(pid=7, memory_bytes=20 * GIB),)
    old = ScriptedCard("GPU-1", gpm=None)
    holders = Holders((TRAIN,), ())
    holders.foreign = Foreign(memory_bytes=5 * GIB, pids=(7,))
    agent = Agent(Options(node="gpu-7"), ScriptedBackend(card, old), _as_tenants(holders))
    sampler = agent.sampler
    for _ in range(2):
        await sampler.sample()
        old.samples.append(Sample(at_microseconds=int(time.time() * 1e6), ratio=0.5))
    await sampler.sample()
    sampler.xids.add(XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=48), time.time())
    sampler.hung["gpm"] = 1
    sampler.close()
    return agent.registry


def _as_tenants(holders: Holders) -> Tenants:
    """Pass a test's stand-in where the agent wants what it is."""
    return holders  # type: ignore[return-value] # the sampler asks for no more than it has


@asynccontextmanager
async def serving(registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve a registry as the programs do; yields host and port."""
    app = web.Application()
    app.add_routes([web.get("/metrics", make_aiohttp_handler(registry=registry))])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()
