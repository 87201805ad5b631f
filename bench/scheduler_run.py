"""Placement of waiting pods by the real kube-scheduler, with or without the extender."""

import asyncio
import os
import signal
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.calm import PAST_QUIET_SECONDS, PAST_SECONDS, Calm
from bench.processes import cpu_seconds, tree_of
from bench.scheduler_cluster import PODS, delete_pods, gpu_pod, watch_bindings
from bench.scheduler_report import Run
from bench.trivial_process import base_url, trivial_process
from testkit.controlplane.client import ApiClient
from testkit.controlplane.deployed import ExtenderServer, scheduler_config
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess
from testkit.controlplane.scheduler import kube_scheduler
from testkit.controlplane.waiting import wait_for

WARM_UP: Final = 20
"""Pods that are placed before the measurement, to open connections and fill caches."""
DEADLINE_SECONDS: Final = 300.0
START_SECONDS: Final = 120.0

WORKER: Final = b"extender.sources."
"""Part of the command line of each of the extender's workers."""
ADOPTED: Final = "idlegpu_settings_reloads_total{outcome=applied}"

CALM_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.5
CALM_SHARE: Final = 0.3
"""Share of a core below which the extender has no backlog."""

FINDING: Final = "scheduler_scheduling_algorithm_duration_seconds"
EXTENDER_CPU: Final = "extender_cpu_seconds_total"
"""Name under which `Metrics` hold the CPU time of the extender and its workers."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Processes and parameters that all runs share.

    Attributes:
        plane: etcd and kube-apiserver.
        client: an administrator's client.
        extender: the extender's process; stopped (SIGSTOP) in runs without it.
        prometheus_url: URL of the extender's Prometheus.
        nodes: number of nodes.
        pods: number of pods that a run places.
    """

    plane: ControlPlane
    client: ApiClient
    extender: ExtenderServer
    prometheus_url: str
    nodes: int
    pods: int

    async def run(self, shortlist: int | None, *, is_called: bool = True) -> Run:
        """Place the pods once.

        Args:
            shortlist: the extender's `wire.shortlist`, None for no extender.
            is_called: whether kube-scheduler calls the extender; if not, the extender only watches
                the API server and queries Prometheus.

        Raises:
            ProcessError: a server did not start.
            TimeoutError: not all pods were placed.
            RuntimeError: kube-scheduler did not call the extender for each pod.
        """
        config = scheduler_config(self.extender.url)
        if shortlist is None or not is_called:
            config["extenders"] = []
        scheduler = kube_scheduler(self.plane, config)
        is_extended = shortlist is not None
        async with AsyncExitStack() as stack:
            if shortlist is None:
                stack.enter_context(_stopped_extender())
            else:
                await self._ensure_extender(shortlist)
            before, after, times = await self._time(stack, scheduler, is_extended=is_extended)
        change = Change(before=before, after=after)
        if config["extenders"]:
            check_called(change.answered, self.pods)
        duration = "idlegpu_request_duration_seconds"
        return Run(
            shortlist=shortlist,
            pods_per_second=_rate(times),
            scheduling_seconds=change.mean(FINDING),
            between_seconds=change.mean("idlegpu_between_verbs_seconds"),
            filter_seconds=change.mean(duration, verb="filter", outcome="answered"),
            prioritize_seconds=change.mean(duration, verb="prioritize", outcome="answered"),
            first_choices=change.first_choices,
            scheduler_cpu_seconds=change.of("process_cpu_seconds_total") / self.pods,
            extender_cpu_seconds=change.of(EXTENDER_CPU) / self.pods or None,
        )

    async def run_trivial(self, shortlist: int) -> Run:
        """Place the pods once, with the trivial handler in the extender's place.

        Raises:
            As `run`.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(_stopped_extender())
            server = trivial_process(self.plane.folder, shortlist)
            stack.callback(server.kill)
            await server.start()
            scheduler = kube_scheduler(self.plane, scheduler_config(base_url(server)))
            before, after, times = await self._time(stack, scheduler, is_extended=False)
            # The count includes the warm-up pods.
            check_called(int(await _get(server.ready_url)), WARM_UP + self.pods)
        change = Change(before=before, after=after)
        return Run(
            shortlist=shortlist,
            pods_per_second=_rate(times),
            scheduling_seconds=change.mean(FINDING),
            scheduler_cpu_seconds=change.of("process_cpu_seconds_total") / self.pods,
        )

    async def _time(
        self, stack: AsyncExitStack, scheduler: ServerProcess, *, is_extended: bool
    ) -> tuple[Metrics, Metrics, list[float]]:
        """Place the pods; return the metrics before and after, and the times of binding."""
        stack.push_async_callback(delete_pods, self.client)
        stack.callback(scheduler.kill)
        await scheduler.start()
        await self._place(scheduler, "warm-up", WARM_UP)
        before = await self._metrics(scheduler, is_extended=is_extended)
        times = await self._place(scheduler, "run", self.pods)
        return before, await self._metrics(scheduler, is_extended=is_extended), times

    async def _ensure_extender(self, shortlist: int) -> None:
        """Wait until the extender runs, knows all nodes, pods and GPUs, and has read the past."""
        settings = {"prometheus": {"url": self.prometheus_url}, "wire": {"shortlist": shortlist}}
        is_new = not self.extender.process.is_running
        if is_new:
            await self.extender.ensure(settings)
        elif settings != self.extender.settings:
            adopted = (await self._seen())[ADOPTED]
            self.extender.write(settings)

            async def has_adopted() -> bool:
                return (await self._seen())[ADOPTED] > adopted

            await wait_for(has_adopted, "the extender has applied its settings")

        async def knows_all() -> bool:
            seen = await self._seen()
            return (
                seen["idlegpu_nodes"] == seen["idlegpu_gpu_pods"] == self.nodes
                and seen["idlegpu_source_up{source=prometheus}"] == 1
                and seen["idlegpu_devices{state=unknown}"] == 0
            )

        await wait_for(knows_all, "the extender knows the fleet", deadline_seconds=START_SECONDS)
        calm, used = Calm(PAST_QUIET_SECONDS if is_new else CALM_SECONDS), _used()

        async def is_calm() -> bool:
            nonlocal used
            await asyncio.sleep(LOOK_SECONDS)
            before, used = used, _used()
            workers = [pid for pid in _extenders() if WORKER in _command(pid)]
            is_catching_up = not is_new and used - before > CALM_SHARE * LOOK_SECONDS
            return calm.has_lasted(is_calm=len(workers) <= 1 and not is_catching_up)

        await wait_for(is_calm, "the extender has nothing to do", deadline_seconds=PAST_SECONDS)

    async def _seen(self) -> Metrics:
        return parse_metrics(await _get(f"{self.extender.url}/metrics"))

    async def _place(self, scheduler: ServerProcess, prefix: str, count: int) -> list[float]:
        """Create pods while kube-scheduler is stopped, resume it; return the times of binding.

        The measured time so excludes the creation of pods, which is the same work with and without
        an extender.
        """
        names = [f"{prefix}-{number:04d}" for number in range(count)]
        async with watch_bindings(self.plane, self.client) as bindings:
            scheduler.pause()
            try:
                await self.client.create_all(gpu_pod(name, PODS, 1) for name in names)
            finally:
                scheduler.resume()
            return await bindings.times(names, DEADLINE_SECONDS)

    async def _metrics(self, scheduler: ServerProcess, *, is_extended: bool) -> Metrics:
        """Read the metrics of kube-scheduler and, if it is called, of the extender."""
        found = parse_metrics(await _get(scheduler.ready_url.replace("/readyz", "/metrics")))
        if is_extended:
            found |= parse_metrics(await _get(f"{self.extender.url}/metrics"))
            found[EXTENDER_CPU] = _used()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of metrics during a run.

    Attributes:
        before: all series before the run.
        after: all series after the run.
    """

    before: Metrics
    after: Metrics

    def of(self, name: str, **labels: str) -> float:
        """Return the increase of a counter; 0 if it does not exist."""
        key = series(name, labels)
        return self.after.get(key, 0.0) - self.before.get(key, 0.0)

    def mean(self, histogram: str, **labels: str) -> float | None:
        """Return a histogram's mean over the run; None without observations."""
        count = self.of(f"{histogram}_count", **labels)
        return self.of(f"{histogram}_sum", **labels) / count if count else None

    @property
    def first_choices(self) -> float | None:
        """Share of the bound pods on the extender's first choice; None without pods."""
        first, other = (
            self.of("idlegpu_bound_pods_total", choice=choice) for choice in ("first", "other")
        )
        return first / (first + other) if first + other else None

    @property
    def answered(self) -> int:
        """Number of answered filter calls, including the warm-up."""
        return round(self.of("idlegpu_requests_total", verb="filter", outcome="answered"))


