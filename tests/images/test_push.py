"""Test that images are built and pushed, and that manifests take the registry in one place."""

import stat
import subprocess
from pathlib import Path

import pytest

from tests.images.dockerfile import ROOT

PUSH = ROOT / "images" / "push.sh"
RENDER = ROOT / "manifests" / "render.sh"


def run(
    script: Path, *arguments: str, programs: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with fake programs before the real ones on PATH."""
    variables = {"PATH": f"{programs}:/usr/bin:/bin", **environment}
    return subprocess.run(
        [script, *arguments], env=variables, capture_output=True, text=True, check=False
    )


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def fake(programs: Path, name: str, body: str) -> None:
    """Install a program that runs a shell script and logs its arguments."""
    file = programs / name
    file.write_text(f'#!/bin/sh\necho "{name} $*" >>"{programs}/log"\n{body}\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def logged(programs: Path) -> list[str]:
    return [
        line.replace(str(ROOT), ".")
        for line in (programs / "log").read_text().splitlines()
        if "version" not in line
    ]


def test_docker_builds_and_pushes_both_images(programs: Path) -> None:
    fake(programs, "docker", "exit 0")

    done = run(PUSH, "r.example.com/team", programs=programs, TAG="1.2.3")

    assert done.returncode == 0, done.stderr
    assert logged(programs) == [
        f"docker buildx build --platform linux/amd64,linux/arm64 --file ./images/{name}.Dockerfile "
        f"--tag r.example.com/team/idlegpu-{name}:1.2.3 --push ."
        for name in ("extender", "agent")
    ]


def test_podman_does_so_where_docker_has_no_buildx(programs: Path) -> None:
    fake(programs, "docker", "exit 1")
    fake(programs, "podman", "exit 0")

    done = run(PUSH, "r", programs=programs, TAG="1", PLATFORMS="linux/arm64")

    assert done.returncode == 0, done.stderr
    assert [line for line in logged(programs) if "agent" in line and "podman" in line] == [
        "podman manifest rm r/idlegpu-agent:1",
        "podman build --platform linux/arm64 --file ./images/agent.Dockerfile --manifest "
        "r/idlegpu-agent:1 .",
        "podman manifest push --all r/idlegpu-agent:1 docker://r/idlegpu-agent:1",
    ]


@pytest.mark.parametrize("builder", ["docker", "podman"])
def test_a_mirror_of_pypi_reaches_the_build(programs: Path, builder: str) -> None:
    fake(programs, "docker", "exit 0" if builder == "docker" else "exit 1")
    fake(programs, "podman", "exit 0")

    done = run(PUSH, "r", programs=programs, PIP_INDEX_URL="https://pypi.example.com/simple")

    assert done.returncode == 0, done.stderr
    builds = [line for line in logged(programs) if line.startswith(builder) and " --file " in line]
    assert len(builds) == 2
    assert all(" --build-arg PIP_INDEX_URL --platform " in line for line in builds)


@pytest.mark.parametrize("program", ["extender", "agent"])
def test_the_stage_that_installs_packages_takes_the_mirror(program: str) -> None:
    text = (ROOT / "images" / f"{program}.Dockerfile").read_text()
    before, _, after = text.partition("\nARG PIP_INDEX_URL\n")

    assert before.count("\nFROM ") == 1
    assert "\nRUN images/build.sh" in after


@pytest.mark.parametrize(
    ("platforms", "is_explained"), [("linux/amd64,linux/arm64", True), ("linux/amd64", False)]
)
def test_a_failure_names_what_several_platforms_need(
    programs: Path, platforms: str, *, is_explained: bool
) -> None:
    fake(programs, "docker", '[ "$2" = version ] || { echo "exec format error" >&2; exit 7; }')

    done = run(PUSH, "r", programs=programs, TAG="1", PLATFORMS=platforms)

    assert done.returncode == 7
    assert "exec format error" in done.stderr
    assert ("PLATFORMS=linux/amd64 builds for one" in done.stderr) == is_explained


def test_with_neither_archives_are_written(programs: Path) -> None:
    fake(programs, "docker", "exit 1")
    fake(programs, "podman", "exit 1")
    fake(programs, "python3", "exit 0")

    done = run(PUSH, "r.example.com/team", programs=programs)

    assert done.returncode == 0, done.stderr
    assert "neither docker buildx nor podman is here: writing OCI archives" in done.stderr
    assert logged(programs) == ["python3 ./images/archive.py r.example.com/team"]


def test_what_is_missing_is_named(programs: Path) -> None:
    for script in (PUSH, RENDER):
        no_registry = run(script, programs=programs)
        assert (no_registry.returncode, "name your registry" in no_registry.stderr) == (2, True)
    no_variant = run(RENDER, "r", "kubedm", programs=programs)
    assert no_variant.returncode == 2
    assert "kubedm is no variant: must be a folder with" in no_variant.stderr


def test_only_our_images_get_the_registry(programs: Path) -> None:
    rendered = """\
      image: idlegpu-extender:0.1.0
        image: idlegpu-agent:0.1.0
      image: registry.k8s.io/kube-scheduler:v1.37.2
    # image: idlegpu-agent:0.1.0 in words"""
    fake(programs, "kubectl", f"cat <<'EOF'\n{rendered}\nEOF")
    version = {"KUBE_VERSION": "1.36.4"}

    done = run(RENDER, "r.example.com/team", "kubeadm", programs=programs, **version)
    tagged = run(RENDER, "r", programs=programs, TAG="7", **version)

    assert done.stdout.splitlines() == [
        "      image: r.example.com/team/idlegpu-extender:0.1.0",
        "        image: r.example.com/team/idlegpu-agent:0.1.0",
        "      image: registry.k8s.io/kube-scheduler:v1.36.4",
        "    # image: idlegpu-agent:0.1.0 in words",
    ]
    assert "image: r/idlegpu-extender:7" in tagged.stdout
    assert logged(programs) == [
        "kubectl kustomize ./manifests/overlays/kubeadm",
        "kubectl kustomize ./manifests",
    ]


def test_a_registry_is_no_url(programs: Path) -> None:
    fake(programs, "docker", "exit 0")

    done = run(PUSH, "https://r.example.com/team", programs=programs)

    assert done.returncode == 2
    assert done.stderr == (
        "https://r.example.com/team: leave out https://, as in registry.example.com/team\n"
    )
