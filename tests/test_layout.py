"""Rules for every file of the repository."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.files import ROOT, tracked

LONGEST = 600


def test_no_file_is_too_long_to_read_in_one_go() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked("*.py")
    }

    assert {path: count for path, count in lines.items() if count > LONGEST} == {}


def test_packages_hold_no_code() -> None:
    with_code = [
        path
        for path in tracked("*/__init__.py")
        if path.parent != ROOT / "worker_device"  # users import its functions from the package
        and len(path.read_text(encoding="utf-8").strip().splitlines()) > 1
    ]

    assert with_code == []


def test_lock_files_pin_every_package_by_hash_and_name_no_host() -> None:
    locked: list[set[str]] = []
    for name in ("requirements.txt", "requirements-dev.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        entries = re.split(r"^(?=[^\s#])", text, flags=re.MULTILINE)[1:]
        assert entries
        pinned = r"[\w.\[\]-]+==\S+ .*--hash=sha256:[0-9a-f]{64}"
        assert [one for one in entries if not re.match(pinned, one, flags=re.DOTALL)] == []
        assert "http" not in text.replace("aiohttp", "").replace("httptools", "")
        locked.append({one.partition("==")[0] for one in entries})

    assert locked[0] & locked[1] == set()  # two processes of pip install them at once


def test_a_wheel_marks_the_client_as_typed(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("extender", "extender/cli"):  # the rest of the checkout would take time to copy
        (tmp_path / folder).mkdir()
        for path in (ROOT / folder).glob("*"):
            if path.is_file():
                shutil.copy(path, tmp_path / folder)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"

    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)

    (wheel,) = (tmp_path / "dist").iterdir()
    assert {"extender/py.typed", "extender/cli/client.py"} <= set(ZipFile(wheel).namelist())