def check_called(answered: int, pods: int) -> None:
    """Check that the extender answered for each pod: kube-scheduler ignores an extender that fails.

    Raises:
        RuntimeError: kube-scheduler got fewer answers than it placed pods.
    """
    if answered < pods:
        raise RuntimeError(
            f"the extender answered in time for {answered} of {pods} pods: the rest was "
            "placed without it, so the run does not count: use a quieter machine"
        )


def _rate(times: Sequence[float]) -> float:
    """Return the rate in pods per second, from the first to the last binding."""
    return (len(times) - 1) / (times[-1] - times[0])


def parse_metrics(text: str) -> dict[str, float]:
    """Parse the series and values of a Prometheus text exposition."""
    return {
        series(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def series(name: str, labels: Mapping[str, str]) -> str:
    """Return the key of a series in `Metrics`.

    Example:
        >>> series("a_total", {"c": "1", "b": "2"})
        'a_total{b=2,c=1}'
    """
    inner = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name


@contextmanager
def _stopped_extender() -> Iterator[None]:
    """Stop the extender and its workers by SIGSTOP while the context is open."""
    pids = _extenders()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _extenders() -> list[int]:
    """Return the PIDs of the extender and its workers."""
    return sorted({one for pid in _started("-m", "extender") for one in tree_of(pid)})


def _used() -> float:
    """Return the CPU time that the extender and its workers have used, in seconds."""
    return sum(map(cpu_seconds, _started("-m", "extender")))


def _started(*words: str) -> list[int]:
    """Return the PIDs of this user's processes whose command contains these words in sequence."""
    wanted = "\0".join(("", *words, "")).encode()
    return [pid for pid in tree_of(os.getpid()) if wanted in _command(pid)]


def _command(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def _get(url: str) -> str:
    # kube-scheduler uses a self-signed certificate.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.get(url, ssl=context) as response,
    ):
        return await response.text()
