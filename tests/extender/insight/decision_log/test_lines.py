"""Lines of the decision log: all inputs of the decisions, in few lines."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from extender.core.decision.decision import Decision
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.seen_requests import RequestKind, SeenRequests
from extender.core.nodes.snapshot import FLAGS, PER_NODE, PER_SLOT, Tenant
from extender.core.policy import Policy, Strategy, Thresholds, Weights
from extender.core.request.annotations import Target, TargetPolicy
from extender.core.request.gpu_resources import ContainerDevices
from extender.core.request.request import GpuRequest
from extender.insight.decision_log.lines import (
    _FEW,
    _LATER,
    BEST,
    TELEMETRY,
    LineWriter,
    RecordError,
    _read,
    _write,
    digest,
)
from extender.insight.decision_log.reader import LoggedBinding
from testkit.builders import GIB, GPU, NOW, busy, decide_on, gpu, node, request, snapshot_of
from testkit.decision_logs import LoggedWorld, decisions_in, read, record_of, weighed, written
from testkit.world import BUSY, SHARED, World, time_sliced

EARLIEST = Path(__file__).parents[3] / "data/decisions/earliest.jsonl"
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


FULL_REQUEST = request(
    2,
    resources=((GPU, 2), (SHARED, 1)),
    containers=((GPU, (ContainerDevices(1), ContainerDevices(1, is_passed_on=True))),),
    memory_bytes=3 << 30,
    memory_share=0.25,
    expected_bytes=5 << 30,
    requires_idle=True,
    thresholds=Thresholds(utilization=0.2, memory=0.7),
    strategy=Strategy.SPREAD,
    preferred_models=("H100", "A100"),
    required_models=("A100",),
    targets=(Target("a", (0, 1)), Target("b", is_usable=False)),
    target_policy=TargetPolicy.PREFER,
    millicores=1500,
    host_bytes=1 << 30,
    storage_bytes=1 << 20,
    nominated_node="b",
    avoided={"a": 0.5},
    own=frozenset({"strategy", "thresholds.memory"}),
)


def every_field(one: GpuRequest) -> dict[str, Any]:
    """Return the fields of a request, also those that do not count for its equality."""
    return {name: getattr(one, name) for name in GpuRequest.__slots__}


def test_every_field_of_the_request_is_kept() -> None:
    (line,) = decisions_in(
        written([weighed(snapshot_of({"a": node(), "b": node()}), FULL_REQUEST, policy=POLICY)])
    )

    assert every_field(line.request) == every_field(FULL_REQUEST)


def edited(log: bytes, kind: str, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a log whose lines of a kind are changed."""
    lines = [json.loads(line) for line in log.splitlines()]
    for line in lines:
        if line["kind"] == kind:
            edit(line)
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def test_in_older_lines_no_pod_asked_for_what_was_not_known() -> None:
    later = {"containers", "memory_share", "expected_bytes", "required_models", "targets"}
    later |= {"target_policy", "millicores", "host_bytes", "storage_bytes", "avoided"}
    log = written([weighed(snapshot_of({"a": node()}), FULL_REQUEST, policy=POLICY)])

    def shorten(line: dict[str, Any]) -> None:
        for name in later:
            del line["request"][name]

    (line,) = decisions_in(edited(log, "decision", shorten))

    usual = request()
    of_older = {name: getattr(usual, name) for name in later}
    assert every_field(line.request) == every_field(replace(FULL_REQUEST, **of_older))


