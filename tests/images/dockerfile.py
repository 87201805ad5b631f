"""Reads a Dockerfile, and does what its build stage does in a folder of the test's own."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from testkit.internet import internet_environment
from tests.images.platforms import Platform

ROOT: Final = Path(__file__).parents[2]
IMAGES: Final = ROOT / "images"
INSTALLED: Final = "/opt/idlegpu"
BUILD_TIMEOUT_SECONDS: Final = 600
RUN_TIMEOUT_SECONDS: Final = 120
"""An emulator takes ten times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction of a Dockerfile.

    Attributes:
        word: `FROM`, `COPY` and so on.
        text: what stands behind it, arguments filled in.
    """

    word: str
    text: str


def stages(program: str) -> list[list[Step]]:
    """Return the steps of each stage of a program's Dockerfile; each begins with its `FROM`."""
    values: dict[str, str] = {}
    found: list[list[Step]] = []
    for line in (IMAGES / f"{program}.Dockerfile").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        word, _, text = line.partition(" ")
        if word == "ARG":
            name, _, value = text.partition("=")
            values[name] = value
            continue
        for name, value in values.items():
            text = text.replace(f"${{{name}}}", value)
        if word == "FROM":
            found.append([])
        found[-1].append(Step(word=word, text=text))
    return found


def texts(stage: list[Step], word: str) -> list[str]:
    """Return what stands behind each instruction of a kind."""
    return [step.text for step in stage if step.word == word]


def fetch_wheels(platform: Platform, folder: Path) -> Path:
    """Fetch what the lock files of both programs name, as a build would; return the folder.

    A build takes most of its time to read the package index, which names every file of every
    release: so that is done once.

    Raises:
        AssertionError: a package is not there as it is locked.
    """
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--quiet"]
    for program in ("extender", "agent"):
        options += ["--requirement", str(IMAGES / f"{program}.txt")]
    _call([platform.builder, "-m", "pip", "download", "--dest", str(folder), *options], folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What an image adds to Python.

    Attributes:
        platform: what runs it.
        tree: the folder that the image has as `INSTALLED`.
    """

    platform: Platform
    tree: Path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python as the image does: our tree and Python's own modules, and nothing else."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(**variables),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_TIMEOUT_SECONDS,
        )

    def command(self, *arguments: str) -> list[str]:
        """Return the command of a Python without the packages of the tests (`-S`)."""
        return [self.platform.python, "-S", *arguments]

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the variables that the image sets, and the caller's."""
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.tree),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **variables,
        }


def build(
    program: str, platform: Platform, folder: Path, wheels: Path, *, is_private: bool = False
) -> Image:
    """Run the steps of a program's build stage in a clean folder; return what they make.

    Args:
        program: `extender` or `agent`.
        platform: what it is built for.
        folder: an empty one.
        wheels: where the packages are.
        is_private: whether the checkout is its owner's alone, as with umask 077.

    Raises:
        AssertionError: the Dockerfile has a step that this cannot do, or a step failed.
    """
    source, made = folder / "src", folder / "made"
    source.mkdir(parents=True)
    for step in stages(program)[0]:
        if step.word == "COPY":
            _copy(step.text, source)
            if is_private:
                _call(["chmod", "-R", "go=", str(source)], folder)
        elif step.word == "RUN":
            _call(
                step.text.replace(INSTALLED, str(made)).split(),
                source,
                PYTHON=platform.builder,
                INSTALLED=INSTALLED,
                PIP_NO_INDEX="1",
                PIP_FIND_LINKS=str(wheels),
            )
        else:
            assert step.word in {"FROM", "WORKDIR"}, f"unknown step: {step}"
    return Image(platform=platform, tree=made)


def _copy(text: str, folder: Path) -> None:
    *names, target = text.split()
    for name in names:
        into = folder / target if not target.endswith("/") else folder / target / Path(name).name
        into.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, into, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, into)


def _call(words: list[str], folder: Path, **variables: str) -> None:
    result = subprocess.run(
        words,
        cwd=folder,
        env={**internet_environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}"
