"""GPUs found through NVML, and without it."""

from pathlib import Path
from typing import Final

import pytest

from testkit.agent.fake_driver import GIB, FakeDriver, card, instance, uuid
from worker_device.probe import ProbePaths, find_cards
from worker_device.visible import Card, Instance, Load

DEADLINE_SECONDS: Final = 60.0
"""Longer than any call takes."""


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path)


@pytest.fixture
def paths(driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProbePaths:
    """Let this process find the fake driver's cards, and no others."""
    monkeypatch.setenv("FAKE_NVML", driver.environment["FAKE_NVML"])
    absent = tmp_path / "absent"
    return ProbePaths(library=str(driver.library), proc_gpus=absent, dev=absent)


def found(paths: ProbePaths, **environment: str) -> tuple[Card, ...]:
    result = find_cards(environment, paths=paths, deadline_seconds=DEADLINE_SECONDS)
    assert result.order_warning == ""
    return result.cards


def test_nvml_gives_identity_and_load_of_each_card(driver: FakeDriver, paths: ProbePaths) -> None:
    model = "NVIDIA " + "H" * 80
    driver.has(
        card(5, busy=55, used=20 * GIB, model=model),
        "lost\n",
        card(6, busy=55, used=20 * GIB, model=model),
        card(7, busy=150, total=0, model=model),
    )

    assert found(paths) == (
        Card(
            uuid=uuid(6),
            minor=6,
            model=model,
            load=Load(utilization_ratio=0.55, memory_used_ratio=0.25),
        ),
        Card(uuid=uuid(7), minor=7, model=model, load=Load(utilization_ratio=1.0)),
    )


def test_nvml_gives_the_instances_of_a_card_with_mig(driver: FakeDriver, paths: ProbePaths) -> None:
    numbers = (7, 9, 11, 13)
    driver.has(card(0), *(instance(number, used=GIB) for number in numbers), card(1, used=8 * GIB))

    divided, whole = found(paths)

    load = Load(utilization_ratio=None, memory_used_ratio=0.1)
    assert divided.load == Load(utilization_ratio=None, memory_used_ratio=0.0)
    assert divided.instances == tuple(
        Instance(uuid=uuid(number, "MIG"), gpu_instance_id=number, compute_instance_id=0, load=load)
        for number in numbers
    )
    assert (whole.instances, whole.load) == (
        None,
        Load(utilization_ratio=0.0, memory_used_ratio=0.1),
    )


def test_a_card_with_mig_may_have_no_instance(driver: FakeDriver, paths: ProbePaths) -> None:
    driver.has(card(0), "partitioned\n")

    assert [one.instances for one in found(paths)] == [()]


MODELS: Final = ("Tesla T4", "NVIDIA H100", "NVIDIA A100")


def mixed(driver: FakeDriver) -> None:
    """Let the driver have a card of each model, in an order that is not CUDA's."""
    driver.has(*(card(number, model=model) for number, model in enumerate(MODELS)))


def cuda_order(*numbers: int) -> str:
    return "".join(uuid(number).removeprefix("GPU-").replace("-", "") for number in numbers)


@pytest.mark.parametrize(
    ("environment", "order"),
    [
        ({}, [1, 2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [1, 2, 0]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0, 1, 2]),
    ],
    ids=["default", "not of the visible ones", "by address"],
)
def test_cards_of_several_models_are_in_the_order_of_cuda(
    driver: FakeDriver, paths: ProbePaths, environment: dict[str, str], order: list[int]
) -> None:
    mixed(driver)
    fastest_first = {**driver.environment, "FAKE_CUDA": cuda_order(1, 2, 0), **environment}

    assert [one.minor for one in found(paths, **fastest_first)] == order


def test_cards_of_one_model_stay_in_their_order(driver: FakeDriver, paths: ProbePaths) -> None:
    driver.has(card(0), card(1))

    cards = found(paths, **driver.environment, FAKE_CUDA=cuda_order(1, 0))

    assert [one.minor for one in cards] == [0, 1]


@pytest.mark.parametrize("shown", [(), (2, 1)], ids=["no answer", "a card is missing"])
def test_an_unknown_order_of_several_models_is_a_warning(
    driver: FakeDriver, paths: ProbePaths, shown: tuple[int, ...]
) -> None:
    mixed(driver)
    cuda = {"FAKE_CUDA": cuda_order(*shown)} if shown else {}

    result = find_cards(
        {**driver.environment, **cuda}, paths=paths, deadline_seconds=DEADLINE_SECONDS
    )

    assert [one.minor for one in result.cards] == [0, 1, 2]
    assert result.order_warning == (
        "the GPUs are of different models and CUDA's order is unknown: "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )


@pytest.mark.parametrize("script", ["echo started", "exit 1", None])
def test_cuda_that_cannot_be_asked_gives_no_order(
    driver: FakeDriver,
    paths: ProbePaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str | None,
) -> None:
    mixed(driver)
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    monkeypatch.setattr("worker_device.probe.sys.executable", str(python))

    result = find_cards({}, paths=paths, deadline_seconds=DEADLINE_SECONDS)

    assert [one.minor for one in result.cards] == [0, 1, 2]
    assert "CUDA's order is unknown" in result.order_warning


def test_a_library_without_the_calls_of_nvml_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / "nvidia3").touch()
    paths = ProbePaths(library="libc.so.6", proc_gpus=tmp_path / "absent", dev=tmp_path)

    assert found(paths) == (Card(uuid="", minor=3),)


