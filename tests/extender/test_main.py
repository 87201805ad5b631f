import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from extender.__main__ import main
from extender.settings.config import all_settings
from extender.settings.spec import render_table

DEADLINE_SECONDS = 30.0

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: test, user: {}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
current-context: test
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("IDLEGPU_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG, encoding="utf-8")
    return path


@contextmanager
def started(**environ: str) -> Iterator[subprocess.Popen[str]]:
    """Start the service as users do, with its output in one pipe."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("IDLEGPU_")}
    with subprocess.Popen(
        [sys.executable, "-m", "extender"],
        env={**own, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(**environ: str) -> tuple[int, str]:
    """Run the service until it ends; return exit status and output."""
    with started(**environ) as process:
        written, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, written


def wait_for_serving(process: subprocess.Popen[str]) -> str:
    """Read the output until the service serves; the test's timeout is the deadline."""
    assert process.stdout is not None
    written = ""
    for line in process.stdout:
        written += line
        if '"event":"serving"' in line:
            return written
    raise AssertionError(f"the service ended:\n{written}")


def test_good_settings_are_ok_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "prometheus: {url: 'http://me:hunter2@p:9090', headers: {Authorization: hunter2}}\n"
        "wire: {max_score: 1000}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("IDLEGPU_THRESHOLDS_MEMORY", "40")

    status = main(["--check-config", str(path)])

    out = capsys.readouterr().out
    assert status == 0
    assert out.splitlines() == [
        f"{path}: ok",
        "  listen: 127.0.0.1:8888",
        "  kubeconfig: (none: the service account of the pod)",
        "  resources: nvidia.com/gpu, nvidia.com/gpu.shared, nvidia.com/mig-*",
        "  thresholds.utilization: 30",
        "  thresholds.memory: 40",
        "  strategy: auto",
        "  prometheus.url: http://(hidden)@p:9090",
        "  prometheus.headers: (hidden)",
        "  wire.max_score: 1000",
    ]


def test_an_empty_file_is_valid_at_a_start_and_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("\n")

    assert main(["--check-config", str(path)]) == 0
    assert f"warning: {path}: is empty: write {{}}" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--check-config", "--config"])
def test_bad_settings_end_with_status_2_and_every_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("thresholds: {utilization: 130, memory: -1}", encoding="utf-8")

    status = main([option, str(path)])

    assert status == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{path}: thresholds.utilization: 130 is out of bounds: must be from 1 to 100 percent",
        f"{path}: thresholds.memory: -1 is out of bounds: must be from 1 to 100 percent",
    ]


def test_unknown_arguments_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--confg", "x"])

    assert caught.value.code == 2
    assert "usage: python -m extender" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("idlegpu")


def test_the_settings_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--settings-table"]) == 0
    assert capsys.readouterr().out == render_table(all_settings().values())


def test_a_port_in_use_ends_with_status_1_and_no_traceback(kubeconfig: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        status, written = run(IDLEGPU_LISTEN=listen, IDLEGPU_KUBECONFIG=str(kubeconfig))

    assert status == 1
    assert f"cannot serve on {listen}: " in written
    assert "IDLEGPU_LISTEN" in written
    assert "Traceback" not in written


def test_foreign_host_ends_with_status_1_without_a_traceback(kubeconfig: Path) -> None:
    listen = "192.0.2.1:0"  # an address that is reserved for documentation

    status, written = run(
        IDLEGPU_LISTEN=listen, IDLEGPU_ALLOW_PLAIN="true", IDLEGPU_KUBECONFIG=str(kubeconfig)
    )

    assert status == 1
    assert f"cannot serve on {listen}: " in written
    assert "Traceback" not in written


def test_a_missing_kubeconfig_ends_with_status_1_and_no_traceback(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")

    status, written = run(IDLEGPU_LISTEN="127.0.0.1:0", IDLEGPU_KUBECONFIG=missing)

    assert status == 1
    assert missing in written
    assert "Traceback" not in written


@pytest.mark.timeout(DEADLINE_SECONDS)
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_with_status_0(kubeconfig: Path, ending: signal.Signals) -> None:
    with started(
        IDLEGPU_LISTEN="127.0.0.1:0",
        IDLEGPU_KUBECONFIG=str(kubeconfig),
        IDLEGPU_DRAIN_SECONDS="0.5",
    ) as process:
        written = wait_for_serving(process)

        process.send_signal(ending)
        rest, _ = process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 0, written + rest
    assert "Traceback" not in written + rest


def requested(url: str, body: object = None) -> tuple[int, str, dict[str, object]]:
    """Send a request; return status, connection header, and answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Connection"], json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.headers["Connection"], json.load(refused)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hurry", [False, True], ids=["in its own time", "hurried by SIGINT"])
def test_after_sigterm_requests_are_answered_for_a_while(kubeconfig: Path, *, hurry: bool) -> None:
    with started(
        IDLEGPU_LISTEN="127.0.0.1:0",
        IDLEGPU_KUBECONFIG=str(kubeconfig),
        IDLEGPU_DRAIN_SECONDS="300" if hurry else "3",
    ) as process:
        written = wait_for_serving(process)
        url = json.loads(written.splitlines()[-1])["urls"][0]
        process.terminate()
        assert process.stdout is not None
        next(line for line in process.stdout if '"event":"draining"' in line)

        request = {"Pod": {"metadata": {"name": "late"}}, "NodeNames": ["a"]}
        status, connection, answer = requested(f"{url}/filter", request)
        assert (status, connection.lower(), answer["NodeNames"]) == (200, "close", ["a"])
        status, _, health = requested(f"{url}/readyz")
        assert (status, health["status"]) == (503, "ending")

        if hurry:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 0


def test_numpy_starts_no_threads_of_its_own() -> None:
    script = "import extender.__main__, numpy, os; print(len(os.listdir('/proc/self/task')))"
    own = {name: text for name, text in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}

    done = subprocess.run(
        [sys.executable, "-c", script], env=own, capture_output=True, text=True, check=True
    )

    assert int(done.stdout) == 1
