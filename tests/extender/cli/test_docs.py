"""Commands in the documentation work."""

import re
from pathlib import Path

import pytest

from extender.cli.__main__ import COMMANDS
from testkit.cli_serving import runner

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")


def test_the_example_of_the_client_runs(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example, _ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    monkeypatch.setenv("IDLEGPU_URL", url)

    exec(example, {})  # noqa: S102 - our own text

    reported = capsys.readouterr().out.splitlines()
    assert reported == [
        "team/notebook has 2 GPUs on node-1 unused: no activity on 2 of 2 GPUs for at least 1 h "
        "59 min, 2.0 GiB of memory held",
        "node-2",
    ]


def test_documented_example_reports_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    example, _ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    monkeypatch.setenv("IDLEGPU_URL", "http://127.0.0.1:9")

    with pytest.raises(SystemExit, match="cannot reach"):
        exec(example, {})  # noqa: S102 - our own text


def test_every_command_is_documented() -> None:
    reported = set(re.findall(r"^idlegpu ([a-z-]+)", TEXT, re.MULTILINE))

    assert reported | {"completion"} <= set(COMMANDS)
    assert {"nodes", "gpus", "top", "best", "explain", "pending", "holders", "run"} <= reported


def test_the_commands_of_the_runbooks_exist(url: str) -> None:
    page = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"`idlegpu ([a-z]+)([^`]*)`", page))

    assert len(commands) > 4
    for name, rest in commands:
        usage = runner(url)(name, "--help").stdout
        assert name in COMMANDS
        assert all(option in usage for option in re.findall(r" (--?[a-z-]+)", rest)), rest


def test_documented_options_exist(url: str) -> None:
    shown = "".join(runner(url)(name, "--help").stdout for name in COMMANDS)

    ours = re.sub(r"^(\| `python -m |.*pip install|.*kubectl ).*$", "", TEXT, flags=re.MULTILINE)
    for option in set(re.findall(r"(--[a-z][a-z-]+)", ours)) - {"--help"}:
        assert option in shown, option
