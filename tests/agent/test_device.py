"""`agent.device`, the former name of `worker_device`."""

import subprocess
import sys

import worker_device
from agent.device import device_for_worker
from tests.files import ROOT


def test_the_former_name_still_works() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "agent.device", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert device_for_worker is worker_device.device_for_worker
    assert said.stdout.startswith("usage: python -m worker_device")
