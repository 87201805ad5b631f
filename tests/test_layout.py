"""What the repository must look like, whoever adds to it."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST = 400


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],  # noqa: S607 - whichever git there is
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).exists()] or [
        path for pattern in patterns for path in ROOT.rglob(pattern)
    ]


@pytest.mark.parametrize("path", tracked("*.py"), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_too_long_to_read_in_one_go(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_packages_hold_no_code() -> None:
    with_code = [
        path
        for path in tracked("*/__init__.py")
        if len(path.read_text(encoding="utf-8").strip().splitlines()) > 1
    ]

    assert with_code == []


def test_lock_files_pin_every_package_by_hash_and_name_no_host() -> None:
    for name in ("requirements.txt", "requirements-dev.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "--hash=sha256:" in text
        assert "http" not in text.replace("aiohttp", "").replace("httptools", "")