def test_a_decision_is_logged_with_its_result() -> None:
    nodes = {f"n{at:02}": node(gpu(utilization=at / 100)) for at in range(BEST + 2)}
    nodes |= {"out-1": node(gpu(is_excluded=True)), "out-2": node(gpu(is_excluded=True))}
    made = weighed(snapshot_of(nodes), request(), policy=POLICY)
    record = replace(record_of(made, 7, verb="prioritize", at=NOW + 5), seconds=0.0012345678)

    lines = LineWriter().decision(replace(record, is_shadow=True), made)

    line = json.loads(lines[-1])
    result = line.pop("result")
    del line["request"], line["candidates"]
    assert line == {
        "kind": "decision",
        "version": 1,
        "number": 7,
        "at": NOW + 5,
        "verb": "prioritize",
        "mode": "shadow",
        "pod": {"uid": "uid-pod", "namespace": "ns", "name": "pod"},
        "seconds": 0.001235,
    }
    best = [made.decision.candidates[at] for at in made.decision.order[:BEST]]
    assert [name for name, _ in result["best"]] == best
    assert (result["feasible"], result["rejections"]) == (BEST + 2, {"1": 2})
    assert len(result["digest"]) == 16
    (logged,) = decisions_in(b"".join(lines))
    assert (logged.number, logged.at, logged.verb) == (7, NOW + 5, "prioritize")
    assert (logged.mode, logged.feasible, logged.node) == ("shadow", BEST + 2, best[0])
    assert logged.pod == made.pod


def test_a_decision_without_a_node_has_no_first_choice() -> None:
    snapshot = snapshot_of({"a": node(gpu(is_excluded=True))})

    (line,) = decisions_in(written([weighed(snapshot, request(), policy=POLICY)]))

    assert (line.node, line.feasible, line.mode) == ("", 0, "active")


def test_digest_depends_on_each_verdict_and_not_on_the_order() -> None:
    decision = decide_on({"a": node(), "b": node(busy())})
    names = decision.candidates
    numbered = NodeIndex(names, {GPU: names}).number(names)

    def with_first(column: str, value: float) -> Decision:
        changed = getattr(decision, column).copy()
        changed[0] = value
        return replace(decision, **{column: changed})

    digests = {
        digest(names, one) for one in (decision, with_first("codes", 3), with_first("scores", 0.5))
    }
    assert len(digests) == 3
    turned = replace(decision, codes=decision.codes[::-1], scores=decision.scores[::-1])
    assert digest(names[::-1], turned) == digest(names, decision) == digest(numbered, decision)


def test_every_row_of_the_fleet_is_kept() -> None:
    nodes = {
        "a": node(gpu(used=1, declared_bytes=GIB), busy(assumed=1), leaving=(0,), numa=(0, 1)),
        "b": node(gpu(penalty=0.5, cause=3), gpu(is_foreign=True), suspicion=0.25, zone_id=2),
        "c": node(gpu(), held=1, taken=1, free_millicores=700, model_id=1, is_agreed=False),
    }
    seen = SeenRequests(
        kinds=(RequestKind(1, millicores=500), RequestKind(2, models=("a100",))), shares=(0.7, 0.3)
    )
    snapshot = snapshot_of(nodes, models=("H100", "A100"), seen=seen)

    (line,) = decisions_in(written([weighed(snapshot, request(), policy=POLICY)]))

    was, pool = snapshot.pools[GPU], line.snapshot.pools[GPU]
    assert line.snapshot.models == ("H100", "A100")
    assert (pool.seen.kinds, pool.seen.shares) == (seen.kinds, seen.shares)
    for name in (*PER_SLOT, *PER_NODE, *FLAGS, "suspicion", "present"):
        assert getattr(pool.batch, name).tolist() == getattr(was.batch, name).tolist(), name
    for name in TELEMETRY:
        shown = getattr(pool.batch.telemetry, name).tolist()
        assert shown == getattr(was.batch.telemetry, name).tolist(), name
    assert [row.leaving is None for row in pool.rows] == [False, True, True]
    for row, before in zip(pool.rows, was.rows, strict=True):
        slots = row.slots
        unnumbered = replace(row, slots=before.slots)
        if row.leaving is not None and before.leaving is not None:
            assert row.leaving.row.slots == slots
            of_before = replace(row.leaving.row, slots=before.leaving.row.slots)
            unnumbered = replace(unnumbered, leaving=replace(row.leaving, row=of_before))
        assert unnumbered == before


