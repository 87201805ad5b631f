"""Measure the effects of faults under load: late pods, pods on bad nodes, time to recover.

`python -m bench.faults` runs the real etcd, kube-apiserver, kube-scheduler with the shipped
configuration and TLS, Prometheus and kwok, and two replicas of the extender behind a Service. Pods
that request one GPU are created all the time and end after some seconds. All GPUs of one node are
broken, and processes outside Kubernetes use those of another: no pod may land there. One fault
after the other is injected, kept for a while, and removed. Readings are stale after five seconds,
so that a fault that delays them has an effect. Recovery is the time from the fault's end until all
earlier pods are bound, a pod created afterwards is bound, and both replicas have fresh readings of
all GPUs of the good nodes. All pods that were created until then count.
"""

import argparse
import asyncio
import random
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from agent.gpu.backend import NodeReading
from bench.machine import RESULTS, Bound, report
from bench.pod_load import POLL_SECONDS, UNREACHABLE, PodLoad
from bench.processes import tree_of
from bench.stepped_clock import VARIABLE, step
from extender.server.certificates.issuing import Files
from simulation.agents import SimulatedAgent, run_agents
from simulation.devices import Load as DeviceLoad
from simulation.devices import Loss
from simulation.models import GIB
from testkit.certificates import issue, reissue
from testkit.controlplane.agents import Tokens
from testkit.controlplane.deployed import ExtenderServer, RunOptions, grant_rights
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import EXTENDER, ControlPlane
from testkit.controlplane.service import Service, serving
from testkit.controlplane.services import Services
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.ways import Setup
from testkit.controlplane.world import World, open_world

GOOD_NODES: Final = 4
CARDS: Final = 8
QUIET_SECONDS: Final = 5.0
FAULT_SECONDS: Final = 15.0
RECOVERY_SECONDS: Final = 120.0
RECOVERY_LIMIT: Final = 60.0
STEP_SECONDS: Final = 600.0
COMPACTIONS: Final = 3
MAX_AGE_SECONDS: Final = 5
REQUEST_SECONDS: Final = 2.0
LONG_AGO_DAYS: Final = 4000.0
NONSENSE: Final = ("NaN", "+Inf", "-1", "1e308", "9223372036854775794", "")
LATEST_TIME: Final = 1e6
"""A larger sample is a time: plausible lies leave the age of readings unchanged."""


Lie = Callable[[Object, str], str]
"""Returns a false value for a row and its real value."""