def test_odd_values_of_proc_are_unknown(tmp_path: Path) -> None:
    for address, text in {
        "0000:1a:00.0": "GPU UUID: GPU-????????-????-????-????-????????????\nDevice Minor: 1\n",
        "0000:2a:00.0": f"Model: NVIDIA: H100\nGPU UUID: {uuid(2)}\nDevice Minor: N/A\n",
    }.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(text)
    paths = ProbePaths(library="libabsent.so", proc_gpus=tmp_path, dev=tmp_path / "absent")

    cards = find_cards({}, paths=paths, deadline_seconds=DEADLINE_SECONDS).cards

    assert cards == (Card(uuid="", minor=1), Card(uuid=uuid(2), model="NVIDIA: H100"))


@pytest.mark.parametrize(
    ("given", "instances"),
    [
        (f"{uuid(0)},{uuid(7, 'MIG')}", (Instance(uuid=uuid(7, "MIG")),)),
        (uuid(0), None),
        ("", None),
    ],
    ids=["an instance", "a card", "none"],
)
def test_without_nvml_instances_are_those_that_the_container_was_given(
    tmp_path: Path, given: str, instances: tuple[Instance, ...] | None
) -> None:
    paths = ProbePaths(library="libabsent.so", proc_gpus=tmp_path / "absent", dev=tmp_path)
    environment = {"NVIDIA_VISIBLE_DEVICES": given}

    assert found(paths, **environment) == ()
    (tmp_path / "nvidia0").touch()

    assert [one.instances for one in found(paths, **environment)] == [instances]


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

    result = find_cards({}, paths=probe_paths, deadline_seconds=0.3)

    assert [(one.uuid, one.minor) for one in result.cards] == [(uuid(5), 5), (uuid(6), 6)]


def test_without_nvml_and_proc_gpus_come_from_device_files(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    probe_paths = ProbePaths(library="libabsent.so", proc_gpus=tmp_path / "absent", dev=tmp_path)

    result = find_cards({}, paths=probe_paths, deadline_seconds=1)
    given = find_cards(
        {"NVIDIA_VISIBLE_DEVICES": f"{uuid(1, 'MIG')},{uuid(2, 'MIG')}::3"},
        paths=probe_paths,
        deadline_seconds=1,
    )

    assert [(one.uuid, one.minor) for one in result.cards] == [("", 2), ("", 10)]
    assert given.cards[0].instances is not None
    assert [one.uuid for one in given.cards[0].instances] == [uuid(1, "MIG"), uuid(2, "MIG")]
