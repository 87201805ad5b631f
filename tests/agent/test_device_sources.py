"""Inputs of a worker's device choice: worker ids, GPUs found, and the agent's report."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
from typing_extensions import override

from agent.device import choose_device, main, parse_worker_id
from agent.device_load import REPORT_PATH, parse_loads
from agent.device_probe import ProbePaths, find_cards
from agent.report import Device, Report, encode
from extender.core.devices.readings import Signal
from tests.agent.fake_driver import GIB, FakeDriver, card, uuid
from tests.agent.workers import Container


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path)


@pytest.fixture
def container(driver: FakeDriver, tmp_path: Path) -> Iterator[Container]:
    with ExitStack() as stack:
        yield Container(driver, tmp_path, stack)


@pytest.mark.timeout(60)  # the driver call never returns
@pytest.mark.parametrize("fault", ["hang\n", "fail 999\n"])
def test_without_nvml_gpus_come_from_proc(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    driver.has(card(0), fault)
    monkeypatch.setenv("FAKE_NVML", driver.environment["FAKE_NVML"])
    for number, address in ((6, "0000:2a:00.0"), (5, "0000:1a:00.0")):
        (tmp_path / "gpus" / address).mkdir(parents=True)
        (tmp_path / "gpus" / address / "information").write_text(
            f"Model: \t\t NVIDIA H100\nIRQ:   0\nGPU UUID: \t {uuid(number)}\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {number}\n"
        )
    probe_paths = ProbePaths(library=str(driver.library), proc_gpus=tmp_path / "gpus", dev=tmp_path)

    found = find_cards({}, paths=probe_paths, deadline_seconds=0.3)

    assert [(one.uuid, one.minor) for one in found.cards] == [(uuid(5), 5), (uuid(6), 6)]


def test_without_nvml_and_proc_gpus_come_from_device_files(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    probe_paths = ProbePaths(library="libabsent.so", proc_gpus=tmp_path / "absent", dev=tmp_path)

    found = find_cards({}, paths=probe_paths, deadline_seconds=1)
    given = find_cards(
        {"NVIDIA_VISIBLE_DEVICES": f"{uuid(1, 'MIG')},{uuid(2, 'MIG')}::3"},
        paths=probe_paths,
        deadline_seconds=1,
    )

    assert [(one.uuid, one.minor) for one in found.cards] == [("", 2), ("", 10)]
    assert given.cards[0].instances is not None
    assert [one.uuid for one in given.cards[0].instances] == [uuid(1, "MIG"), uuid(2, "MIG")]


@pytest.mark.parametrize(
    ("given", "number"),
    [
        (None, 0),
        ("", 0),
        (" ", 0),
        (0, 0),
        (7, 7),
        ("7", 7),
        (" 12\n", 12),
        ("007", 7),
        (SimpleNamespace(worker_id=3), 3),
        (SimpleNamespace(worker_id="3"), 3),
        (SimpleNamespace(worker_id=None), 0),
        (SimpleNamespace(worker_id=np.int64(3)), 3),
        (SimpleNamespace(), 0),
        (np.uint8(3), 3),
        (np.array(3), 3),
    ],
    ids=repr,
)
def test_a_worker_id_is_an_integer_or_an_object_with_one(given: object, number: int) -> None:
    assert parse_worker_id(given) == number


@pytest.mark.parametrize(
    "given",
    [
        *(-1, 2**63, 1.0, True, [], {"worker_id": 1}, b"1", Fraction(1), np.float64(1.0)),
        np.array([1, 2]),
        *("-1", "worker-3", "1.0", "٣", "²", "9" * 30),
        SimpleNamespace(worker_id="a"),
    ],
    ids=repr,
)
def test_a_bad_worker_id_is_named_with_the_allowed_values(given: object) -> None:
    value = getattr(given, "worker_id", given)

    with pytest.raises(ValueError, match=r"must be a whole number from 0 on") as caught:
        parse_worker_id(given)

    assert repr(value) in str(caught.value)


def test_a_bad_worker_id_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--worker-id", "worker-3"]) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("worker id is 'worker-3': must be")


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "soon", "nan"])
def test_a_bad_deadline_is_named(seconds: str) -> None:
    with pytest.raises(ValueError, match=f"IDLEGPU_DEVICE_DEADLINE_SECONDS={seconds}: must be"):
        choose_device(0, environment={"IDLEGPU_DEVICE_DEADLINE_SECONDS": seconds})


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


def test_loads_from_the_agent_decide(
    container: Container, driver: FakeDriver, agent: ThreadingHTTPServer
) -> None:
    driver.has(card(0), card(2))
    _Agent.answer, _Agent.status = encode(report()), 200
    url = f"http://127.0.0.1:{agent.server_port}"

    said = container.command("--uuid", IDLEGPU_AGENT_URL=url)

    assert said.stdout == uuid(2) + "\n"
    assert said.stderr.endswith("idlest\n")


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b"{}", 200), (b"<html>", 200), (b'{"devices": [1], "signals": {}}', 200), (b"", 503)],
)
def test_a_failing_agent_is_named_and_ignored(
    container: Container,
    driver: FakeDriver,
    agent: ThreadingHTTPServer,
    answer: bytes,
    status: int,
) -> None:
    driver.has(card(0, busy=50), card(1))
    _Agent.answer, _Agent.status = answer, status
    url = f"http://127.0.0.1:{agent.server_port}{REPORT_PATH}"

    said = container.command(IDLEGPU_AGENT_URL=url)

    assert said.stdout == "cuda:1\n"
    assert f"; the agent does not answer: {url}" in said.stderr
