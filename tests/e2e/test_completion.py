"""kubectl's completion of `kubectl idlegpu`, by the real kubectl; it needs no cluster."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from extender.cli.__main__ import COMMANDS
from testkit.controlplane.tools import binary

pytestmark = pytest.mark.e2e

FUNCTIONS = {"kubectl-idlegpu": "main", "kubectl_complete-idlegpu": "complete"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a PATH with the console scripts as pip installs them."""
    for name, function in FUNCTIONS.items():
        script = tmp_path / name
        code = shlex.quote(f"from extender.cli.__main__ import {function}; {function}()")
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {code} "$@"\n')
        script.chmod(0o755)
    return os.pathsep.join([str(tmp_path), os.environ["PATH"]])


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        pytest.param(["hol"], [f"holders\t{COMMANDS['holders']}", ":4"], id="subcommand"),
        pytest.param(["nodes", "-o", "w"], ["wide", ":4"], id="value"),
        pytest.param(["explain", "-f", ""], [":0"], id="files"),
    ],
)
def test_kubectl_completes_our_subcommands(
    path: str, typed: list[str], completions: list[str]
) -> None:
    done = subprocess.run(
        [binary("kubectl"), "__complete", "idlegpu", *typed],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout.splitlines() == completions
