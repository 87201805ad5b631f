"""Parser of Dockerfiles, and a build of their build stage in a folder of the test."""

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
"""Timeout of a step; an emulator takes ten times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Instruction of a Dockerfile.

    Attributes:
        word: `FROM`, `COPY` and so on.
        text: its arguments, with build arguments filled in.
    """

    word: str
    text: str


def stages(program: str) -> list[list[Step]]:
    """Return the steps of each stage of a program's Dockerfile; each begins with `FROM`."""
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
    """Return the arguments of each instruction of a kind."""
    return [step.text for step in stage if step.word == word]


def fetch_wheels(platform: Platform, folder: Path) -> Path:
    """Fetch the packages in both programs' lock files, as a build would; return the folder.

    It is done once, because reading the package index, which has every file of every release, takes
    most of a build's time.

    Raises:
        AssertionError: a locked package is not available.
    """
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--quiet"]
    for program in ("extender", "agent"):
        options += ["--requirement", str(IMAGES / f"{program}.txt")]
    _call([platform.builder, "-m", "pip", "download", "--dest", str(folder), *options], folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Files that an image adds to Python.

    Attributes:
        platform: platform that runs it.
        tree: folder that becomes `INSTALLED` in the image.
    """

    platform: Platform
    tree: Path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python as the image does: with the image's files and the standard library only."""
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
        """Return the environment variables of the image and of the caller."""
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
    """Run the steps of a program's build stage in an empty folder; return the result.

    Args:
        program: `extender` or `agent`.
        platform: target platform.
        folder: empty folder.
        wheels: folder of the packages.
        is_private: whether only the owner can read the checkout, as with umask 077.

    Raises:
        AssertionError: the Dockerfile has an unsupported step, or a step failed.
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
