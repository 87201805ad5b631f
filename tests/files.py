"""The files of the repository."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


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
