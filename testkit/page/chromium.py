"""Browser of the page's tests: Debian's `chromium` or another Chromium.

`python -m testkit.page.chromium` prepares it. It is searched in `IDLEGPU_CHROMIUM`, PATH and the
cache, in this order; otherwise it is installed with apt-get if that is allowed, or unpacked from
Debian's packages into the cache, with the libraries that it needs.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
INSTALL_SECONDS: Final = 900
VERSION_SECONDS: Final = 60


class NoChromiumError(RuntimeError):
    """Error if no browser was found or prepared; the message has the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chromium:
    """Installed browser.

    Attributes:
        path: path of the program.
        environment: environment variables for it.
    """

    path: str
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@cache
def chromium() -> Chromium:
    """Return a working browser; prepare one if needed.

    Raises:
        NoChromiumError: no browser was found or prepared.
    """
    folder = _cache_folder()
    found = _installed() or _unpacked(folder)
    if found is None:
        if shutil.which("apt-get") is None:
            raise NoChromiumError(
                "the page's tests need Chromium: install it, or set IDLEGPU_CHROMIUM to its path"
            )
        found = _install() if os.geteuid() == 0 else _unpack(folder)
    _check(found)
    return found


def _cache_folder() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("IDLEGPU_CACHE") or home / "idlegpu") / "tools" / "chromium"


def _installed() -> Chromium | None:
    named = os.environ.get("IDLEGPU_CHROMIUM")
    path = named or next(filter(None, map(shutil.which, NAMES)), None)
    return Chromium(path=path) if path else None


def _unpacked(folder: Path) -> Chromium | None:
    """Return the browser in the cache, with its own libraries before the system's."""
    program = folder / "usr/lib/chromium/chromium"
    if not (folder / "complete").exists() or not program.exists():
        return None
    libraries = [
        str(path)
        for path in (folder / "usr/lib/chromium", *folder.glob("usr/lib/*-linux-gnu*"))
        if path.is_dir()
    ]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(
            ":"
        ),
        "FONTCONFIG_PATH": str(folder / "etc/fonts"),
        "FONTCONFIG_SYSROOT": str(folder),
    }
    return Chromium(path=str(program), environment=environment)


def _install() -> Chromium:
    _run(["apt-get", "update", "-qq"])
    names = ("chromium", "fonts-dejavu-core")
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names])
    found = _installed()
    if found is None:
        raise NoChromiumError("apt-get installed chromium, and it is not on PATH")
    return found


def _unpack(folder: Path) -> Chromium:
    """Unpack Debian's packages without installing them, which needs no rights."""
    packages = folder / "packages"
    shutil.rmtree(folder, ignore_errors=True)
    packages.mkdir(parents=True)
    needed = _needed("chromium", "chromium-common", "fonts-dejavu-core", "fontconfig-config")
    _run(["apt-get", "download", *needed], packages)
    for package in sorted(packages.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(folder)])
    shutil.rmtree(packages)
    (folder / "complete").touch()
    found = _unpacked(folder)
    if found is None:
        raise NoChromiumError(
            f"the package chromium has no usr/lib/chromium/chromium: see {folder}"
        )
    return found


def _needed(*packages: str) -> list[str]:
    """Return these packages and their dependencies that the system lacks."""
    planned = _run(
        ["apt-get", "install", "--simulate", "--no-install-recommends", *packages, *_UNLOCKED]
    )
    lines = [line.split() for line in planned.splitlines()]
    return sorted({words[1] for words in lines if words[:1] == ["Inst"]} | set(packages))


_UNLOCKED: Final = ("-o", "Debug::NoLocking=1")


def _check(found: Chromium) -> None:
    """Check that the browser starts; an error names a missing library."""
    try:
        done = subprocess.run(
            [found.path, "--version"],
            env=dict(found.environment),
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            check=False,
        )
    except OSError as error:
        raise NoChromiumError(f"{found.path} does not start: {error}") from error
    if done.returncode:
        raise NoChromiumError(f"{found.path} does not start: {done.stderr.strip()[-500:]}")


def _run(command: list[str], folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise NoChromiumError(f"{' '.join(command[:3])} failed: {error.stderr[-500:]}") from error
    return done.stdout


if __name__ == "__main__":
    sys.stdout.write(f"chromium: {chromium().path}\n")
