"""GPUs found without NVML."""

from pathlib import Path

import pytest

from testkit.agent.fake_driver import FakeDriver, card, uuid
from worker_device.probe import ProbePaths, find_cards


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path)


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