@dataclass(kw_only=True)
class Bench:
    """Processes and objects on which faults are injected.

    Attributes:
        world: the cluster.
        replicas: the two extenders.
        tokens: tokens of the agents.
        good: nodes that pods may land on.
        certificates: folder with the certificates of extender and kube-scheduler.
        files: the first issued certificates.
        clock: file with the offset of the extenders' clocks.
    """

    world: World
    replicas: Sequence[ExtenderServer]
    tokens: Tokens
    good: Sequence[str]
    certificates: Path
    files: Files
    clock: Path

    async def stale_percent(self, replica: ExtenderServer) -> float:
        """Return the percentage of the good nodes' GPUs without fresh readings in a replica."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                gpus = (await replica.get("/v1/gpus"))["gpus"]
        except UNREACHABLE:
            return 100.0
        # Not the extender's count of fresh windows: they restart with each pod that comes or goes.
        ages = [gpu["age_seconds"] for gpu in gpus if gpu["node"] in self.good]
        fresh = sum(age is not None and age <= MAX_AGE_SECONDS for age in ages)
        return float(100 * (1 - fresh / (len(self.good) * CARDS)))

    async def is_fresh(self) -> bool:
        """Return whether both replicas have fresh readings of all GPUs of the good nodes."""
        return not any([await self.stale_percent(replica) for replica in self.replicas])

    @asynccontextmanager
    async def prometheus_hangs(self) -> AsyncIterator[None]:
        """Let Prometheus accept connections and answer nothing."""
        process = self.world.services.prometheus.process
        process.pause()
        yield
        process.resume()

    def prometheus_lies(self) -> AbstractAsyncContextManager[None]:
        """Replace every value in Prometheus' answers by nonsense."""
        return self._prometheus_answers(lambda _row, _value: random.choice(NONSENSE))

    def prometheus_lies_well(self) -> AbstractAsyncContextManager[None]:
        """Replace the good nodes' values in Prometheus' answers by plausible random ones."""
        good = {
            card.uuid
            for node in self.good
            for card in (self.world.fleet.card(node, index) for index in range(CARDS))
        }

        def lie(row: Object, value: str) -> str:
            is_time = float(value) > LATEST_TIME
            is_true = is_time or row["metric"].get("UUID") not in good
            return value if is_true else str(random.randint(0, 100))

        return self._prometheus_answers(lie)

    @asynccontextmanager
    async def _prometheus_answers(self, lie: Lie) -> AsyncIterator[None]:
        real = self.world.services.prometheus.url
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", lambda request: _lie(request, real, lie))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            await self._query_prometheus(f"http://127.0.0.1:{port}")
            yield
        finally:
            await self._query_prometheus(real)
            await runner.cleanup()

    async def _query_prometheus(self, url: str) -> None:
        for replica in self.replicas:
            settings = replica.settings
            await replica.ensure({**settings, "prometheus": {**settings["prometheus"], "url": url}})

    @asynccontextmanager
    async def prometheus_forgets(self) -> AsyncIterator[None]:
        """Kill Prometheus, delete its data, and start it again."""
        prometheus = self.world.services.prometheus
        prometheus.process.kill()
        yield
        await prometheus.restart_empty()

    @asynccontextmanager
    async def api_server_dies(self) -> AsyncIterator[None]:
        """Kill kube-apiserver, and start it again."""
        apiserver = self.world.services.plane.apiserver
        apiserver.kill()
        yield
        await apiserver.start()

    @asynccontextmanager
    async def watches_expire(self) -> AsyncIterator[None]:
        """Compact etcd and restart kube-apiserver repeatedly, so that watches end with 410."""
        plane = self.world.services.plane
        etcd = plane.etcd.ready_url.removesuffix("/health")
        async with aiohttp.ClientSession(etcd, raise_for_status=True) as session:
            for _ in range(COMPACTIONS):
                plane.apiserver.kill()
                async with session.post("/v3/maintenance/status", json={}) as answer:
                    revision = (await answer.json())["header"]["revision"]
                compaction = {"revision": revision, "physical": True}
                async with session.post("/v3/kv/compaction", json=compaction):
                    pass
                await plane.apiserver.start()
                await asyncio.sleep(QUIET_SECONDS)
        yield

    @asynccontextmanager
    async def agents_flap(self) -> AsyncIterator[None]:
        """Disconnect and reconnect the agents of all good nodes each second."""

        async def flap() -> None:
            while True:
                async with self._agents(self.good):
                    await asyncio.sleep(1.0)

        async with _meanwhile(flap()):
            yield

    def agents_lie(self) -> AbstractAsyncContextManager[None]:
        """Let the agents of half of the good nodes report nonsense."""
        return self._agents_report(lambda: random.choice((-1.0, 1e308, 2.0)))

    def agents_lie_well(self) -> AbstractAsyncContextManager[None]:
        """Let the agents of half of the good nodes report plausible random values."""
        return self._agents_report(random.random)

    @asynccontextmanager
    async def _agents_report(self, make_up: Callable[[], float]) -> AsyncIterator[None]:
        liars = self.good[::2]
        async with self._agents(liars) as agents:
            for agent in agents.values():
                agent.is_dumb = True  # from now on the test publishes in its place

            async def lie() -> None:
                while True:
                    for agent in agents.values():
                        report = agent.look()
                        signals = {
                            name: tuple(make_up() for _ in values)
                            for name, values in report.signals.items()
                        }
                        agent.latest.publish(
                            msgspec.structs.replace(report, signals=signals), NodeReading()
                        )
                    await asyncio.sleep(POLL_SECONDS)

            async with _meanwhile(lie()):
                yield

    def _agents(
        self, nodes: Sequence[str]
    ) -> AbstractAsyncContextManager[Mapping[str, SimulatedAgent]]:
        return run_agents(self.world.fleet, nodes, self.tokens.address, self.tokens.file)

    @asynccontextmanager
    async def replica_dies(self) -> AsyncIterator[None]:
        """Kill a replica, and start it again."""
        process = self.replicas[1].process
        await asyncio.to_thread(process.kill)
        yield
        await process.start()

    @asynccontextmanager
    async def replica_hangs(self) -> AsyncIterator[None]:
        """Stop a replica by SIGSTOP, and let it continue later."""
        process = self.replicas[1].process
        process.pause()
        yield
        process.resume()

    @asynccontextmanager
    async def certificates_rotate(self) -> AsyncIterator[None]:
        """Replace the certificates of extender and kube-scheduler each second."""

        async def rotate() -> None:
            while True:
                await asyncio.to_thread(reissue, self.certificates, self.files)
                await asyncio.sleep(1.0)

        async with _meanwhile(rotate()):
            yield

    @asynccontextmanager
    async def certificates_expire(self) -> AsyncIterator[None]:
        """Let the certificates of extender and kube-scheduler expire; replace them later.

        kube-scheduler is restarted, because open connections outlive their certificates.
        """
        authority = {name: text for name, text in self.files.items() if name.startswith("ca.")}
        scheduler = self.world.services.scheduler
        await scheduler.stop()
        issue(self.certificates, days_ago=LONG_AGO_DAYS, files=authority)
        await scheduler.start()
        yield
        reissue(self.certificates, self.files)

    @asynccontextmanager
    async def clock_is_ahead(self) -> AsyncIterator[None]:
        """Step the extenders' clocks ten minutes ahead, and back."""
        step(self.clock, STEP_SECONDS)
        yield
        step(self.clock, 0)

    @asynccontextmanager
    async def clock_is_behind(self) -> AsyncIterator[None]:
        """Step the extenders' clocks ten minutes back, and ahead."""
        step(self.clock, -STEP_SECONDS)
        yield
        step(self.clock, 0)

    @asynccontextmanager
    async def disk_is_full(self) -> AsyncIterator[None]:
        """Fill the disk: neither the extenders' logs nor their decision logs can grow."""
        self._limit_files(1)
        yield
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, most_bytes: int) -> None:
        for replica in self.replicas:
            for pid in tree_of(replica.process.pid):
                with suppress(ProcessLookupError):  # the process has just ended
                    limits = (most_bytes, resource.RLIM_INFINITY)
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    @property
    def faults(self) -> Mapping[str, Callable[[], AbstractAsyncContextManager[None]]]:
        """Return all faults by name."""
        return {
            "nothing": self.nothing,
            "Prometheus hangs": self.prometheus_hangs,
            "Prometheus lies": self.prometheus_lies,
            "Prometheus lies plausibly": self.prometheus_lies_well,
            "Prometheus forgets": self.prometheus_forgets,
            "API server dies": self.api_server_dies,
            "watches expire (410)": self.watches_expire,
            "agents flap": self.agents_flap,
            "agents lie": self.agents_lie,
            "agents lie plausibly": self.agents_lie_well,
            "a replica dies": self.replica_dies,
            "a replica hangs": self.replica_hangs,
            "certificates rotate": self.certificates_rotate,
            "certificates expire": self.certificates_expire,
            "clock 10 min ahead": self.clock_is_ahead,
            "clock 10 min behind": self.clock_is_behind,
            "disk full": self.disk_is_full,
        }

    @asynccontextmanager
    async def nothing(self) -> AsyncIterator[None]:
        """Inject no fault: the baseline."""
        yield


