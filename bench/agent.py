"""Measure the node agent's cost: CPU of a pass, CPU at one pass a second, resident memory.

The agent runs as a separate process. It reads a scripted driver with changing values (with
`--real`: this machine's driver), queries a kubelet's pod-resources server, looks up processes in
`/proc`, reports to an extender, and is scraped as Prometheus would.
"""

import argparse
import os
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from agent.report.contract import UPGRADE
from bench.agent_process import CARDS, uuid_of
from bench.machine import Bound, report
from testkit.agent.fake_kubelet import FakeKubelet, container, pod
from testkit.agent.json_report import decode_report
from testkit.controlplane.process import free_port

SCRAPE_SECONDS: Final = 15.0
WARM_SECONDS: Final = 12.0
"""Slow-changing values are read every 10 s; after this time all code paths have run once."""

MOST_PASS_MS: Final = 5.0
MOST_CORE_PERCENT: Final = 0.5
MOST_MIB: Final = 100.0

_TICKS: Final = os.sysconf("SC_CLK_TCK")


@contextmanager
def running_agent(port: int, uuids: Sequence[str], *, is_real: bool) -> Iterator[int]:
    """Run the agent, its kubelet, and processes for it to look up; yield the agent's PID."""
    with tempfile.TemporaryDirectory() as folder, FakeKubelet(Path(folder) / "kubelet.sock") as it:
        it.pods = [
            pod(f"train-{number}", container("main", uuid), namespace="ml")
            for number, uuid in enumerate(uuids)
        ]
        it.allocatable = [
            {"resource_name": "nvidia.com/gpu", "device_ids": [uuid]} for uuid in uuids
        ]
        token = Path(folder) / "token"
        token.write_text("a.token.of-its-own")
        with taking_reports() as extender:
            known = [str(port), str(it.socket), extender, str(token)]
            command = ["bench.agent_process", *known, str(os.getpid()), "1"]
            with subprocess.Popen(
                [sys.executable, "-m", *(["agent"] if is_real else command)],
                stderr=subprocess.DEVNULL,
                env={**os.environ, **as_settings(*known)},
            ) as process:
                try:
                    yield process.pid
                finally:
                    process.terminate()


def as_settings(port: str, kubelet: str, extender: str, token: str) -> dict[str, str]:
    """Return the agent's environment variables."""
    return {
        "IDLEGPU_AGENT_LISTEN": f"127.0.0.1:{port}",
        "IDLEGPU_AGENT_NODE": "gpu-7",
        "IDLEGPU_AGENT_KUBELET_SOCKET": kubelet,
        "IDLEGPU_AGENT_DCGM_NAMES": "true",
        "IDLEGPU_AGENT_REPORTS__SERVICE": extender,
        "IDLEGPU_AGENT_REPORTS__TOKEN_FILE": token,
    }


def real_uuids() -> list[str]:
    """Return the UUIDs of this machine's GPUs."""
    result = subprocess.run(
        [sys.executable, "-m", "agent", "--json"], capture_output=True, timeout=120, check=False
    )
    if result.returncode:
        raise SystemExit(f"the agent sees no GPU here: {result.stdout.decode()[:1000]}")
    return [device.uuid for device in decode_report(result.stdout).devices]


class _Taker(socketserver.BaseRequestHandler):
    """Stand-in for the extender that accepts an agent's connection and reports."""

    @override
    def handle(self) -> None:
        self.request.recv(1 << 16)
        self.request.sendall(
            f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}"
            "\r\n\r\n".encode()
        )
        while self.request.recv(1 << 16):
            pass


@contextmanager
def taking_reports() -> Iterator[str]:
    """Run a stand-in for the extender while the context is open; yield its address."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Taker) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its threads have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def scrape(port: int) -> dict[str, float]:
    """Return the agent's metrics by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels
    }


def wait_for_agent(port: int) -> None:
    """Wait until the agent has completed a pass."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if scrape(port).get("idlegpu_agent_passes_total", 0) > 0:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit("the agent did not start")


def measure(port: int, pid: int, seconds: float) -> dict[str, float]:
    """Measure the agent for a time; return CPU, memory and passes."""
    before, cpu_before, started = scrape(port), cpu_seconds(pid), time.monotonic()
    most_mib, last_scrape = resident_mib(pid), started
    while time.monotonic() - started < seconds:
        time.sleep(1.0)
        most_mib = max(most_mib, resident_mib(pid))
        if time.monotonic() - last_scrape >= SCRAPE_SECONDS:
            last_scrape = time.monotonic()
            scrape(port)
    cpu, took, after = cpu_seconds(pid) - cpu_before, time.monotonic() - started, scrape(port)

    def grown(name: str) -> float:
        return after[f"idlegpu_agent_{name}_total"] - before[f"idlegpu_agent_{name}_total"]

    passes, library = grown("passes"), grown("library_seconds")
    return {
        "seconds": took,
        "passes": passes,
        "cpu_seconds": cpu,
        "library_seconds": library,
        "pass_wall_ms": grown("pass_seconds") / passes * 1000,
        "cpu_ms_per_pass": (cpu - library) / passes * 1000,
        "core_percent": cpu / took * 100,
        "most_mib": most_mib,
    }


def main() -> int:
    """Run the benchmark and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.agent", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long to watch")
    parser.add_argument("--real", action="store_true", help="over this machine's own GPUs")
    arguments = parser.parse_args()
    is_real: bool = arguments.real
    uuids = real_uuids() if is_real else [uuid_of(number) for number in range(CARDS)]
    port = free_port()
    with running_agent(port, uuids, is_real=is_real) as pid:
        wait_for_agent(port)
        time.sleep(WARM_SECONDS)
        found = measure(port, pid, arguments.seconds)
    is_met = report(
        "agent-real" if is_real else "agent",
        f"The node agent over {len(uuids)} {'real ' if is_real else ''}GPU(s), once a second",
        rows=[{"what": name, "value": value} for name, value in found.items()],
        bounds=[
            Bound(
                what="CPU of a pass, all that the agent does in its second included",
                limit=MOST_PASS_MS,
                measured=found["cpu_ms_per_pass"],
                unit="ms",
            ),
            Bound(
                what="CPU at one pass a second",
                limit=MOST_CORE_PERCENT,
                measured=found["core_percent"],
                unit="% of a core",
            ),
            Bound(what="resident memory", limit=MOST_MIB, measured=found["most_mib"], unit="MiB"),
        ],
        notes=[
            "NVML's own time is in library_seconds, and part of the agent's CPU. The bounds "
            "are for a scripted driver: see agent.md. The additional memory is "
            "libnvidia-ml's."
            if is_real
            else "The driver is scripted and uses almost no CPU; a real NVML adds its own time: "
            "see agent-real.md.",
            "The agent queries a kubelet, looks up the processes of each GPU in /proc, reports "
            "to an "
            f"extender, and is scraped every {SCRAPE_SECONDS:.0f} s with DCGM's names.",
        ],
        module="agent",
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
