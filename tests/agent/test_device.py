"""Choice of a worker's device through the command and the function, by many processes at once."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.device import choose_device, device_for_worker
from agent.device_probe import ProbePaths
from tests.agent.fake_driver import GIB, FakeDriver, card, instance, uuid
from tests.agent.workers import ROOT, WORKER, Container

NOWHERE = ProbePaths(library="libabsent.so", proc_gpus=Path("/absent"), dev=Path("/absent"))


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path)


@pytest.fixture
def container(driver: FakeDriver, tmp_path: Path) -> Iterator[Container]:
    with ExitStack() as stack:
        yield Container(driver, tmp_path, stack)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_workers_that_start_together_spread_evenly(
    container: Container, driver: FakeDriver, count: int
) -> None:
    driver.has(*(card(number) for number in range(4)))

    workers = [container.begin(worker) for worker in range(count)]
    spread = Counter(worker.answered().device for worker in workers)

    assert set(spread.values()) == {max(1, count // 4)}
    assert len(spread) == min(4, count)


def test_workers_without_a_number_spread_evenly(container: Container, driver: FakeDriver) -> None:
    driver.has(card(0), card(1), card(2))

    workers = [container.begin() for _ in range(6)]

    assert Counter(one.answered().device for one in workers) == Counter(
        {"cuda:0": 2, "cuda:1": 2, "cuda:2": 2}
    )


def test_a_crashed_worker_gets_its_device_back(container: Container, driver: FakeDriver) -> None:
    driver.has(*(card(number) for number in range(4)))
    first = [container.start(worker) for worker in range(3)]
    first[1].crash()

    newcomer = container.start(7)
    again = container.start(1)

    assert [one.device for one in first] == ["cuda:0", "cuda:1", "cuda:2"]
    assert newcomer.device == "cuda:3"
    assert again.device == "cuda:1"


def test_workers_get_their_devices_back_after_restarting_in_another_order(
    container: Container, driver: FakeDriver
) -> None:
    driver.has(*(card(number) for number in range(5)))
    before = {worker: container.start(worker) for worker in (4, 2, 9, 7)}
    for worker in before.values():
        worker.crash()
    driver.has(*(card(number, busy=90 - 20 * number) for number in range(5)))

    after = {worker: container.begin(worker) for worker in (7, 9, 4, 2)}

    assert {number: one.answered().device for number, one in after.items()} == {
        number: one.device for number, one in before.items()
    }


def test_the_command_prints_the_device_and_the_reason(
    container: Container, driver: FakeDriver
) -> None:
    driver.has(card(5, busy=90), card(6, busy=0))

    said = container.command("--worker-id", "2")

    assert said.stdout == "cuda:1\n"
    assert said.stderr == f"worker 2: cuda:1 (of 2; node-a::6, {uuid(6)}), idlest\n"
    assert said.returncode == 0


def test_the_message_counts_workers_and_sharers(container: Container, driver: FakeDriver) -> None:
    driver.has(card(0), card(1))
    for worker in (0, 1, 3):
        container.start(worker)

    said = container.command("--worker-id", "2")

    assert said.stderr == (
        f"worker 2 of 4: cuda:0 (of 2; node-a::0, {uuid(0)}), idlest, shared with 1 other\n"
    )


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        pytest.param(["--worker-id", "1"], "cuda:1", id="device"),
        pytest.param(["--worker-id", "1", "--index"], "1", id="index"),
        pytest.param(["--worker-id", "1", "--uuid"], uuid(1), id="uuid"),
        pytest.param(
            ["--worker-id", "1", "--env"], f"export CUDA_VISIBLE_DEVICES={uuid(1)}", id="env"
        ),
        pytest.param(["--worker-id", ""], "cuda:0", id="empty-number"),
        pytest.param([], "cuda:0", id="no-number"),
    ],
)
def test_the_command_prints_each_output_format(
    container: Container, driver: FakeDriver, arguments: list[str], printed: str
) -> None:
    driver.has(card(0), card(1))

    said = container.command(*arguments, "--quiet")

    assert (said.stdout, said.stderr) == (printed + "\n", "")


@pytest.mark.parametrize(
    ("form", "printed"),
    [("--index", ""), ("--uuid", ""), ("--env", "export CUDA_VISIBLE_DEVICES=''")],
)
def test_without_a_gpu_every_output_format_hides_gpus(
    container: Container, driver: FakeDriver, form: str, printed: str
) -> None:
    driver.has()

    assert container.command(form).stdout == printed + "\n"
    assert container.command().stdout == "cpu\n"
    assert container.command().stderr == "worker 0: cpu (no GPU is found)\n"


def test_workers_of_a_shell_keep_their_devices_while_the_shell_runs(
    container: Container, driver: FakeDriver
) -> None:
    driver.has(card(0), card(1))
    script = f"""
        for id in 0 1 0; do {sys.executable} -m agent.device --quiet --worker-id $id; done
        eval "$({sys.executable} -m agent.device --quiet --worker-id 1 --env)"
        echo $CUDA_VISIBLE_DEVICES
        WORKER_ID=1 {sys.executable} -c '{WORKER}' < /dev/null 2>&1
    """

    said = subprocess.run(
        ["sh", "-c", script],  # noqa: S607 - whichever shell there is
        cwd=ROOT,
        env=container.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    assert said[:4] == ["cuda:0", "cuda:1", "cuda:0", uuid(1)]
    assert said[4].startswith("worker 1 of 2: cuda:0 (of 1;")
    assert said[5] == f"cuda:0 {uuid(1)}"


def test_a_process_that_execs_the_worker_holds_the_lease(
    container: Container, driver: FakeDriver
) -> None:
    driver.has(card(0), card(1))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        held = container.command("--worker-id", "0", "--pid", str(process.pid))
        beside = container.command("--worker-id", "2")
        process.kill()
    gone = container.command("--worker-id", "0", "--pid", str(process.pid))

    assert [held.stdout, beside.stdout] == ["cuda:0\n", "cuda:1\n"]
    assert gone.returncode == 2
    assert gone.stderr == f"--pid is {process.pid}: must be the number of a running process\n"


def test_cuda_visible_devices_is_respected(container: Container, driver: FakeDriver) -> None:
    driver.has(*(card(number) for number in range(4)))

    workers = [container.start(worker, CUDA_VISIBLE_DEVICES="3,1") for worker in range(3)]

    assert [one.device for one in workers] == ["cuda:0", "cuda:1", "cuda:0"]
    assert container.command("--uuid", CUDA_VISIBLE_DEVICES="2").stdout == uuid(2) + "\n"
    assert container.command(CUDA_VISIBLE_DEVICES="-1").stdout == "cpu\n"


def test_workers_get_mig_instances_through_their_environment(
    container: Container, driver: FakeDriver
) -> None:
    driver.has(card(0), instance(7), instance(9, used=9 * GIB), instance(11))

    workers = [container.start(worker) for worker in range(3)]
    said = container.command("--worker-id", "0", "--pid", str(workers[0].process.pid))

    assert [one.device for one in workers] == ["cuda:0"] * 3
    assert sorted(one.selected for one in workers) == [uuid(n, "MIG") for n in (7, 9, 11)]
    assert f", with CUDA_VISIBLE_DEVICES={workers[0].selected}" in said.stderr


def test_a_lost_card_and_a_card_without_instances_are_not_assigned(
    container: Container, driver: FakeDriver
) -> None:
    driver.has(card(0), "lost\n", card(1), card(2), "partitioned\n")

    said = container.command("--uuid", "--worker-id", "0")

    assert said.stdout == uuid(1) + "\n"


def test_mixed_models_without_cuda_get_an_order_warning(
    container: Container, driver: FakeDriver
) -> None:
    driver.has(card(0, model="Tesla T4"), card(1, model="NVIDIA H100"))

    doubtful = container.command("--worker-id", "1")
    certain = container.command("--worker-id", "1", CUDA_DEVICE_ORDER="PCI_BUS_ID")

    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in doubtful.stderr
    assert "CUDA_DEVICE_ORDER" not in certain.stderr


def test_mixed_models_are_in_cuda_order(container: Container, driver: FakeDriver) -> None:
    driver.has(
        card(0, model="Tesla T4"), card(1, model="NVIDIA H100"), card(2, model="NVIDIA A100")
    )
    fastest_first = "".join(uuid(n).removeprefix("GPU-").replace("-", "") for n in (1, 2, 0))

    got = {
        listed: container.command("--uuid", FAKE_CUDA=fastest_first, **listed_as).stdout.strip()
        for listed, listed_as in {
            "": {},
            "2": {"CUDA_VISIBLE_DEVICES": "2"},
            "by address": {"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        }.items()
    }

    assert got == {"": uuid(1), "2": uuid(0), "by address": uuid(2)}


def test_device_for_worker_writes_one_line_and_returns_the_device(
    driver: FakeDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver.has(card(0), card(1))
    environment = {"IDLEGPU_DEVICE_FILE": str(tmp_path / "devices.json")}
    monkeypatch.setattr("agent.device.ProbePaths", lambda: NOWHERE)

    device = device_for_worker(1, environment=environment)

    assert device == "cpu"
    assert capsys.readouterr().err == "worker 1: cpu (no GPU is found)\n"
    assert device_for_worker(1, environment=environment, quiet=True) == "cpu"
    assert capsys.readouterr().err == ""


def test_without_a_writable_lease_file_the_worker_number_decides(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.has(card(0, busy=0), card(1, busy=90))
    monkeypatch.setenv("FAKE_NVML", driver.environment["FAKE_NVML"])
    probe_paths = ProbePaths(library=str(driver.library))
    unwritable = {"IDLEGPU_DEVICE_FILE": str(tmp_path / "absent" / "devices.json")}

    choice = choose_device(3, environment=unwritable, probe_paths=probe_paths)

    assert choice.device == "cuda:1"
    assert re.search(
        r"by its number; workers cannot agree \(.*absent.*\): set IDLEGPU_DEVICE_FILE$",
        choice.message,
    )


def test_agent_device_imports_only_the_standard_library(
    container: Container, driver: FakeDriver
) -> None:
    driver.has(card(0))
    script = (
        "import sys, agent.device; agent.device.choose_device(0)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )

    loaded = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{script}",
        ],
        env=container.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    ours = {"agent", "__main__"}
    assert set(loaded) - ours <= set(sys.stdlib_module_names) | {"sitecustomize"}
    assert "asyncio" not in loaded
