import asyncio
import ctypes
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from testkit.agent.fake_driver import GIB, FakeDriver, card
from testkit.agent.json_report import decode_report

COMMAND = (sys.executable, "-m", "agent")
TIMEOUT = 60


def has_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


without_driver = pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")


def run(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environ},
    )


@without_driver
def test_once_without_a_driver_prints_the_problem_and_exits_with_3() -> None:
    result = run("--once", IDLEGPU_AGENT_NODE="gpu-7")

    assert result.returncode == 3
    assert "gpu-7, no driver" in result.stdout
    assert "NVIDIA driver library (libnvidia-ml.so.1) is missing" in result.stdout
    assert "install the driver" in result.stdout
    assert result.stderr == ""


def test_once_prints_every_gpu_and_whether_it_is_idle(tmp_path: Path) -> None:
    result = run("--once", **two_cards(tmp_path), IDLEGPU_AGENT_NODE="gpu-7")

    assert result.returncode == 0, result.stderr
    assert "gpu-7, driver 580.95.05" in result.stdout
    idle, busy = (line for line in result.stdout.splitlines() if "H100" in line)
    assert " idle: busy 0%" in idle
    assert " not idle: busy 90%" in busy


def test_json_prints_the_report(tmp_path: Path) -> None:
    result = run("--json", **two_cards(tmp_path))

    report = decode_report(result.stdout.encode())
    assert result.returncode == 0
    assert [device.model for device in report.devices] == ["NVIDIA H100", "NVIDIA H100"]
    verdicts = [device.verdict for device in report.devices]
    assert [verdict and verdict.is_idle for verdict in verdicts] == [True, False]
    assert report.sequence == 2


@pytest.mark.parametrize(
    ("folder", "problem"), [(".", "cannot call the kubelet"), ("none", "the kubelet is not called")]
)
def test_the_kubelet_is_called_once_where_its_directory_is(
    tmp_path: Path, folder: str, problem: str
) -> None:
    socket = {"IDLEGPU_AGENT_KUBELET_SOCKET": str(tmp_path / folder / "kubelet.sock")}

    report = decode_report(run("--json", **two_cards(tmp_path), **socket).stdout.encode())

    assert report.tenants_problem is not None
    assert report.tenants_problem.text.startswith(problem)


def test_watch_refreshes_the_table_until_interrupted(tmp_path: Path) -> None:
    quick = {"IDLEGPU_AGENT_PERIOD_SECONDS": "0.25", "COLUMNS": "200", "TERM": "xterm"}
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "--watch"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, **two_cards(tmp_path), **quick},
    ) as process:
        shown = b""
        deadline = time.monotonic() + TIMEOUT
        while shown.count(b"580.95.05") < 3 and time.monotonic() < deadline:
            if select.select([master], [], [], 1.0)[0]:
                shown += os.read(master, 1 << 16)
        process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[
                0
            ]:  # drain its output, so that it does not block
                os.read(master, 1 << 16)
        process.kill()
    os.close(master)
    os.close(slave)

    assert shown.count(b"580.95.05") >= 3
    assert process.returncode == 0


def two_cards(folder: Path) -> dict[str, str]:
    """Return the environment in which a program finds an idle card and a busy one."""
    driver = FakeDriver(folder)
    driver.has(card(0), card(1, busy=90, used=60 * GIB))
    names = ("FAKE_NVML", "LD_LIBRARY_PATH")
    return {name: driver.environment[name] for name in names}


@without_driver
def test_the_json_report_contains_the_problem() -> None:
    result = run("--json")

    report = decode_report(result.stdout.encode())
    assert result.returncode == 3
    assert report.problem is not None
    assert report.problem.code == "LibraryNotFound"
    assert report.devices == ()


def test_invalid_settings_exit_with_2_and_name_the_setting() -> None:
    result = run("--once", IDLEGPU_AGENT_PERIOD_SECONDS="0")

    assert result.returncode == 2
    assert "IDLEGPU_AGENT_PERIOD_SECONDS: 0 is out of bounds" in result.stderr


def test_check_config_prints_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("period_seconds: 2\n")

    result = run("--check-config", str(file))

    assert result.returncode == 0
    assert f"{file}: ok" in result.stdout
    assert "  period_seconds: 2\n" in result.stdout


def test_check_config_fails_for_invalid_settings(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("period_seconds: soon\n")

    result = run("--check-config", str(file))

    assert result.returncode == 2
    assert "period_seconds: 'soon' is not allowed: must be a number" in result.stderr


def test_the_settings_table_has_a_row_for_each_setting() -> None:
    result = run("--settings-table")

    assert result.returncode == 0
    assert "| `period_seconds` | seconds | `1` | 0.25 to 60 |" in result.stdout


def test_an_address_in_use_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run(IDLEGPU_AGENT_LISTEN=address)

    assert result.returncode == 1
    assert f"cannot serve on {address}" in result.stderr
    assert "IDLEGPU_AGENT_LISTEN" in result.stderr


def count_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@without_driver
async def test_agent_serves_without_a_driver_until_sigterm() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {
        **os.environ,
        "IDLEGPU_AGENT_LISTEN": f"127.0.0.1:{port}",
        "IDLEGPU_AGENT_KUBELET_SOCKET": "",
    }
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--dcgm-names", env=environ, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TIMEOUT), aiohttp.ClientSession() as http:
            text = ""
            while "LibraryNotFound" not in text:
                await asyncio.sleep(0.1)
                try:
                    async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
                        text = await answer.text()
                except aiohttp.ClientConnectionError:
                    continue
        threads = count_threads(process.pid)
        process.send_signal(signal.SIGTERM)
        _, result = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()

    assert process.returncode == 0
    assert threads <= 3, "the loop's, NVML's, and perhaps the one for events; none of numpy's"
    assert b"cannot start NVML" in result
    assert b"shutting down" in result


def test_settings_libraries_are_not_loaded_while_serving() -> None:
    """They take 11 MiB of the agent's limit of 100 MiB; aiohttp would take 12 MiB."""
    code = (
        "import sys, agent.__main__, agent.app, agent.gpu.nvml; from extender.runtime import logs;"
        "print(sorted({'aiohttp', 'pydantic', 'yaml', 'rich', 'multiprocessing', 'grpc'}"
        " & {name.partition('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )

    assert result.stdout.strip() == "[]"
