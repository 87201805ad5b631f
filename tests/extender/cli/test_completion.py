"""Completion in a real bash, and the candidates that kubectl receives."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from extender.cli.__main__ import COMMANDS, complete
from extender.cli.commands.completion import command
from tests.extender.cli.terminal import at_terminal


@pytest.mark.parametrize(
    ("typed", "reported"),
    [
        pytest.param(["no"], [f"nodes\t{COMMANDS['nodes']}", ":4"], id="subcommand"),
        pytest.param(["nodes", "-o", "j"], ["json", ":4"], id="value"),
        pytest.param(["nodes", "--output=j"], ["json", ":4"], id="value-after-equals-sign"),
        pytest.param(["nodes", "--outp"], ["--output\tOutput format.", ":4"], id="option"),
        pytest.param(["gpus", ""], [":4"], id="nothing-known"),
        pytest.param(["explain", "-f", ""], [":0"], id="files"),
    ],
)
def test_kubectl_receives_the_completions_of_a_word(
    typed: list[str], reported: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    complete(typed)

    assert capsys.readouterr().out.splitlines() == reported


def test_kubectl_receives_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    complete([""])

    *lines, _ = capsys.readouterr().out.splitlines()
    assert lines == [f"{name}\t{text}" for name, text in COMMANDS.items()]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        pytest.param(["gpus", "node-"], ["node-1", "node-2", "node-3", "node-4"], id="node"),
        pytest.param(["explain", "--node", "node-3"], ["node-3"], id="node-option"),
        pytest.param(
            ["explain", "team/"],
            ["team/big", "team/fresh", "team/notebook", "team/train"],
            id="pods-that-run-or-wait",
        ),
        pytest.param(["explain", "team/big", "team/f"], ["team/fresh"], id="another-pod"),
        pytest.param(["holders", "-n", ""], ["team"], id="namespace"),
        pytest.param(["run", "-n", "te"], ["team"], id="namespace-of-a-job"),
    ],
)
def test_names_come_from_the_extender(
    typed: list[str], found: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    complete(["--url", url, *typed])

    assert capsys.readouterr().out.splitlines() == [*found, ":4"]


@pytest.mark.parametrize("typed", [["gpus", ""], ["explain", ""], ["pending", "-n", ""]])
@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "nonsense", ""])
def test_without_an_answer_there_are_no_names_and_no_message(
    typed: list[str],
    address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IDLEGPU_URL", address)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")

    complete(typed)

    captured = capsys.readouterr()
    assert captured.out.splitlines() == [":4"]
    assert captured.err == ""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_the_script_completes_in_a_real_bash(tmp_path: Path) -> None:
    script = tmp_path / "idlegpu"
    python = shlex.quote(sys.executable)
    script.write_text(f'#!/bin/sh\nexec {python} -m extender.cli "$@"\n')
    script.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "PS1": "$ ",
        "HISTFILE": "",
    }
    bash = ("/usr/bin/env", "bash", "--norc", "--noprofile", "-i")
    with at_terminal(*bash, environment=environment) as terminal:
        terminal.press('bind "set enable-bracketed-paste off"; eval "$(idlegpu completion bash)"\n')
        terminal.press("echo rea''dy\n")
        terminal.read_until("ready")
        since = len(terminal.raw)
        terminal.press("idlegpu hol\t--idle-f\t90 -o y\t")

        terminal.read_until("idlegpu holders --idle-for 90 -o yaml", since=since)


def test_the_help_has_a_command_for_each_shell_on_a_line_of_its_own() -> None:
    lines = CliRunner().invoke(command, ["--help"]).output.splitlines()

    commands = [line.strip() for line in lines if line.strip().startswith("idlegpu completion")]
    assert [line.split()[2] for line in commands] == ["bash", "zsh", "fish"]
    assert all(len(line) <= 80 and ">" in line for line in commands)
