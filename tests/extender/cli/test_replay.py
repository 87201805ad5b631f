"""`idlegpu replay` repeats the decisions of a log, as a table, as JSON and as a plot."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from extender.cli.__main__ import idlegpu
from extender.core.devices.readings import Signal
from testkit.builders import GIB, request
from testkit.decision_logs import LoggedWorld
from testkit.world import World

EARLIEST = Path(__file__).parents[2] / "data/decisions/earliest.jsonl"
POOL = {"spread": (0.05, 0.26), "roomy": (0.29, 0.0)}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a log of three pods, two of them bound to the extender's choice."""
    world = World()
    for name in ("node-a", "node-b"):
        world.add_node(name, 8)
    for index in range(8):
        for name, (busy, memory) in zip(("node-a", "node-b"), POOL.values(), strict=True):
            world.card(name, index).values.update(values(busy, memory))
    world.read()
    logged = LoggedWorld(world)
    for number in range(3):
        chosen = world.place(f"pod-{number}", request(8))
        assert chosen is not None
        bound = chosen if number else "node-b"
        logged.lines += logged.writer.bound(f"uid-pod-{number}", bound, world.clock.now)
        world.fleet.ledger.drop(f"uid-pod-{number}")  # it ends before the next one comes
    path = tmp_path / "decisions"
    path.write_bytes(logged.log)
    return path


def values(busy: float, memory: float) -> dict[Signal, float]:
    return {
        Signal.GPU_UTILIZATION: busy,
        Signal.GRAPHICS_ACTIVE: busy,
        Signal.MEMORY_USED: memory * 80 * GIB,
        Signal.MEMORY_FREE: (1 - memory) * 80 * GIB,
    }


def run(*arguments: str) -> Result:
    return CliRunner().invoke(idlegpu, ["replay", *arguments])


def test_without_set_it_reports_that_everything_came_out_the_same(log: Path) -> None:
    shown = run(str(log))

    assert shown.exit_code == 0, shown.output
    assert "6 of 6 decisions come out exactly as they were logged" in shown.stdout
    assert "changed settings" not in shown.stdout


def test_replay_with_set_reports_differences(log: Path) -> None:
    shown = run(str(log), "--set", "weights.memory=9", "--set", "weights.utilization=0.1")

    assert shown.exit_code == 0, shown.output
    table = [line.split() for line in shown.stdout.splitlines()]
    assert ["settings", "of", "the", "log", "3", "0", "5.0%", "100%"] in table
    assert ["changed", "settings", "3", "0", "29.0%", "100%"] in table
    assert "3 of 3 pods (100%) would go elsewhere" in shown.stdout
    assert ["kube-scheduler", "3", "0", "13.0%", "100%"] in table
    assert "ACTIVITY: mean of the GPUs where the pods land" in shown.stdout
    assert "ACTIVITY FROM   ACTIVITY TO" in shown.stdout
    assert "2 of the 3 pods known to be bound are on idlegpu's first choice" in shown.stdout


def test_programs_receive_the_same(log: Path) -> None:
    shown = run(str(log), "--set", "strategy=pack", "-o", "json")

    report = json.loads(shown.stdout)
    assert (report["decisions"], report["exact"], report["pods"]) == (6, 6, 3)
    assert report["changes"] == {"strategy": "pack"}
    assert report["before"]["waits"] == report["after"]["waits"] == 0
    assert {name: len(values) for name, values in report["activities"].items()} == {
        "settings of the log": 3, "changed settings": 3, "kube-scheduler": 3,
    }  # fmt: skip


def test_a_decision_that_comes_out_otherwise_is_named(log: Path) -> None:
    log.write_bytes(log.read_bytes().replace(b'"feasible":2', b'"feasible":1', 1))

    shown = run(str(log))

    assert shown.exit_code == 1
    assert "5 of 6 decisions come out exactly as they were logged; not 1:" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        pytest.param(["--set", "freshness.fade_seconds=1"], "NAME one of strategy", id="setting"),
        pytest.param(["--set", "strategy=best"], "strategy", id="value"),
    ],
)
def test_wrong_usage_is_reported_with_allowed_values(
    log: Path, arguments: list[str], reported: str
) -> None:
    shown = run(str(log), *arguments)

    assert shown.exit_code == 2
    assert reported in shown.stderr
    assert "IDLEGPU_" not in shown.stderr


def test_a_log_that_cannot_be_read_is_reported_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    path.write_text('{"kind":"decision","version":1}\n', encoding="utf-8")

    shown = run(str(path))

    assert shown.exit_code == 2
    assert f"{path}:1: earlier lines that this decision needs are missing" in shown.stderr


@pytest.mark.parametrize("version", [b"0", b"2", b'"1"'])
def test_a_log_of_another_version_is_refused_and_nothing_of_it_is_reported(
    log: Path, version: bytes
) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    at = len(lines) // 2
    lines[at] = lines[at].replace(b'"version":1', b'"version":' + version)
    log.write_bytes(b"".join(lines))

    shown = run(str(log), "-o", "json")

    assert shown.exit_code == 2
    assert shown.stdout == ""
    reported = version.decode().replace('"', "'")
    assert (
        f"{log}:{at + 1}: version {reported} of the log cannot be read: must be 1" in shown.stderr
    )


def test_a_line_of_a_kind_that_is_not_known_yet_is_passed_over(log: Path) -> None:
    log.write_bytes(log.read_bytes() + b'{"kind":"weather","version":1,"is":"fine"}\n')

    assert "6 of 6 decisions come out exactly" in run(str(log)).stdout


def test_a_file_without_decisions_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text('{"event":"serving"}\n', encoding="utf-8")

    shown = run(str(path))

    assert shown.exit_code == 1
    assert "the log contains no decision" in shown.stdout


def test_a_log_of_the_earliest_format_is_decided_again_by_todays_order() -> None:
    shown = run(str(EARLIEST), "-o", "json")

    report = json.loads(shown.stdout)
    assert (report["pods"], report["decisions"], report["bound"]) == (7, 14, 3)
    assert report["before"]["placed"] == 7
    assert "were they made by another version of idlegpu?" in run(str(EARLIEST)).stdout
