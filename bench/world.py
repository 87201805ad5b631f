"""Processes of a benchmark: the simulated cluster and the extender.

    with open_world(FleetSpec(nodes=5000)) as world:
        world.wait_ready()
        world.wait_readings(2)
        world.control("refresh")            # the next round of Prometheus brings new values
        scheduler = Scheduler(world)        # bench.placing: sends kube-scheduler's requests

All processes use free ports of 127.0.0.1 and end with the caller.
"""

import asyncio
import http.client
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
import yaml

from bench.backend_fleet import FleetSpec
from bench.calm import PAST_QUIET_SECONDS, PAST_SECONDS, Calm
from bench.processes import Memory, memory_of, tree_of
from simulation.cluster import kubeconfig_text
from testkit.controlplane.process import ProcessError, ServerProcess, free_port

ROOT: Final = Path(__file__).parents[1]
BACKEND_START_SECONDS: Final = 180.0
READY_SECONDS: Final = 180.0
POLL_SECONDS: Final = 0.02
ROUND_POLL_SECONDS: Final = 0.25
CONTROL_SECONDS: Final = 120.0
SAME_ROUND_SECONDS: Final = 0.4
SETTLE_SECONDS: Final = 60.0
SETTLED: Final = "idlegpu_settings_loaded_timestamp_seconds"
PAST_POLL_SECONDS: Final = 1.0
STEPS: Final = "steps.json"


class BenchError(RuntimeError):
    """Error that ends a benchmark; the message names the condition that did not come true."""


