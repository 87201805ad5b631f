"""Loads of devices from the agent's report."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typing_extensions import override

from agent.report.contract import Device, Report, encode
from extender.core.devices.readings import Signal
from testkit.agent.fake_driver import GIB, FakeDriver, card, uuid
from tests.worker_device.workers import Container
from worker_device.agent_loads import REPORT_PATH, SIGNALS, AgentError, fetch_loads, parse_loads
from worker_device.visible import Load


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path)


@pytest.fixture
def container(driver: FakeDriver, tmp_path: Path) -> Iterator[Container]:
    with ExitStack() as stack:
        yield Container(driver, tmp_path, stack)


class _Agent(BaseHTTPRequestHandler):
    answer = b""
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == REPORT_PATH else 404)
        self.end_headers()
        self.wfile.write(self.answer)

    @override
    def log_message(self, *_: object) -> None:
        """Suppress the server's log."""


@pytest.fixture
def agent() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Agent) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def report() -> Report:
    """Return an agent's report in which card 0 and the first instance of card 1 are busy."""
    signals = {
        Signal.GRAPHICS_ACTIVE: (0.9, 0.8, None),
        Signal.GPU_UTILIZATION: (0.1, None, None),
        Signal.MEMORY_USED: (40.0 * GIB, 0.0, 1.0 * GIB),
        Signal.MEMORY_TOTAL: (80.0 * GIB, 10.0 * GIB, 10.0 * GIB),
    }
    return Report(
        node="node-a",
        at=0.0,
        devices=(
            Device(uuid=uuid(0)),
            Device(uuid=uuid(1), gpu_instance_id="7", mig_uuids=(uuid(7, "MIG"),)),
            Device(uuid=uuid(1), gpu_instance_id="9", mig_uuids=(uuid(9, "MIG"), "MIG-b")),
        ),
        signals={name.value: column for name, column in signals.items()},
    )


def test_loads_are_parsed_from_the_agents_report() -> None:
    loads = parse_loads(json.loads(encode(report())))

    assert {
        name: (one.utilization_ratio, one.memory_used_ratio) for name, one in loads.items()
    } == {
        uuid(0): (0.9, 0.5),
        uuid(7, "MIG"): (0.8, 0.0),
        uuid(9, "MIG"): (None, 0.1),
        "MIG-b": (None, 0.1),
    }


def test_any_signal_of_activity_shows_load_and_missing_memory_is_unknown() -> None:
    signals = {
        "graphics_active_ratio": [None, 0.1, None],
        "sm_active_ratio": [0.3, 0.2, None],
        "gpu_utilization_ratio": [None, 0.4, 0.5],
        "memory_used_bytes": [None, 5, 5],
        "memory_total_bytes": [10, 10, None],
    }

    devices = [{"uuid": name} for name in "abc"]

    loads = parse_loads({"devices": devices, "signals": signals})

    assert signals.keys() == set(SIGNALS)
    assert loads == {
        "a": Load(utilization_ratio=0.3),
        "b": Load(utilization_ratio=0.4, memory_used_ratio=0.5),
        "c": Load(utilization_ratio=0.5),
    }


@pytest.mark.parametrize(
    "report", [{"devices": {}, "signals": {}}, {"devices": [], "signals": []}], ids=repr
)
def test_a_report_of_another_form_is_refused(report: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="devices must be a list"):
        parse_loads(report)


@pytest.mark.parametrize("path", ["", "/", REPORT_PATH])
def test_the_report_is_fetched_from_its_usual_path(agent: ThreadingHTTPServer, path: str) -> None:
    _Agent.answer, _Agent.status = encode(report()), 200

    loads = fetch_loads(f"http://127.0.0.1:{agent.server_port}{path}", 60)

    assert loads[uuid(0)] == Load(utilization_ratio=0.9, memory_used_ratio=0.5)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_may_lack_brackets(host: str) -> None:
    reached = re.escape(f"http://[::1]:1{REPORT_PATH}: <urlopen error")

    with pytest.raises(AgentError, match=reached):
        fetch_loads(f"http://{host}:1", 60)


@pytest.mark.parametrize("path", ["/other", "/other/"])
def test_a_path_in_the_url_is_kept(agent: ThreadingHTTPServer, path: str) -> None:
    with pytest.raises(AgentError, match=f"{path}: HTTP Error 404"):
        fetch_loads(f"http://127.0.0.1:{agent.server_port}{path}", 60)


def test_loads_from_the_agent_decide(
    container: Container, driver: FakeDriver, agent: ThreadingHTTPServer
) -> None:
    driver.has(card(0), card(2))
    _Agent.answer, _Agent.status = encode(report()), 200
    url = f"http://127.0.0.1:{agent.server_port}"

    said = container.command("--uuid", IDLEGPU_AGENT_URL=url)

    assert said.stdout == uuid(2) + "\n"
    assert "reason: least loaded;" in said.stderr


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b"{}", 200), (b"<html>", 200), (b'{"devices": [1], "signals": {}}', 200), (b"", 503)],
)
def test_a_failing_agent_is_named_and_ignored(
    container: Container, driver: FakeDriver, agent: ThreadingHTTPServer, answer: bytes, status: int
) -> None:
    driver.has(card(0, busy=50), card(1))
    _Agent.answer, _Agent.status = answer, status
    url = f"http://127.0.0.1:{agent.server_port}{REPORT_PATH}"

    said = container.command(IDLEGPU_AGENT_URL=url)

    assert said.stdout == "cuda:1\n"
    assert f"; cannot read loads from the agent: {url}" in said.stderr