@asynccontextmanager
async def _meanwhile(act: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a task while the context is open."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(act)
        yield
        task.cancel()


async def _lie(request: web.Request, real: str, lie: Lie) -> web.Response:
    """Answer as the real Prometheus does, with each value replaced by `lie`."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            request.method,
            f"{real}{request.path_qs}",
            data=await request.read(),
            headers={"Content-Type": request.content_type},
        ) as response,
    ):
        document = await response.json()
    data = document.get("data")
    for row in data.get("result", ()) if isinstance(data, dict) else ():
        if "value" in row:
            row["value"][1] = lie(row, row["value"][1])
        for value in row.get("values", ()):
            value[1] = lie(row, value[1])
    return web.json_response(document)


@asynccontextmanager
async def open_bench(folder: Path) -> AsyncIterator[Bench]:
    """Run all processes of the benchmark while the context is open."""
    certificates, clock = folder / "certificates", folder / "clock"
    files = issue(certificates)
    step(clock, 0)
    own = certificates / "extender"
    plane = ControlPlane(folder / "plane")
    plane.folder.mkdir()
    await plane.start()
    try:
        await grant_rights(plane)
        options = RunOptions(
            kubeconfig=plane.kubeconfig(EXTENDER),
            settings={
                "status_listen": "127.0.0.1:0",
                "tls": {
                    "cert_file": str(own / "tls.crt"),
                    "key_file": str(own / "tls.key"),
                    "client_ca_file": str(own / "ca.crt"),
                },
            },
            command=(sys.executable, "-m", "bench.stepped_clock", "--config"),
            environment={VARIABLE: str(clock), "IDLEGPU_API_ALLOW_PLAIN": "true"},
        )
        services = Services(plane, Setup(options=options, certificates=certificates))
        async with AsyncExitStack() as stack:
            stack.callback(services.stop)
            world = await stack.enter_async_context(open_world(services, "fault"))
            yield await _start(stack, world, folder, certificates, files, clock)
    finally:
        plane.stop()


async def _start(
    stack: AsyncExitStack, world: World, folder: Path, certificates: Path, files: Files, clock: Path
) -> Bench:
    services = world.services
    good = [world.add(f"good-{number}", CARDS) for number in range(GOOD_NODES)]
    broken, used = world.add("broken", CARDS), world.add("used", CARDS)
    for index in range(CARDS):
        world.fleet.kill_device(broken, index, Loss.XID_79)
        world.fleet.set_foreign(used, index, DeviceLoad(utilization=0.8, memory_bytes=20 * GIB))
    second = services.replica("second")
    replicas = (services.extender, second)
    stack.callback(second.process.kill)
    service = Service(replicas, lag_seconds=1.0)
    await stack.enter_async_context(serving(service))
    tokens = Tokens(world.client, folder)
    await tokens.prepare()
    settings: Object = {
        "peers": {"addresses": [urlsplit(one.webhooks).netloc for one in replicas]},
        "freshness": {"max_age_seconds": MAX_AGE_SECONDS},
    }
    entry = {"urlPrefix": f"https://{service.address}", "ignorable": False}
    await world.start(
        {**settings, **_decision_log(folder, 1), "agents": tokens.settings}, extender=entry
    )
    await second.ensure({**services.extender.settings, **_decision_log(folder, 2), "agents": {}})
    await tokens.issue_all(good)
    await world.wait_state(broken, 0, "unhealthy")
    await world.wait_state(used, CARDS - 1, "foreign")

    async def are_ready() -> bool:
        return all(endpoint.is_ready for endpoint in service.endpoints)

    await wait_for(are_ready, "both replicas are ready")
    return Bench(
        world=world,
        replicas=replicas,
        tokens=tokens,
        good=good,
        certificates=certificates,
        files=files,
        clock=clock,
    )


def _decision_log(folder: Path, number: int) -> Object:
    return {"decision_log": {"path": str(folder / f"decisions-{number}.jsonl")}}


async def measure(
    load: PodLoad, bench: Bench, fault: AbstractAsyncContextManager[None], seconds: float
) -> dict[str, object]:
    """Inject a fault under load; return the row of the table."""
    first = len(load.created)
    async with _meanwhile(load.go_on()):
        await asyncio.sleep(QUIET_SECONDS)
        async with fault:
            await asyncio.sleep(seconds)
            stale_percent = await bench.stale_percent(bench.replicas[0])
        undone = time.monotonic()
        probe = await load.create()

        async def has_recovered() -> bool:
            is_bound = not load.waiting(undone) and probe in load.nodes
            return is_bound and await bench.is_fresh()

        await _until(has_recovered)
        recovered = time.monotonic()
    await _until(lambda: _is_empty(load))
    created = list(load.created)[first:]
    bad = [name for name in created if load.nodes.get(name, bench.good[0]) not in bench.good]
    return {
        "pods": len(created),
        "stale at its end, %": round(stale_percent),
        "left behind": len(load.waiting(time.monotonic())),
        "on bad nodes": len(bad),
        "recovery s": recovered - undone,
    }


async def _is_empty(load: PodLoad) -> bool:
    return not load.waiting(time.monotonic())


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition, at most `RECOVERY_SECONDS`."""
    with suppress(TimeoutError):
        await wait_for(condition, "all is well", deadline_seconds=RECOVERY_SECONDS)


async def run(only: Sequence[str], seconds: float) -> list[dict[str, object]]:
    """Inject one fault after the other; return the rows of the table."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="idlegpu-faults-") as name:
        async with open_bench(Path(name)) as bench:
            load = PodLoad(world=bench.world)
            async with _meanwhile(load.watch()):
                for fault, bring_about in bench.faults.items():
                    if only and fault not in only:
                        continue
                    found = await measure(load, bench, bring_about(), seconds)
                    rows.append({"fault": fault, **found})
                    sys.stderr.write(f"{rows[-1]}\n")
    return rows


def bounds(rows: Sequence[Mapping[str, Any]]) -> list[Bound]:
    """Return the bounds of every fault."""
    return [
        Bound(
            what="pods left behind",
            limit=0,
            measured=sum(row["left behind"] for row in rows),
            unit="pods",
        ),
        Bound(
            what="pods on bad nodes",
            limit=0,
            measured=sum(row["on bad nodes"] for row in rows),
            unit="pods",
        ),
        Bound(
            what="longest recovery",
            limit=RECOVERY_LIMIT,
            measured=max(row["recovery s"] for row in rows),
            unit="s",
        ),
    ]


def main() -> int:
    """Run the benchmark, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="FAULT", help="nothing is written then")
    parser.add_argument("--seconds", type=float, default=FAULT_SECONDS, help="that each lasts")
    options = parser.parse_args()
    rows = asyncio.run(run(options.only, options.seconds))
    is_met = report(
        "faults",
        "Faults under load",
        rows=rows,
        bounds=bounds(rows),
        notes=[__doc__.strip(), f"Each lasts {options.seconds:g} s."],
        folder=None if options.only else RESULTS,
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