@dataclass(kw_only=True)
class World:
    """Simulated cluster and the extender.

    Attributes:
        spec: size and composition of the cluster.
        backend: process of the simulated cluster.
        backend_url: base URL of the simulated cluster.
        extender: the extender's process; `start_extender` starts it.
        url: base URL of the extender.
        status_url: base URL of its port for health, metrics and API.
        config: settings file of the extender.
        settings: content of the settings file.
        started_at: start of the extender, by `time.perf_counter`.
        connections: connections to close at the end.
    """

    spec: FleetSpec
    backend: ServerProcess
    backend_url: str
    extender: ServerProcess
    url: str
    status_url: str
    config: Path
    settings: Mapping[str, object]
    started_at: float = 0.0
    connections: ExitStack = field(default_factory=ExitStack, repr=False)
    _local: threading.local = field(default_factory=threading.local, repr=False)

    # --- the backend ----------------------------------------------------------------------------

    def control(self, name: str, **arguments: object) -> dict[str, Any]:
        """Send a control request to the backend; `bench.backend` lists them."""
        return self._request(self.backend_url, "POST", f"/control/{name}", orjson.dumps(arguments))

    def state(self) -> dict[str, Any]:
        """Return the backend's counts."""
        return self._request(self.backend_url, "GET", "/control/state")

    def nodes(self) -> list[str]:
        """Return the names of all nodes."""
        names: list[str] = self._request(self.backend_url, "GET", "/control/nodes")["nodes"]
        return names

    def running_pods(self, kind: str) -> list[str]:
        """Return the UIDs of the bound pods of a kind: "gpu", "web", "batch" or "exporter"."""
        path = f"/control/pods?kind={kind}"
        uids: list[str] = self._request(self.backend_url, "GET", path)["uids"]
        return uids

    # --- the extender ---------------------------------------------------------------------------

    def start_extender(self) -> None:
        """Start the extender's process."""
        self.started_at = time.perf_counter()
        self.extender.spawn()

    def settle(self, changes: Mapping[str, object]) -> None:
        """Change settings of the running extender; sections are replaced, not merged."""
        before = self.metrics().get(SETTLED, 0.0)
        changed = self.config.with_suffix(".new")
        changed.write_text(yaml.safe_dump({**self.settings, **changes}))
        changed.replace(self.config)
        wait_until(
            lambda: self.metrics().get(SETTLED, 0.0) > before,
            "the extender has applied other settings",
            SETTLE_SECONDS,
        )

    def wait_ready(self, limit_seconds: float = READY_SECONDS) -> float:
        """Wait until the extender is ready; return the seconds since its start.

        Raises:
            BenchError: the extender ended, or was not ready in time.
        """

        def is_ready() -> bool:
            if not self.extender.is_running:
                raise BenchError(f"the extender ended: {self.extender.describe()}")
            try:
                return self.get_status("/readyz")[0] == HTTPStatus.OK
            except OSError:
                return False

        wait_until(is_ready, "the extender is ready", limit_seconds)
        return time.perf_counter() - self.started_at

    def wait_readings(self, rounds: int = 1) -> None:
        """Wait until `rounds` further answers of Prometheus have been applied.

        Raises:
            BenchError: they were not applied in time.
        """
        begun = self.rounds()
        wait_until(
            lambda: self.rounds() >= begun + rounds,
            f"{rounds} rounds of readings",
            READY_SECONDS,
            poll_seconds=ROUND_POLL_SECONDS,  # each call makes the extender compute all its metrics
        )

    def wait_past(self) -> None:
        """Wait until the past was read: only the extender and one worker run for a while.

        Raises:
            BenchError: it was not read in time.
        """
        calm = Calm(PAST_QUIET_SECONDS)
        wait_until(
            lambda: calm.has_lasted(is_calm=len(self.memory().processes) == 2),
            "the past was read",
            PAST_SECONDS,
            poll_seconds=PAST_POLL_SECONDS,
        )

    def rounds(self) -> int:
        """Return the number of answers of Prometheus that were applied since the first call.

        It is derived from the age of the last answer; call it at least once a second to miss none.
        """
        age = self.metrics().get('idlegpu_source_age_seconds{source="prometheus"}')
        local = self._local
        if age is not None:
            at = time.time() - age
            if abs(at - getattr(local, "success_at", 0.0)) > SAME_ROUND_SECONDS:
                local.success_at = at
                local.rounds = getattr(local, "rounds", -1) + 1
        return max(0, getattr(local, "rounds", -1))

    def has_readings(self) -> bool:
        """Return whether an answer of Prometheus has been applied."""
        return 'idlegpu_source_age_seconds{source="prometheus"}' in self.metrics()

    def metrics(self) -> dict[str, float]:
        """Return the extender's metrics, by name with labels as in the exposition."""
        status, body = self.get_status("/metrics")
        lines = body.decode().splitlines() if status == HTTPStatus.OK else []
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def get_status(self, path: str) -> tuple[int, bytes]:
        """Send a GET to the status port; return status and body.

        Raises:
            OSError: the extender did not answer.
        """
        return _exchange(self._connection(self.status_url), "GET", path, b"")

    def memory(self) -> Memory:
        """Return the memory of the extender and all its child processes."""
        return memory_of(self.extender_pid)

    @property
    def extender_pid(self) -> int:
        """PID of the extender's main process."""
        pids = [pid for pid in tree_of(os.getpid()) if self._is_extender(pid)]
        if not pids:
            raise BenchError(f"the extender does not run: {self.extender.describe()}")
        return min(pids)

    def _is_extender(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return b"--config" in command and not {b"extender", b"bench.stepping"}.isdisjoint(command)

    def steps(self) -> dict[str, Any]:
        """Return the longest steps of the extender's loop since the last call, in CPU time."""
        path = self.extender.folder / STEPS
        path.unlink(missing_ok=True)
        os.kill(self.extender_pid, signal.SIGUSR1)
        wait_until(path.exists, "the extender wrote its steps", CONTROL_SECONDS)
        steps: dict[str, Any] = orjson.loads(path.read_bytes())
        return steps

    def _request(self, url: str, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        status, answer = _exchange(self._connection(url), method, path, body)
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            raise BenchError(f"{method} {path}: status {status}: {answer[:500]!r}")
        value: dict[str, Any] = orjson.loads(answer)
        return value

    def _connection(self, url: str) -> http.client.HTTPConnection:
        """Return this thread's connection to a server."""
        connections: dict[str, http.client.HTTPConnection]
        connections = self._local.__dict__.setdefault("connections", {})
        if url not in connections:
            parts = urlsplit(url)
            connections[url] = http.client.HTTPConnection(
                str(parts.hostname), parts.port, timeout=CONTROL_SECONDS
            )
            self.connections.callback(connections[url].close)
        return connections[url]


def _exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes
) -> tuple[int, bytes]:
    for is_last in (method != "GET", True):
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            # The server closes idle connections: open it again.
            if is_last:
                raise OSError(f"{method} {path}: {error}") from error
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def open_world(
    spec: FleetSpec,
    *,
    settings: Mapping[str, object] | None = None,
    scrape_seconds: float = 15.0,
    refresh_seconds: float = 10.0,
    is_started: bool = True,
    is_stepping: bool = False,
) -> Iterator[World]:
    """Run a simulated cluster and the extender while the context is open.

    Args:
        spec: size and composition of the cluster.
        settings: changed settings of the extender; sections are replaced, not merged.
        scrape_seconds: scrape interval of the simulated exporters.
        refresh_seconds: interval of changes of the devices' values; 0 for changes only at
            `control("refresh")`.
        is_started: whether to start the extender at once.
        is_stepping: whether to run it under `bench.stepping`, for `steps`.

    Raises:
        ProcessError: the backend did not start.
    """
    with tempfile.TemporaryDirectory(prefix="idlegpu-bench-") as name:
        folder = Path(name)
        backend_port, port = free_port(), free_port()
        backend_url = f"http://127.0.0.1:{backend_port}"
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(kubeconfig_text(backend_url))
        config = folder / "extender.yaml"
        prometheus = {"url": f"{backend_url}/prometheus", **_section(settings, "prometheus")}
        status = (settings or {}).get("status_listen") or f"127.0.0.1:{port}"
        settled = {
            "drain_seconds": 0,  # without a Service, the extender need not wait before it stops
            **(settings or {}),
            "listen": f"127.0.0.1:{port}",
            "kubeconfig": str(kubeconfig),
            "prometheus": prometheus,
        }
        config.write_text(yaml.safe_dump(settled))
        environment = {
            **{variable: "" for variable in os.environ if variable.startswith("IDLEGPU_")},
            "PYTHONPATH": str(ROOT),
        }
        backend = ServerProcess(
            name="backend",
            command=[
                *(sys.executable, "-m", "bench.backend", "--port", str(backend_port)),
                *("--nodes", str(spec.nodes), "--gpu-pods", str(spec.gpu_pods)),
                *("--other-pods", str(spec.other_pods)),
                *(() if spec.has_mig else ("--no-mig",)),
                *("--scrape-seconds", str(scrape_seconds)),
                *("--refresh-seconds", str(refresh_seconds)),
            ],
            folder=folder,
            ready_url=f"{backend_url}/control/state",
            environment=environment,
        )
        extender = ServerProcess(
            name="extender",
            command=[
                *(sys.executable, "-m"),
                *(
                    ("bench.stepping", "--out", str(folder / STEPS))
                    if is_stepping
                    else ("extender",)
                ),
                *("--config", str(config)),
            ],
            folder=folder,
            ready_url=f"http://{status}/readyz",
            environment=environment,
        )
        try:
            asyncio.run(backend.start(BACKEND_START_SECONDS))
            world = World(
                spec=spec,
                backend=backend,
                backend_url=backend_url,
                extender=extender,
                url=f"http://127.0.0.1:{port}",
                status_url=f"http://{status}",
                config=config,
                settings=settled,
            )
            if is_started:
                world.start_extender()
            with world.connections:
                yield world
        finally:
            asyncio.run(extender.stop())
            backend.kill()


def wait_until(
    condition: Callable[[], object],
    what: str,
    limit_seconds: float,
    *,
    poll_seconds: float = POLL_SECONDS,
) -> None:
    """Poll until a condition holds.

    Raises:
        BenchError: the condition did not hold in time.
    """
    deadline = time.perf_counter() + limit_seconds
    while not condition():
        if time.perf_counter() > deadline:
            raise BenchError(f"waited {limit_seconds:g} s in vain until {what}")
        time.sleep(poll_seconds)


def _section(settings: Mapping[str, object] | None, name: str) -> Mapping[str, object]:
    section = (settings or {}).get(name)
    return section if isinstance(section, Mapping) else {}


__all__ = ["BenchError", "FleetSpec", "ProcessError", "World", "open_world", "wait_until"]
