"""Workflow of a release, and the versions in its files."""

import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from testkit.controlplane.tools import (
    KUBERNETES_VERSION,
    OLDEST_KUBERNETES_VERSION,
    PROMETHEUS_VERSION,
    binary,
)

ROOT: Final = Path(__file__).parent.parent
WORKFLOW: Final = ROOT / ".github" / "workflows" / "release.yml"


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return found


def commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in jobs()[job]["steps"])


@pytest.mark.e2e
@pytest.mark.neighbours
def test_github_would_take_the_workflow() -> None:
    done = subprocess.run(
        [str(binary("actionlint")), "-shellcheck=", "-pyflakes=", str(WORKFLOW)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_foreign_actions_are_pinned_by_commit() -> None:
    uses = re.findall(r"uses: (\S+)", WORKFLOW.read_text())

    assert uses
    assert [one for one in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", one)] == []


def test_nothing_is_pushed_that_was_not_tested_and_audited() -> None:
    assert set(jobs()["push"]["needs"]) == {"test", "audit"}
    assert "make test" in commands("test")
    assert "pip-audit --vulnerability-service osv" in commands("audit")


def test_every_lock_file_of_what_runs_is_audited() -> None:
    locked = {"requirements.txt", *(f"images/{path.name}" for path in ROOT.glob("images/*.txt"))}

    (audited,) = re.findall(r"for file in (.*); do", commands("audit"))

    assert set(audited.split()) == locked


def test_the_docs_name_the_versions_that_ran() -> None:
    table = (ROOT / "docs" / "versions.md").read_text().partition("The oldest Kubernetes")[0]
    (image,) = {
        version
        for path in ROOT.glob("images/*.Dockerfile")
        for version in re.findall(r"/python:(\S+?)-", path.read_text())
    }
    measured = {
        version
        for path in ROOT.glob("bench/results/*.md")
        for version in re.findall(r", Python (\d\S+\d)", path.read_text())
    }

    for version in (KUBERNETES_VERSION, OLDEST_KUBERNETES_VERSION, PROMETHEUS_VERSION):
        assert f"({version})" in table
    for version in {image, *measured}:
        assert f"| {version} |" in table


def test_each_image_and_the_chart_are_signed_and_images_have_an_sbom() -> None:
    text = commands("push")
    (programs,) = re.findall(r"for program in (.*); do", text)

    assert {f"{name}.Dockerfile" for name in programs.split()} == {
        path.name for path in ROOT.glob("images/*.Dockerfile")
    }
    assert "--sbom=true --provenance=mode=max" in text
    assert text.count("cosign sign --yes") == 2


def test_the_wheel_is_signed_and_attached_to_the_release_with_its_lock_file() -> None:
    text = commands("push")

    built, _, released = text.partition("cosign sign-blob --yes --bundle dist/")
    assert "pip wheel --no-deps --wheel-dir dist ." in built
    assert "gh release create" in released
    assert "dist/* requirements.txt" in released
