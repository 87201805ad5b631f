"""Workers of one container as real processes that load a fake driver."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from testkit.agent.fake_driver import FakeDriver

ROOT = Path(__file__).parent.parent.parent

WORKER = """
import os, sys
from worker_device import device_for_worker
device = device_for_worker(os.environ.get("WORKER_ID"))
print(device, os.environ.get("CUDA_VISIBLE_DEVICES", ""), flush=True)
sys.stdin.read()
"""


@dataclass
class Worker:
    """A process that chooses its device and runs until it is stopped."""

    process: subprocess.Popen[str]
    device: str = ""
    selected: str = ""

    def answered(self) -> "Worker":
        assert self.process.stdout is not None
        self.device, _, self.selected = self.process.stdout.readline().strip().partition(" ")
        assert self.device, self.process.communicate()
        return self

    def crash(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Container:
    """Starts workers that share a driver and a lease file."""

    def __init__(self, driver: FakeDriver, directory: Path, stack: ExitStack) -> None:
        self.environment = driver.environment | {
            "IDLEGPU_DEVICE_FILE": str(directory / "devices.json"),
            "NODE_NAME": "node-a",
        }
        self._stack = stack

    def begin(self, worker: int | str | None = None, **environment: str) -> Worker:
        numbered = {} if worker is None else {"WORKER_ID": str(worker)}
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=ROOT,
            env=self.environment | numbered | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return Worker(process)

    def start(self, worker: int | str | None = None, **environment: str) -> Worker:
        return self.begin(worker, **environment).answered()

    def command(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "worker_device", *arguments],
            cwd=ROOT,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )
