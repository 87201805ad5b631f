"""Lines of the decision log: all inputs of the decisions, in few lines."""

import json
import re

import pytest

from extender.core.policy import Policy, Strategy, Weights
from extender.insight.decision_log.lines import RecordError
from extender.insight.decision_log.reader import LoggedBinding
from testkit.builders import GPU, gpu, node, request, snapshot_of
from testkit.decision_logs import (
    LoggedWorld,
    decisions_in,
    read,
    weighed,
    written,
)
from testkit.world import BUSY, World, time_sliced

POLICY = Policy(strategy=Strategy.PACK, weights=Weights(memory=0.4))


def kinds(log: bytes) -> list[str]:
    return [json.loads(line)["kind"] for line in log.splitlines()]


def test_fleet_is_logged_once_and_then_its_changes() -> None:
    logged = LoggedWorld(World(in_steps=True))
    for index in range(20):
        logged.world.add_node(f"node-{index}", 8)
    logged.world.read()
    logged.world.fleet.snapshot_of_all()
    for number in range(5):
        chosen = logged.world.place(f"pod-{number}")
        assert chosen
        logged.bind(f"pod-{number}", chosen)

    assert kinds(logged.log) == ["settings", "fleet", *["decision", "decision", "bound"] * 5]
    _, fleet, *rest = logged.lines
    assert json.loads(fleet)["kind"] == "fleet"
    assert not any(b'"present"' in line for line in rest[:2])
    assert rest[0].count(b"node-19") <= 1  # among the best, if present


def test_reader_restores_the_inputs_of_the_decision() -> None:
    world = time_sliced(3, 2, 5)
    logged = LoggedWorld(world)
    world.place("a", request(memory_bytes=1 << 30, preferred_models=("H100",)))
    world.place("b", request(requires_idle=True))

    first, *_, second = decisions_in(logged.log)

    assert first.pod.key == "ns/a"
    assert first.request == request(memory_bytes=1 << 30, preferred_models=("H100",))
    assert first.policy == world.policy
    assert (first.overlays, list(second.overlays)) == ({}, [GPU])
    pool = world.fleet.snapshot().pools[GPU]
    read_pool = second.snapshot.pools[GPU]
    assert read_pool.nodes == pool.nodes
    assert [row.used for row in read_pool.rows] == [row.used for row in pool.rows]
    assert (read_pool.batch.telemetry.utilization == pool.batch.telemetry.utilization).all()
    assert first.node == list(world.history)[-1].decision.best


def test_the_settings_are_stated_again_when_they_change() -> None:
    snapshot = snapshot_of({"a": node(), "b": node()})

    log = written(weighed(snapshot, request(), policy=one) for one in (Policy(), Policy(), POLICY))

    assert kinds(log) == ["settings", "fleet", "decision", "decision", "settings", "decision"]
    assert [line.policy for line in decisions_in(log)] == [Policy(), Policy(), POLICY]


@pytest.mark.parametrize("requested", [("b", "a"), ("a",), ("unknown", "a"), ()])
def test_candidates_are_kept_however_many_they_are(requested: tuple[str, ...]) -> None:
    snapshot = snapshot_of({"a": node(), "b": node(), "c": node()})

    (line,) = decisions_in(
        written([weighed(snapshot, request(), policy=POLICY, candidates=requested)])
    )

    assert sorted(line.candidates) == sorted(requested)


def test_lines_of_other_logs_and_an_incomplete_last_line_are_skipped() -> None:
    log = written([weighed(snapshot_of({"a": node()}), request(), policy=POLICY)] * 2)
    *lines, last = log.splitlines(keepends=True)

    mixed = b"".join([b'{"event":"serving"}\n', b"Killed\n", *lines, last[:-20]])

    assert len(decisions_in(mixed)) == 1


def test_a_line_that_cannot_be_read_is_named() -> None:
    log = written([weighed(snapshot_of({"a": node()}), request(), policy=POLICY)])
    settings, fleet, decision = log.splitlines(keepends=True)

    with pytest.raises(RecordError, match=r"log:1: earlier lines that this decision needs"):
        read(decision)
    with pytest.raises(RecordError, match=r"log:2: version 99 of the log cannot be read: must be"):
        read(settings + fleet.replace(b'"version":1', b'"version":99'))
    with pytest.raises(RecordError, match=r"log:2: column 'used' cannot be read"):
        read(settings + fleet.replace(b'"used"', b'"usedd"'))
    with pytest.raises(RecordError, match=r"log:3: not JSON"):
        read(settings + fleet + b'{"kind": "decision", \n')


def test_older_lines_that_lack_a_column_are_read() -> None:
    log = written([weighed(snapshot_of({"a": node()}), request(), policy=POLICY)])

    older = re.sub(rb'"(is_out|others_bytes)":[^,]+,', b"", log)
    older = older.replace(b'"declared_bytes"', b'"assumed_bytes"')

    assert older != log
    assert [line.node for line in decisions_in(older)] == ["a"]


def test_in_older_lines_the_busier_of_hour_and_latest_said_idle_or_busy() -> None:
    shown = node(gpu(utilization=0.6, latest=0.1), gpu(utilization=0.2, latest=0.7))
    log = written([weighed(snapshot_of({"a": shown}), request(), policy=POLICY)])

    (older,) = decisions_in(re.sub(rb'"peak":[^]]+],', b"", log))

    assert older.snapshot.telemetry.peak.tolist() == [0.6, 0.7]


def test_a_binding_is_logged() -> None:
    logged = LoggedWorld(World())
    logged.world.add_node("node", 1)

    logged.bind("a", "node")

    assert read(logged.log) == [LoggedBinding(uid="uid-a", node="node")]


def test_new_estimates_of_single_nodes_are_read() -> None:
    world = World(in_steps=True)
    for index in range(3):
        world.add_node(f"node-{index}", 2)
    world.read()
    world.fleet.snapshot_of_all()
    logged = LoggedWorld(world)
    assert world.place("a") == "node-0"
    for card in (0, 1):
        world.card("node-0", card).values.update(BUSY)
    world.read_after(1)
    world.fleet._snapshots.note_readings(["node-0"])

    world.place("b")

    assert kinds(logged.log) == ["settings", "fleet", *["decision"] * 4]
    assert "rows" in json.loads(logged.lines[-2])
    assert decisions_in(logged.log)[-1].node == "node-1"