def test_requests_are_not_logged_before_any_was_seen() -> None:
    log = written([weighed(snapshot_of({"a": node()}), request(), policy=POLICY)])

    fleet = json.loads(log.splitlines()[1])

    assert set(fleet["pools"][GPU]) == {"nodes", "width", "columns"}
    assert fleet["number"] == 1


def test_tentative_pods_are_kept_until_they_are_gone() -> None:
    snapshot = snapshot_of({"a": node(), "b": node()})
    one = Tenant(uid="", count=1, memory_bytes=1 << 30)
    other = Tenant(uid="", count=2, memory_bytes=None, expected_bytes=5)
    greedy = Tenant(uid="", count=1, host=HostResources(4000, 1 << 30))
    overlays: list[dict[str, tuple[Tenant, ...]] | None] = [
        {"a": (one, other), "b": (one, greedy)},
        {"a": (other,)},
        {"a": (other,)},
        None,
    ]

    log = written(
        weighed(snapshot, request(), policy=POLICY, overlay=overlay) for overlay in overlays
    )

    assert [line.overlays.get(GPU) for line in decisions_in(log)] == overlays
    changes = [json.loads(line).get("overlay") for line in log.splitlines()[2:]]
    assert [None if it is None else sorted(it[GPU]) for it in changes] == [
        ["a", "b"],
        ["a", "b"],
        None,
        ["a"],
    ]


@pytest.mark.parametrize(
    ("least", "most", "kind"),
    [
        (-128, 127, "i1"),
        (-129, 0, "i2"),
        (0, 128, "i2"),
        (-(1 << 15), (1 << 15) - 1, "i2"),
        (-(1 << 15) - 1, 0, "i4"),
        (0, 1 << 15, "i4"),
        (0, 1 << 31, "i8"),
    ],
)
def test_long_columns_are_written_in_the_smallest_type(least: int, most: int, kind: str) -> None:
    column = np.array([least, most, *range(_FEW - 1)], dtype=np.intp)

    encoded = json.loads(orjson.dumps(_write(column)))

    assert encoded["type"] == kind
    assert _read(encoded, column.shape, np.intp).tolist() == column.tolist()
    assert _write(column[:-1]) == column[:-1].tolist()
    assert _write(column[:0]) == []
    assert _write(np.zeros(100)) == 0.0


def test_the_processor_is_yielded_after_each_long_column() -> None:
    rests: list[None] = []
    writer = LineWriter(lambda: rests.append(None))

    for count in (_FEW, _FEW + 1):
        nodes = {f"n{at}": node(gpu(utilization=at / 1000)) for at in range(count)}
        made = weighed(snapshot_of(nodes), request(), policy=POLICY)
        rests.clear()
        writer.begin()
        lines = writer.decision(record_of(made), made)

        long = lines[1].count(b'"zlib"')
        assert (long > 0) == (count > _FEW)
        assert len(rests) == long + 2  # before and after the names, too


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

    others = b'{"event":"serving"}\n{"kind":"pod"}\n{"version":3}\n[]\nKilled\n{"kind\n'
    later = b'{"kind":"of a newer writer","version":1}\n'

    assert len(decisions_in(b"".join([others, later, *lines, others, last[:-20]]))) == 1


def test_a_line_that_cannot_be_read_is_named() -> None:
    log = written([weighed(snapshot_of({"a": node()}), request(), policy=POLICY)])
    settings, fleet, decision = log.splitlines(keepends=True)

    with pytest.raises(RecordError, match=r"log:1: earlier lines that this decision needs"):
        read(decision)
    for earlier in (settings, fleet):
        with pytest.raises(RecordError, match=r"log:2: earlier lines that this decision needs"):
            read(earlier + decision)
    for part, wrong, error in (
        (b'"verb"', b'"verbs"', r"KeyError\('verb'\)"),
        (b'"strategy":"auto"', b'"strategy":"best"', "ValueError"),
        (b'"resources":[["nvidia.com/gpu",1]]', b'"resources":[]', "IndexError"),
        (b'"seconds"', b'"overlay":{"nvidia.com/gpu":{"a":[[]]}},"seconds"', "TypeError"),
    ):
        assert part in decision
        with pytest.raises(RecordError, match=f"log:3: cannot be read: {error}"):
            read(settings + fleet + decision.replace(part, wrong))
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


