"""Choice of a worker's device through the command and the function, by many processes at once."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from testkit.agent.fake_driver import GIB, FakeDriver, card, instance, uuid
from tests.worker_device.workers import ROOT, WORKER, Container
from worker_device.__main__ import main
from worker_device.choice import Choice, choose_device, device_for_worker, parse_worker_id
from worker_device.leases import holder_of, parse_leases
from worker_device.probe import ProbePaths

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
    assert said.stderr == (
        f"Worker 2 assigned to GPU device: cuda:1 (node-a::6, {uuid(6)}); reason: least loaded; "
        "devices: 2; running workers: 1; other workers on this device: 0\n"
    )
    assert said.returncode == 0


def test_the_message_counts_workers_and_sharers(container: Container, driver: FakeDriver) -> None:
    driver.has(card(0), card(1))
    for worker in (0, 1, 3):
        container.start(worker)

    said = container.command("--worker-id", "2")

    assert said.stderr == (
        f"Worker 2 assigned to GPU device: cuda:0 (node-a::0, {uuid(0)}); reason: least loaded; "
        "devices: 2; running workers: 4; other workers on this device: 1\n"
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
    assert container.command().stderr == "Worker 0 assigned to CPU; reason: no GPU found\n"


def test_workers_of_a_shell_keep_their_devices_while_the_shell_runs(
    container: Container, driver: FakeDriver
) -> None:
    driver.has(card(0), card(1))
    script = f"""
        for id in 0 1 0; do {sys.executable} -m worker_device --quiet --worker-id $id; done
        eval "$({sys.executable} -m worker_device --quiet --worker-id 1 --env)"
        echo $CUDA_VISIBLE_DEVICES
        WORKER_ID=1 {sys.executable} -c '{WORKER}' < /dev/null 2>&1
    """

    said = subprocess.run(
        ["sh", "-c", script],  # noqa: S607 - any POSIX shell
        cwd=ROOT,
        env=container.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    assert said[:4] == ["cuda:0", "cuda:1", "cuda:0", uuid(1)]
    assert said[4].startswith("Worker 1 assigned to GPU device: cuda:0 (")
    assert "; devices: 1; running workers: 2; " in said[4]
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
    assert gone.stderr == f"--pid is {process.pid}: must be the pid of a running process\n"


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
    assert f"; CUDA_VISIBLE_DEVICES={workers[0].selected}" in said.stderr


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
    monkeypatch.setattr("worker_device.choice.ProbePaths", lambda: NOWHERE)

    device = device_for_worker(1, environment=environment)

    assert device == "cpu"
    assert capsys.readouterr().err == "Worker 1 assigned to CPU; reason: no GPU found\n"
    assert device_for_worker(1, environment=environment, quiet=True) == "cpu"
    assert capsys.readouterr().err == ""


@pytest.fixture
def own_driver(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Let this process find the fake driver's cards."""
    monkeypatch.setenv("FAKE_NVML", driver.environment["FAKE_NVML"])
    found = ProbePaths(library=str(driver.library))
    monkeypatch.setattr("worker_device.choice.ProbePaths", lambda: found)
    return driver


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process use a lease file of its own, and none of its variables for GPUs."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "IDLEGPU_AGENT_URL"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "devices.json"
    monkeypatch.setenv("IDLEGPU_DEVICE_FILE", str(path))
    return path


def holders(path: Path) -> list[int]:
    return [one.holder.pid for one in parse_leases(path.read_bytes())]


def test_a_choice_contains_all_that_a_caller_needs(own_driver: FakeDriver, leases: Path) -> None:
    own_driver.has(card(5), card(6))

    choice = choose_device(1, environment={"IDLEGPU_DEVICE_FILE": str(leases), "NODE_NAME": "n"})

    assert (choice.device, choice.index, choice.uuid) == ("cuda:1", 1, uuid(6))
    assert (choice.selector, choice.needs_selector) == (uuid(6), False)
    assert holders(leases) == [os.getpid()]


def test_without_a_gpu_the_choice_is_the_cpu() -> None:
    choice = choose_device(1, environment={}, probe_paths=NOWHERE)

    assert choice == Choice(
        device="cpu",
        index=None,
        uuid="",
        selector="",
        needs_selector=False,
        message="Worker 1 assigned to CPU; reason: no GPU found",
    )


@pytest.mark.parametrize(
    ("names", "node"),
    [
        ({"IDLEGPU_NODE": "a", "NODE_NAME": "b"}, "a"),
        ({"IDLEGPU_NODE": "", "NODE_NAME": "b"}, "b"),
        ({}, socket.gethostname()),
    ],
    ids=["of idlegpu", "of the pod", "host"],
)
def test_a_device_without_a_known_identity_is_named_by_its_node(
    tmp_path: Path, leases: Path, names: dict[str, str], node: str
) -> None:
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text("Model: NVIDIA H100\n")
    paths = ProbePaths(library="libabsent.so", proc_gpus=tmp_path / "gpus", dev=tmp_path)

    choice = choose_device(
        0, environment={"IDLEGPU_DEVICE_FILE": str(leases), **names}, probe_paths=paths
    )

    assert (choice.uuid, choice.selector) == ("", "0")
    assert choice.message == (
        f"Worker 0 assigned to GPU device: cuda:0 ({node}); reason: by worker number; "
        "devices: 1; running workers: 1; other workers on this device: 0"
    )


