"""Build the agent, and run its background tasks."""

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from agent.exporter.dcgm_names import DcgmCollector
from agent.exporter.http import Address, Answer, Headers, Route, serve_http
from agent.exporter.metrics import AgentCollector
from agent.gpu.backend import Backend
from agent.options import Options, ReportOptions
from agent.push.pusher import Pusher
from agent.report import contract
from agent.sampler import Sampler
from agent.tenants.attribution import TenantPolicy, Tenants
from agent.tenants.device_holders import DeviceHolders
from agent.tenants.kubelet import PodNames, PodResourcesClient
from agent.tenants.processes import ProcessTable
from extender.runtime import native_memory
from extender.runtime.decoding import MalformedError, decode_with
from extender.runtime.supervision import keep
from worker_device.agent_loads import REPORT_PATH, SIGNALS

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_REFRESH_SECONDS: Final = 1.0
"""Interval of checks whether a kubelet call is due."""

_FREEZE_GC_AFTER: Final = 2
"""Number of reports after which all long-lived objects exist."""


_FIRST_PASS: Final = Answer(
    status=HTTPStatus.SERVICE_UNAVAILABLE, body=b"the first pass has not finished yet\n"
)


def make_tenants(options: Options) -> Tenants:
    """Build the source of tenants; the caller closes it."""
    device_holders = None
    if options.kubelet_socket:
        kubelet = PodResourcesClient(Path(options.kubelet_socket))
        device_holders = DeviceHolders(kubelet, clock=time.monotonic)
    return Tenants(
        device_holders=device_holders,
        processes=ProcessTable(Path(options.proc), clock=time.monotonic) if options.proc else None,
        names=PodNames(Path(options.pod_logs) if options.pod_logs else None, clock=time.monotonic),
        policy=TenantPolicy(
            threshold=options.foreign,
            # Graphics processes are listed only in slow reads.
            list_seconds=options.cadence.slow_seconds + 2 * options.period_seconds,
        ),
        clock=time.monotonic,
    )


def _redacted_report(report: contract.Report) -> contract.Report:
    """Copy a report without pods, processes and hardware details: pods of any tenant may read it.

    Keeps only what `worker_device` reads: device ids, ages, and utilization and memory signals.

    Example:
        >>> held = contract.Device(
        ...     uuid="GPU-0", allocated_to=(contract.Tenant(namespace="red", pod="a"),)
        ... )
        >>> _redacted_report(contract.Report(node="gpu-7", at=1.0, devices=(held,))).devices == (
        ...     contract.Device(uuid="GPU-0"),
        ... )
        True
    """
    return contract.Report(
        node=report.node,
        at=report.at,
        devices=tuple(
            contract.Device(
                uuid=device.uuid,
                gpu_instance_id=device.gpu_instance_id,
                mig_uuids=device.mig_uuids,
                age_seconds=device.age_seconds,
            )
            for device in report.devices
        ),
        signals={name: column for name, column in report.signals.items() if name in SIGNALS},
    )


class Agent:
    """Runs the agent: reads the GPUs, exports metrics, and reports to the extender.

    Args:
        tenants: source of tenants.
        clock: seconds since the epoch.
    """

    def __init__(
        self, options: Options, backend: Backend, tenants: Tenants, clock: Clock = time.time
    ) -> None:
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
        """Return the HTTP handlers by path."""
        return {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            REPORT_PATH: self._report,
        }

    def load_routes(self) -> dict[str, Route]:
        """Return the HTTP handlers for pods of any tenant."""
        return {REPORT_PATH: self._loads}

    def _metrics(self, headers: Headers) -> Answer:
        try:
            encode, content_type = decode_with(choose_encoder, headers.get("accept", ""))
        except MalformedError:  # a version that is not a number
            encode, content_type = choose_encoder("")
        return Answer(content_type=content_type, body=encode(self.registry))

    def _healthz(self, _: Headers) -> Answer:
        """Return 503 if the agent should be restarted, with its problem as the body."""
        report = self.sampler.latest.report
        problem = report.problem.text if report is not None and report.problem is not None else ""
        status = HTTPStatus.OK if self.sampler.is_alive else HTTPStatus.SERVICE_UNAVAILABLE
        return Answer(status=status, body=f"{problem or 'ok'}\n".encode())

    def _readyz(self, _: Headers) -> Answer:
        """Return 503 until the first pass has finished."""
        return Answer(body=b"ok\n") if self.sampler.latest.report else _FIRST_PASS

    def _report(self, _: Headers) -> Answer:
        return self._report_answer(self.sampler.latest.report)

    def _loads(self, _: Headers) -> Answer:
        report = self.sampler.latest.report
        return self._report_answer(report if report is None else _redacted_report(report))

    def _report_answer(self, report: contract.Report | None) -> Answer:
        if report is None:
            return _FIRST_PASS
        content = contract.encode(report, sent_at=self._clock())
        return Answer(content_type="application/json", body=content)

    async def run(self) -> None:
        """Run all background tasks until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(keep("tenants", self._refresh_tenants), name="tenants")
            group.create_task(keep("sampler", self.sampler.run), name="sampler")
            if self.pusher is not None:
                group.create_task(keep("reports", self.pusher.run), name="reports")

    async def _refresh_tenants(self) -> None:
        while True:
            await self.tenants.refresh()
            await asyncio.sleep(_REFRESH_SECONDS)


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
    with contextlib.closing(make_tenants(options)) as tenants:
        agent = Agent(options, backend, tenants, clock)
        try:
            async with contextlib.AsyncExitStack() as stack:
                routes = agent.routes()
                address = await stack.enter_async_context(
                    serve_http(options.host, options.port, routes)
                )
                if options.loads_host:
                    # A separate server: pods must not take the connections of Prometheus and the
                    # kubelet.
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
    native_memory.prefer_small()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    async with start(options, backend) as (agent, _):
        freezing = asyncio.create_task(_freeze_gc_once(agent), name="tidying")
        await stopping.wait()
        freezing.cancel()
        logger.info("shutting down")


async def _freeze_gc_once(agent: Agent) -> None:
    """Exclude start-up objects from garbage collection, and return free memory to the system."""
    await agent.sampler.latest.wait_newer(_FREEZE_GC_AFTER)
    gc.collect()
    gc.freeze()
    native_memory.give_back()


async def sample_once(options: Options, backend: Backend) -> contract.Report:
    """Return one report, from the second of two passes: rates need two readings."""
    with (
        contextlib.closing(make_tenants(options)) as tenants,
        contextlib.closing(Sampler(backend, options, tenants)) as sampler,
    ):
        await tenants.refresh()
        first = await sampler.sample()
        if not first.devices:
            return first
        await asyncio.sleep(options.period_seconds)
        return await sampler.sample()


async def watch_reports(
    options: Options, backend: Backend, show: Callable[[contract.Report], None]
) -> None:
    """Call `show` with every report until cancelled."""
    with contextlib.closing(make_tenants(options)) as tenants:
        # Do not report to the extender: the node's agent does.
        agent = Agent(replace(options, reports=ReportOptions()), backend, tenants)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(agent.run(), name="agent")
                sequence = 0
                while True:
                    report = await agent.sampler.latest.wait_newer(sequence)
                    sequence = report.sequence
                    show(report)
        finally:
            agent.sampler.close()