def test_columns_that_older_lines_lack_are_those_of_a_plain_node() -> None:
    snapshot = snapshot_of({"a": node(), "b": node(gpu(), gpu())})
    log = written([weighed(snapshot, request(), policy=POLICY)])

    lines = map(json.loads, EARLIEST.read_bytes().splitlines())
    fleet = next(line for line in lines if line["kind"] == "fleet")
    renamed = {"declared_bytes", "next_hour", "peak"}

    def shorten(line: dict[str, Any]) -> None:
        columns = line["pools"][GPU]["columns"]
        for name in set(columns) - set(fleet["pools"][GPU]["columns"]) - renamed:
            del columns[name]

    (line,) = decisions_in(edited(log, "fleet", shorten))

    was, batch = snapshot.pools[GPU].batch, line.snapshot.pools[GPU].batch
    for name in _LATER:
        one, other = (
            getattr(it.telemetry if name in TELEMETRY else it, name) for it in (batch, was)
        )
        present = was.present if one.ndim > 1 else slice(None)
        assert one[present].tolist() == other[present].tolist(), name


def test_in_older_lines_the_busier_of_hour_and_latest_said_idle_or_busy() -> None:
    shown = node(gpu(utilization=0.6, latest=0.1), gpu(utilization=0.2, latest=0.7))
    log = written([weighed(snapshot_of({"a": shown}), request(), policy=POLICY)])

    (older,) = decisions_in(re.sub(rb'"peak":[^]]+],', b"", log))

    assert older.snapshot.telemetry.peak.tolist() == [0.6, 0.7]


def test_in_older_lines_mean_and_spread_of_the_hour_ordered_gpus() -> None:
    shown = node(gpu(utilization=0.3), gpu(utilization=0.2))
    log = written([weighed(snapshot_of({"a": shown}), request(), policy=POLICY)])

    (older,) = decisions_in(re.sub(rb'"next_hour":[^]]+]', b'"spread":[0.4,0.0]', log))

    assert older.snapshot.telemetry.next_hour.tolist() == pytest.approx([0.5, 0.2])


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


def test_changed_rows_are_read_into_the_pool_that_they_belong_to() -> None:
    world = World(in_steps=True)
    for index in range(3):
        world.add_node(f"whole-{index}", 2)
        world.add_node(f"shared-{index}", 1, replicas=4, resource=SHARED)
    world.read()
    world.fleet.snapshot_of_all()
    logged = LoggedWorld(world)
    world.place("a", GpuRequest(resource=SHARED, count=1))
    world.card("shared-1").values.update(BUSY)
    world.card("whole-2", 1).values.update(BUSY)
    world.read_after(1)
    world.fleet._snapshots.note_readings(["shared-1", "whole-2"])

    world.place("b", GpuRequest(resource=SHARED, count=1))

    assert kinds(logged.log).count("fleet") == 1
    snapshot, read_back = world.fleet.snapshot(), decisions_in(logged.log)[-1].snapshot
    assert set(read_back.pools) == {GPU, SHARED}
    for resource, pool in snapshot.pools.items():
        other = read_back.pools[resource]
        assert (other.nodes, other.dirty, other.estimated) == (
            pool.nodes,
            pool.dirty,
            pool.estimated,
        )
        for row, written_row in zip(pool.rows, other.rows, strict=True):
            assert replace(written_row, slots=row.slots, undeclared=row.undeclared) == row
            for column in ("utilization", "memory_used", "freshness"):
                one, another = (getattr(it.telemetry, column) for it in (snapshot, read_back))
                assert one[list(row.slots)].tolist() == another[list(written_row.slots)].tolist()
