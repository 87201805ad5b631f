"""Joins the agent's parts; owns every background task."""

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from agent import report as contract
from agent.backend import Backend
from agent.dcgm_names import DcgmCollector
from agent.device_load import REPORT_PATH
from agent.exporter import AgentCollector
from agent.holdings import Holdings
from agent.http import Address, Answer, Headers, Route, serve_http
from agent.load_report import loads_of
from agent.options import Options, ReportOptions
from agent.pod_names import PodNames
from agent.podresources import PodResourcesClient
from agent.processes import ProcessTable
from agent.push import Pusher
from agent.sampler import Sampler
from agent.tenants import TenantPolicy, Tenants
from extender import memory
from extender.supervision import keep

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

REFRESH_SECONDS: Final = 1.0
"""The kubelet is asked when that is due; this often it is looked whether it is."""

TIDY_AFTER: Final = 2
"""After so many reports everything is loaded that is needed every second."""


@contextlib.contextmanager
def open_tenants(options: Options, clock: Clock = time.monotonic) -> Iterator[Tenants]:
    """Open what knows whose devices are.

    Args:
        options: where to look.
        clock: seconds that never jump: all that is measured here is how long ago something was.
    """
    with contextlib.ExitStack() as stack:
        holdings = None
        if options.kubelet_socket:
            kubelet = PodResourcesClient(Path(options.kubelet_socket))
            holdings = Holdings(kubelet, clock=clock)
        tenants = Tenants(
            holdings=holdings,
            processes=ProcessTable(Path(options.proc), clock=clock) if options.proc else None,
            names=PodNames(Path(options.pod_logs) if options.pod_logs else None, clock=clock),
            policy=TenantPolicy(
                threshold=options.foreign,
                # Processes of graphics are listed with what is slow.
                list_seconds=options.cadence.slow_seconds + 2 * options.period_seconds,
            ),
            clock=clock,
        )
        stack.callback(tenants.close)
        yield tenants


class Agent:
    """The running agent.

    Args:
        options: every setting.
        backend: the driver's library.
        tenants: what knows whose devices are.
        clock: seconds since the epoch.
    """

    def __init__(
        self, options: Options, backend: Backend, tenants: Tenants, clock: Clock = time.time
    ) -> None:
        self.options = options
        self.tenants = tenants
        self.sampler = Sampler(backend, options, tenants, clock=clock)
        self.registry = CollectorRegistry()
        self.registry.register(AgentCollector(self.sampler, clock))
        if options.dcgm_names:
            self.registry.register(DcgmCollector(self.sampler.latest, clock))
        self.pusher = None
        if options.reports.service:
            self.pusher = Pusher(options, self.sampler.latest, clock=clock)
            self.registry.register(self.pusher)
        self._clock = clock

    def routes(self) -> dict[str, Route]:
        """Return what is shown over HTTP, by path."""
        return {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            REPORT_PATH: self._report,
        }

    def load_routes(self) -> dict[str, Route]:
        """Return what is shown to pods of any tenant."""
        return {REPORT_PATH: self._loads}

    def _metrics(self, headers: Headers) -> Answer:
        encode, content_type = choose_encoder(headers.get("accept", ""))
        return Answer(content_type=content_type, body=encode(self.registry))

    def _healthz(self, _: Headers) -> Answer:
        """Tell whether the agent lives; where a new container would help, it does not."""
        report = self.sampler.latest.report
        problem = report.problem.text if report is not None and report.problem is not None else ""
        status = HTTPStatus.OK if self.sampler.is_alive else HTTPStatus.SERVICE_UNAVAILABLE
        return Answer(status=status, body=f"{problem or 'ok'}\n".encode())

    def _report(self, _: Headers) -> Answer:
        return self._shown(self.sampler.latest.report)

    def _loads(self, _: Headers) -> Answer:
        report = self.sampler.latest.report
        return self._shown(report if report is None else loads_of(report))

    def _shown(self, report: contract.Report | None) -> Answer:
        if report is None:
            return Answer(
                status=HTTPStatus.SERVICE_UNAVAILABLE, body=b"the first pass is not over yet\n"
            )
        content = contract.encode(report, sent_at=self._clock())
        return Answer(content_type="application/json", body=content)

    async def run(self) -> None:
        """Read and ask until cancelled; none of these ends by itself."""
        async with asyncio.TaskGroup() as group:
            group.create_task(keep("tenants", self._follow_tenants), name="tenants")
            group.create_task(keep("sampler", self.sampler.run), name="sampler")
            if self.pusher is not None:
                group.create_task(keep("reports", self.pusher.run), name="reports")

    async def _follow_tenants(self) -> None:
        while True:
            await self.tenants.refresh()
            await asyncio.sleep(REFRESH_SECONDS)


@asynccontextmanager
async def start(
    options: Options, backend: Backend, clock: Clock = time.time
) -> AsyncIterator[tuple[Agent, Address]]:
    """Run an agent while the context is open.

    Yields:
        The agent, and the address that it serves on.

    Raises:
        OSError: the address cannot be used.
    """
    with open_tenants(options) as tenants:
        agent = Agent(options, backend, tenants, clock)
        try:
            async with contextlib.AsyncExitStack() as stack:
                routes = agent.routes()
                address = await stack.enter_async_context(
                    serve_http(options.host, options.port, routes)
                )
                if options.loads_host:
                    # Connections of its own: no pod keeps Prometheus and the kubelet out.
                    routes = agent.load_routes()
                    await stack.enter_async_context(
                        serve_http(options.loads_host, options.loads_port, routes)
                    )
                logger.info("serving", extra={"host": address[0], "port": address[1]})
                async with asyncio.TaskGroup() as group:
                    background = group.create_task(agent.run(), name="agent")
                    yield agent, address
                    background.cancel()
        finally:
            agent.sampler.close()


async def serve(options: Options, backend: Backend) -> None:
    """Serve until SIGTERM or SIGINT."""
    memory.prefer_small()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    async with start(options, backend) as (agent, _):
        tidying = asyncio.create_task(_tidy_once(agent), name="tidying")
        await stopping.wait()
        tidying.cancel()
        logger.info("shutting down")


async def _tidy_once(agent: Agent) -> None:
    """Leave what was loaded to start with out of every search for garbage, and give memory back."""
    await agent.sampler.latest.newer(TIDY_AFTER)
    gc.collect()
    gc.freeze()
    memory.give_back()


async def look_once(options: Options, backend: Backend) -> contract.Report:
    """Return one report: what is counted between two passes needs the second."""
    with (
        open_tenants(options) as tenants,
        contextlib.closing(Sampler(backend, options, tenants)) as sampler,
    ):
        await tenants.refresh()
        first = await sampler.sample()
        if not first.devices:
            return first
        await asyncio.sleep(options.period_seconds)
        return await sampler.sample()


async def look_again(
    options: Options, backend: Backend, show: Callable[[contract.Report], None]
) -> None:
    """Show every report until cancelled."""
    with open_tenants(options) as tenants:
        # Whoever only looks reports to nobody: the node's agent does.
        agent = Agent(replace(options, reports=ReportOptions()), backend, tenants)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(agent.run(), name="agent")
                sequence = 0
                while True:
                    report = await agent.sampler.latest.newer(sequence)
                    sequence = report.sequence
                    show(report)
        finally:
            agent.sampler.close()
