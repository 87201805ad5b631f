"""Contents of the Dockerfiles and lock files."""

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Final

import grimp
import pytest

from tests.images.dockerfile import IMAGES, INSTALLED, ROOT, stages, texts

OURS: Final = ("extender", "agent")
LOCK_AGAIN: Final = "images/lock.sh writes the images' lock files again"
FOR_PEOPLE: Final = ("extender.cli",)
"""Not in the image: the command line for people."""
EXTENDER_ALONE: Final = {"aiohttp", "cryptography", "kubernetes-asyncio", "uvloop"}
AGENT_ALONE: Final = {"nvidia-ml-py", "grpclib", "protobuf", "rich"}


def versions(path: Path) -> dict[str, set[str]]:
    """Return the versions of each package in a lock file; several if they depend on Python's."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9-]+)==([^ ]+)", path.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(program: str) -> set[str]:
    """Return the packages that a program, and its part of the other program, import."""
    graph = grimp.build_graph(*OURS, "worker_device", include_external_packages=True)
    own = {m for m in graph.modules if f"{m}.".startswith(f"{program}.")}
    own -= {m for m in own if m.startswith(FOR_PEOPLE)}
    own |= {m for each in own for m in graph.find_upstream_modules(each) if m.startswith(OURS)}
    tops = {m for each in own for m in graph.find_modules_directly_imported_by(each)}
    tops -= {
        m for m in tops if m.split(".")[0] in {*OURS, "worker_device", *sys.stdlib_module_names}
    }
    packages = importlib.metadata.packages_distributions()
    # For a name that several packages share (google), the directly required one.
    return {normalized(packages[top][0]) for top in tops}


@pytest.mark.parametrize("program", OURS)
def test_an_image_starts_from_a_python_that_cannot_change(program: str) -> None:
    build, final = stages(program)
    python = re.match(
        r"docker\.io/library/python:(3\.\d+)\.\d+-slim-bookworm@sha256:[0-9a-f]{64}",
        texts(final, "FROM")[0],
    )

    assert texts(build, "FROM")[0].removesuffix(" AS build") == texts(final, "FROM")[0]
    assert python is not None
    assert stages("agent")[1][0] == stages("extender")[1][0]
    # The tests run with the shipped versions.
    assert f"python-version {python[1]} " in (IMAGES / "lock.sh").read_text()


@pytest.mark.parametrize("program", OURS)
def test_image_runs_without_root_with_the_built_packages(program: str) -> None:
    _, final = stages(program)

    assert texts(final, "USER") == ["65532:65532"]
    assert texts(final, "COPY") == [f"--from=build {INSTALLED} {INSTALLED}"]
    assert texts(final, "RUN") == []
    assert texts(final, "ENTRYPOINT") == [f'["python", "-m", "{program}"]']


@pytest.mark.parametrize("program", OURS)
def test_an_image_holds_the_packages_that_its_program_imports(program: str) -> None:
    lines = (IMAGES / f"{program}.in").read_text().splitlines()
    named = {line for line in lines if not line.startswith("#")}

    assert named == imported(program), f"name them in images/{program}.in; {LOCK_AGAIN}"


@pytest.mark.parametrize("program", OURS)
def test_an_image_holds_the_versions_that_the_tests_run_with(program: str) -> None:
    locked = versions(IMAGES / f"{program}.txt")
    tested = versions(ROOT / "requirements.txt")

    assert locked == {name: tested.get(name) for name in locked}, LOCK_AGAIN
    text = (IMAGES / f"{program}.txt").read_text()
    assert text.count("--hash=sha256:") >= len(locked) > 20
    assert "://" not in text


def test_packages_of_one_program_are_only_in_its_image() -> None:
    extender, agent = (set(versions(IMAGES / f"{program}.txt")) for program in OURS)

    assert extender >= EXTENDER_ALONE
    assert agent >= AGENT_ALONE
    assert not extender & AGENT_ALONE
    assert not agent & EXTENDER_ALONE
