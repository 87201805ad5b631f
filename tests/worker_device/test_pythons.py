"""`worker_device` on every supported Python that is installed, because workers use their own."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from testkit.agent.fake_driver import FakeDriver, card

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
(LEAST,) = re.findall(r"^>=3\.(\d+)$", PROJECT["requires-python"])


def interpreters() -> dict[int, str]:
    """Return the installed Pythons by minor version: in PATH, or from pyenv.

    Tests call it, and not the import: each test process imports this module.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, *map(str, sorted(pyenv.glob("3.*/bin/python")))]
    candidates += filter(None, (shutil.which(f"python3.{minor}") for minor in range(30)))
    found: dict[int, str] = {}
    for path in candidates:
        requested = subprocess.run(
            [path, "-c", "import sys; print(sys.version_info.minor)"],
            capture_output=True,
            text=True,
            check=False,
        )
        if requested.returncode == 0 and int(requested.stdout) >= int(LEAST):
            found.setdefault(int(requested.stdout), path)
    return found


def run(python: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [python, "-B", "-W", "error", *arguments],
        cwd=ROOT,
        env=kept | environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_worker_gets_and_keeps_its_device_on_every_installed_python(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path)
    driver.has(card(0), card(1))
    for minor, python in interpreters().items():
        environ = driver.environment | {"IDLEGPU_DEVICE_FILE": str(tmp_path / f"{minor}.json")}
        pid = str(os.getpid())

        first = run(python, "-m", "worker_device", "--pid", pid, **environ)
        again = run(python, "-m", "worker_device", "--pid", pid, **environ)

        assert (first.returncode, first.stdout) == (0, "cuda:0\n"), (python, first.stderr)
        assert again.stdout == "cuda:0\n", (python, again.stderr)
        assert "keeps its device" in again.stderr, python


def test_every_installed_python_reports_a_missing_gpu_and_bad_arguments() -> None:
    for python in interpreters().values():
        none = run(python, "-m", "worker_device", "--worker-id", "1", CUDA_VISIBLE_DEVICES="")
        wrong = run(python, "-m", "worker_device", "--worker-id", "one")

        assert (none.returncode, none.stdout) == (0, "cpu\n"), (python, none.stderr)
        assert wrong.returncode == 2, python
        assert "worker id is 'one'" in wrong.stderr, python


def test_every_program_compiles_on_every_installed_python() -> None:
    for python in interpreters().values():
        compiled = run(
            python,
            "-c",
            "import pathlib\n"
            "for name in ('agent', 'extender', 'worker_device'):\n"
            "    for path in pathlib.Path(name).rglob('*.py'):\n"
            "        compile(path.read_text(), str(path), 'exec')\n",
        )

        assert compiled.returncode == 0, (python, compiled.stderr)