def test_a_function_call_selects_an_instance_in_its_own_environment_only(
    own_driver: FakeDriver, leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_driver.has(card(0), instance(7), instance(9))
    given = {"IDLEGPU_DEVICE_FILE": str(leases)}

    assert device_for_worker(1, environment=given) == "cuda:0"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{uuid(7, 'MIG')},{uuid(9, 'MIG')}")
    assert device_for_worker(1) == "cuda:0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == uuid(9, "MIG")


@pytest.mark.usefixtures("leases")
def test_a_function_call_leaves_the_environment_of_whole_cards(own_driver: FakeDriver) -> None:
    own_driver.has(card(0), card(1))

    assert device_for_worker(1) == "cuda:1"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(("count", "is_asked"), [(1, False), (2, True)])
def test_the_agent_is_asked_only_where_there_is_a_choice(
    own_driver: FakeDriver, leases: Path, count: int, is_asked: bool
) -> None:
    own_driver.has(*(card(number) for number in range(count)))

    choice = choose_device(
        0, environment={"IDLEGPU_DEVICE_FILE": str(leases), "IDLEGPU_AGENT_URL": " file://x "}
    )

    note = "cannot read loads from the agent: file://x: must start with http:// or https://"
    assert choice.message.endswith(note) is is_asked


def test_the_lease_file_is_in_the_container_or_in_memory_that_containers_share(
    own_driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_driver.has(card(0), card(1))
    folders = [tmp_path / "tmp", tmp_path / "shm"]
    monkeypatch.setattr("worker_device.choice._TEMPORARY", folders[0])
    monkeypatch.setattr("worker_device.choice._SHARED_MEMORY", folders[1])
    namespace = holder_of(os.getpid()).namespace

    without = choose_device(0, environment={})
    folders[1].mkdir()
    second = choose_device(0, environment={})
    folders[0].mkdir()
    first = choose_device(0, environment={})

    assert without.message.count("No such file or directory") == 2
    assert "no lease file" not in second.message + first.message
    assert holders(folders[1] / f"{namespace}-idlegpu-devices.json") == [os.getpid()]
    assert holders(folders[0] / "idlegpu-devices.json") == [os.getpid()]


@pytest.mark.parametrize("seconds", ["0.5", " 60 ", ""])
def test_a_deadline_of_up_to_a_minute_is_accepted(seconds: str) -> None:
    environment = {"IDLEGPU_DEVICE_DEADLINE_SECONDS": seconds}

    assert choose_device(0, environment=environment, probe_paths=NOWHERE).device == "cpu"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ([], "cuda:0"),
        (["--index"], "0"),
        (["--uuid"], uuid(0)),
        (["--env"], f"export CUDA_VISIBLE_DEVICES={uuid(0)}"),
    ],
    ids=["device", "index", "uuid", "env"],
)
def test_the_command_leases_a_device_for_its_caller(
    own_driver: FakeDriver,
    leases: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    printed: str,
) -> None:
    own_driver.has(card(0), card(1))

    assert main(arguments) == 0

    said = capsys.readouterr()
    assert said.out == printed + "\n"
    assert said.err.startswith("Worker 0 assigned to GPU device: cuda:0 (")
    assert holders(leases) == [os.getppid()]


def test_the_command_leases_a_device_for_a_named_process(
    own_driver: FakeDriver, leases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_driver.has(card(0), card(1))

    assert main(["--quiet", "--worker-id", "1", "--pid", str(os.getpid())]) == 0
    assert main(["--pid", str(1 << 30)]) == 2

    said = capsys.readouterr()
    assert said.out == "cuda:1\n"
    assert said.err == f"--pid is {1 << 30}: must be the pid of a running process\n"
    assert holders(leases) == [os.getpid()]


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
        r"reason: by worker number; .*; no lease file \(.*absent.*\): set IDLEGPU_DEVICE_FILE",
        choice.message,
    )


def test_a_copy_of_the_package_alone_runs_with_the_standard_library_only(
    container: Container, driver: FakeDriver, tmp_path: Path
) -> None:
    driver.has(card(0))
    shutil.copytree(ROOT / "worker_device", tmp_path / "copy" / "worker_device")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'copy')!r})\n"
        "import worker_device; worker_device.choose_device(0)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )

    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        env=container.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    ours = {"worker_device", "__main__"}
    assert set(loaded) - ours <= set(sys.stdlib_module_names) | {"sitecustomize"}
    assert "asyncio" not in loaded


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

    with pytest.raises(ValueError, match=r"must be an integer of at least 0") as caught:
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
