"""The last decisions."""

from extender.core.explain import NodeVerdict
from extender.placement.history import EXPLAINABLE, DecisionHistory, DecisionRecord
from tests.builders import NOW, decide_on, node, pod_ref, request


def verdict(name: str) -> NodeVerdict:
    return NodeVerdict(
        node=name,
        resource="gpu",
        rejection="",
        score=1.0,
        landing=1,
        idle=1,
        needed=1,
        taken=0,
        chance=1.0,
        is_agreed=True,
        suspicion=0.0,
        model="",
        devices=(),
    )


def remember(history: DecisionHistory, pod: str, *, best: str = "node-a") -> DecisionRecord:
    record = DecisionRecord(
        number=history.next_number(),
        at=NOW,
        verb="filter",
        pod=pod_ref(pod),
        request=request(),
        decision=decide_on({best: node()}),
        snapshot_version=1,
        seconds=0.001,
        details=(verdict(best),),
        explain=lambda names: tuple(map(verdict, names)),
    )
    history.add(record)
    return record


def test_decisions_are_listed_newest_first() -> None:
    history = DecisionHistory(10)
    for name in "abc":
        remember(history, name)

    assert [record.pod.name for record in history] == ["c", "b", "a"]


def test_only_the_last_ones_are_remembered() -> None:
    history = DecisionHistory(2)
    for name in "abca":
        remember(history, name)

    assert [record.number for record in history] == [4, 3]
    assert len(history) == 2
    assert history.last_of("uid-b") is None
    assert history.last_of("uid-a") is next(iter(history))


def test_the_node_that_a_pod_was_bound_to_is_explained_once() -> None:
    history = DecisionHistory(10)
    record = remember(history, "a")

    assert history.note_bound("uid-a", "node-z") is record
    assert history.note_bound("uid-a", "node-y") is None

    assert record.bound_node == "node-z"
    assert [detail.node for detail in record.details] == ["node-a", "node-z"]
    assert record.explain is None


def test_a_node_that_is_explained_already_is_not_explained_again() -> None:
    history = DecisionHistory(10)
    record = remember(history, "a")

    history.note_bound("uid-a", "node-a")

    assert [detail.node for detail in record.details] == ["node-a"]


def test_a_pod_that_was_never_asked_about_is_nobody() -> None:
    assert DecisionHistory(10).note_bound("uid-a", "node-a") is None


def test_old_decisions_let_go_of_their_snapshots() -> None:
    history = DecisionHistory(1000)
    records = [remember(history, str(number)) for number in range(EXPLAINABLE + 5)]

    assert [record.explain is None for record in records] == [True] * 5 + [False] * EXPLAINABLE
    history.note_bound("uid-0", "node-z")
    assert records[0].bound_node == "node-z"
    assert [detail.node for detail in records[0].details] == ["node-a"]
