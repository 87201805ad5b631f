"""History of the last decisions."""

from dataclasses import replace

import numpy as np
import pytest

from extender.core.decision.evaluation import EvaluationInputs
from extender.core.decision.verdicts import gather
from extender.core.policy import Policy
from extender.core.steps import finish
from extender.fleet.columns import ReportedValues
from extender.fleet.latest_values import ReportedSignals
from extender.placement.evidence import PlacedEvidence
from extender.placement.history import (
    _EXPLAINABLE,
    _EXPLAINABLE_SECONDS,
    _MAX_CHOICES,
    Choice,
    DecisionHistory,
    DecisionRecord,
)
from testkit.builders import (
    GPU,
    NOW,
    decide_on,
    device_request,
    node,
    pod_ref,
    request,
    snapshot_of,
)

NO_SIGNALS = ReportedSignals(times=(), origins=(), names=())


def evidence(name: str) -> PlacedEvidence:
    snapshot = snapshot_of({name: node()})
    inputs = EvaluationInputs(
        request=request(), devices=device_request(), policy=Policy(), overlay={}
    )
    return PlacedEvidence(
        evidence=gather(snapshot, snapshot.pools[GPU], inputs, [name]),
        infos=(None,),
        sources=("",),
        age_seconds=np.array([np.nan]),
        at=NOW,
        shown=ReportedValues(
            signals=(),
            values=np.zeros((0, 1), dtype=np.float32),
            limit_watts=np.full(1, np.nan, dtype=np.float32),
            rest_watts=np.full(1, np.nan, dtype=np.float32),
            memory=NO_SIGNALS,
            heat=NO_SIGNALS,
            clocks=NO_SIGNALS,
        ),
        health={},
    )


def remember(
    history: DecisionHistory,
    pod: str,
    *,
    best: str = "node-a",
    at: float = NOW,
    namespace: str = "",
) -> DecisionRecord:
    ref = pod_ref(pod)
    record = DecisionRecord(
        number=history.next_number(),
        at=at,
        verb="filter",
        pod=replace(ref, namespace=namespace or ref.namespace),
        request=request(),
        decision=decide_on({best: node()}),
        snapshot_version=1,
        seconds=0.001,
        evidence=(evidence(best),),
        gather=lambda names: tuple(map(evidence, names)),
        gather_late=lambda names: tuple(replace(evidence(name), is_late=True) for name in names),
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


def test_the_nodes_of_remembered_pods_are_known() -> None:
    history = DecisionHistory(2)
    namespaces = []
    for namespace in ("one", "two", "two", "three"):
        remember(history, "a", namespace=namespace)
        namespaces.append(set(history.namespaces.names))

    assert namespaces == [{"one"}, {"one", "two"}, {"two"}, {"two", "three"}]
    finish(history.resize_in_steps(1))
    assert history.namespaces.names == {"three"}


def test_the_node_that_a_pod_was_bound_to_is_explained_once() -> None:
    history = DecisionHistory(10)
    record = remember(history, "a")

    assert history.note_bound("uid-a", "node-z") is record
    assert history.note_bound("uid-a", "node-y") is None

    assert record.bound_node == "node-z"
    assert [detail.node for detail in record.details] == ["node-a", "node-z"]
    assert record.gather is None


def test_a_node_that_is_explained_already_is_not_explained_again() -> None:
    history = DecisionHistory(10)
    record = remember(history, "a")

    history.note_bound("uid-a", "node-a")

    assert [detail.node for detail in record.details] == ["node-a"]


def test_pod_without_requests_has_no_record() -> None:
    assert DecisionHistory(10).note_bound("uid-a", "node-a") is None


def test_choice_is_returned_once_even_after_its_decision_was_dropped() -> None:
    history = DecisionHistory(1)
    first = remember(history, "a", best="node-a")
    remember(history, "b")

    assert history.note_bound("uid-a", "node-a") is None
    assert history.take_choice("uid-a") == Choice(
        number=first.number, at=NOW, verb="filter", best="node-a"
    )
    assert history.take_choice("uid-a") is None


def test_the_number_of_choices_for_unbound_pods_is_bounded() -> None:
    history = DecisionHistory(1)
    record = remember(history, "a")
    for number in range(_MAX_CHOICES + 1):
        history.add(replace(record, pod=pod_ref(f"more-{number}")))

    assert history.take_choice("uid-a") is None
    assert history.take_choice("uid-more-0") is None
    assert history.take_choice("uid-more-1") is not None


def test_old_decisions_release_their_snapshots() -> None:
    history = DecisionHistory(1000)
    records = [remember(history, str(number)) for number in range(_EXPLAINABLE + 5)]

    assert [record.gather is None for record in records] == [True] * 5 + [False] * _EXPLAINABLE
    history.note_bound("uid-0", "node-z")
    assert records[0].bound_node == "node-z"
    found = [(detail.node, detail.is_late) for detail in records[0].details]
    assert found == [("node-a", False), ("node-z", True)]


def test_decisions_release_their_snapshots_after_some_time() -> None:
    history = DecisionHistory(1000)
    old = remember(history, "a")
    remember(history, "b", at=NOW + _EXPLAINABLE_SECONDS)
    is_kept = [old.gather is not None]

    new = remember(history, "c", at=NOW + _EXPLAINABLE_SECONDS + 0.1)

    is_kept += [old.gather is not None, new.gather is not None]
    assert is_kept == [True, False, True]


@pytest.mark.parametrize(
    ("seconds", "is_late"),
    [(0.0, False), (_EXPLAINABLE_SECONDS, False), (_EXPLAINABLE_SECONDS + 0.1, True)],
)
def test_bound_node_is_explained_as_at_the_decision_unless_bound_late(
    seconds: float, *, is_late: bool
) -> None:
    history = DecisionHistory(10, clock=lambda: NOW + seconds)
    record = remember(history, "a")

    history.note_bound("uid-a", "node-z")

    assert record.bound_at == NOW + seconds
    assert [detail.is_late for detail in record.details] == [False, is_late]


@pytest.mark.parametrize("is_shadow", [False, True])
def test_answer_leaves_no_node_only_if_refused_outside_shadow_mode(*, is_shadow: bool) -> None:
    record = remember(DecisionHistory(10), "a")
    refused = replace(record, decision=decide_on({}), is_shadow=is_shadow)

    assert not replace(record, is_shadow=is_shadow).leaves_none
    assert refused.leaves_none is not is_shadow


def test_the_decision_before_is_bound_too_if_it_is_of_the_same_attempt() -> None:
    history = DecisionHistory(10)
    filtered, prioritized = remember(history, "a"), remember(history, "a")

    assert history.note_bound("uid-a", "node-z") is prioritized

    assert (filtered.bound_node, prioritized.bound_node) == ("node-z", "node-z")


def test_no_other_decision_is_bound() -> None:
    history = DecisionHistory(10)
    earlier, others, last = (remember(history, name) for name in "aba")

    history.note_bound("uid-a", "node-z")

    assert [one.bound_node for one in (earlier, others, last)] == ["", "", "node-z"]
