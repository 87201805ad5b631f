"""Log of requests, and assumed pods from other replicas' requests."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.nodes.inventory import PodRecord
from extender.placement.request_log import (
    _KEPT_SECONDS,
    _MAX_PATHS,
    FILTER,
    PRIORITIZE,
    SILENCE_SECONDS,
    AnsweredRequest,
    BypassVerdict,
    RequestLog,
)
from testkit.builders import GPU
from testkit.cards import IDLE
from testkit.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.add({"a": [IDLE, IDLE], "b": [IDLE, IDLE]})
    return world


def answered(
    world: World, verb: str = PRIORITIZE, *, node: str = "a", age: float = 0.0, **rest: Any
) -> AnsweredRequest:
    values: dict[str, Any] = {
        "uid": "uid-p",
        "key": "team/p",
        "choices": 5,
        "resources": ((GPU, 1),),
        **rest,
    }
    return AnsweredRequest(verb=verb, node=node, at=world.now - age, **values)


def assumed_on(world: World) -> str:
    known = world.fleet.ledger.get("uid-p")
    return known.node if known else ""


def test_pod_that_another_replica_placed_counts_there() -> None:
    world = World()

    world.request_log.take(answered(world, memory_bytes=5))

    known = world.fleet.ledger.get("uid-p")
    assert known is not None
    assert (known.node, known.resources, known.memory_bytes) == ("a", ((GPU, 1),), 5)


def test_a_resource_that_no_node_offers_counts_nowhere(world: World) -> None:
    world.fleet.snapshot()

    world.request_log.take(answered(world, resources=((GPU, 1), ("nvidia.com/mig-9g.9gb", 1))))
    world.request_log.take(answered(world, uid="other", resources=(("nvidia.com/mig-9g.9gb", 1),)))

    assert list(world.fleet.ledger.overlays(without="")) == [GPU]
    assert world.fleet.ledger.get("other") is None


def test_late_report_expires_at_the_usual_time(world: World) -> None:
    tentative_seconds = world.policy.assumed.tentative_seconds

    world.request_log.take(answered(world, age=10.0))

    known = world.fleet.ledger.get("uid-p")
    assert known is not None
    assert known.expires_at == world.now + tentative_seconds - 10.0


def test_a_record_that_arrives_too_late_counts_nowhere(world: World) -> None:
    world.request_log.take(answered(world, age=world.policy.assumed.tentative_seconds))

    assert assumed_on(world) == ""


def test_older_word_does_not_override_a_newer_one(world: World) -> None:
    world.request_log.take(answered(world, node="b", age=1.0))
    world.request_log.take(answered(world, node="a", age=5.0))

    assert assumed_on(world) == "b"
    assert world.request_log.answered_at("uid-p") == world.request_log.last_at == world.now - 1.0


def test_filter_that_looks_a_little_newer_does_not_override_prioritize(world: World) -> None:
    world.request_log.note(answered(world, PRIORITIZE, node="b", age=0.02))
    world.request_log.take(answered(world, PRIORITIZE, node="b", age=0.02))
    world.request_log.take(answered(world, FILTER, node="a", age=0.0))

    assert assumed_on(world) == "b"


@pytest.mark.parametrize("before", [5.0, 0.1])
def test_filter_of_the_next_attempt_overrides_prioritize(world: World, before: float) -> None:
    world.request_log.note(answered(world, PRIORITIZE, node="b", age=before))
    world.request_log.take(answered(world, PRIORITIZE, node="b", age=before))
    world.request_log.take(answered(world, FILTER, node="a"))

    assert assumed_on(world) == "a"
    assert world.request_log.is_elsewhere("uid-p")


def test_pod_without_a_node_counts_nowhere(world: World) -> None:
    world.request_log.take(answered(world, age=5.0))
    world.request_log.take(answered(world, node=""))

    assert assumed_on(world) == ""


def test_pod_that_nothing_was_decided_about_stays_where_it_counts(world: World) -> None:
    world.request_log.take(answered(world, age=5.0))
    world.request_log.take(answered(world, node="", resources=()))

    assert assumed_on(world) == "a"


def test_pod_that_is_bound_is_assumed_nowhere(world: World) -> None:
    world.add_pod("p", "b")

    world.request_log.take(answered(world))

    assert assumed_on(world) == ""


def test_a_pod_that_another_replica_then_refused_is_assumed_nowhere(world: World) -> None:
    waiting = PodRecord(
        uid="uid-p",
        namespace="team",
        name="p",
        resources={GPU: 1},
        is_unscheduled=True,
        message="0/2 nodes are available",
    )
    world.fleet.apply_pod(waiting)
    world.request_log.take(answered(world))

    world.fleet.apply_pod(replace(waiting, memory_bytes=1))
    assert assumed_on(world) == "a"
    world.fleet.apply_pod(replace(waiting, message="0/2 nodes are available: no volumes"))
    assert assumed_on(world) == ""


def test_nominated_pod_is_assumed_on_its_nominated_node(world: World) -> None:
    waiting = PodRecord(uid="uid-p", namespace="team", name="p", resources={GPU: 1})
    world.fleet.apply_pod(replace(waiting, nominated_node="b"))

    world.request_log.take(answered(world))

    assert assumed_on(world) == "b"


def test_only_own_requests_are_published(world: World) -> None:
    reported: list[str] = []
    world.request_log.answered.subscribe(lambda it: reported.append(it.uid))

    world.request_log.note(answered(world, uid="own"))
    world.request_log.take(answered(world, uid="others"))
    world.request_log.note(answered(world, uid=""))

    assert reported == ["own"]


def test_requests_to_other_replicas_count(world: World) -> None:
    world.request_log.take(answered(world))

    assert world.request_log.verdict("uid-p") is BypassVerdict.CALLED
    assert world.request_log.verdict("uid-q") is BypassVerdict.NOT_CALLED


def test_requests_are_forgotten_once_no_binding_can_follow(world: World) -> None:
    world.request_log.note(answered(world, uid="old"))
    world.now += _KEPT_SECONDS - 1
    world.request_log.note(answered(world, uid="new"))
    world.now += 1
    world.request_log.expire()

    assert world.request_log.verdict("old") is BypassVerdict.NOT_CALLED
    assert world.request_log.verdict("new") is not BypassVerdict.NOT_CALLED
    assert len(world.request_log) == 1
    assert world.request_log.forgotten_until == world.now - _KEPT_SECONDS


REFUSED = {"verb": FILTER, "choices": 0}
LOST = {"verb": PRIORITIZE, "is_lost": True}


@pytest.mark.parametrize("ill", [REFUSED, LOST], ids=["refused", "lost"])
def test_useless_answer_that_looks_later_reports_no_pod(world: World, ill: dict[str, Any]) -> None:
    world.request_log.take(answered(world, age=-0.3, **ill))
    world.request_log.note(answered(world, FILTER, choices=1))

    assert world.request_log.verdict("uid-p") is BypassVerdict.CALLED


@pytest.mark.parametrize(
    ("ill", "expected"),
    [
        pytest.param(REFUSED, BypassVerdict.NOT_CALLED, id="refused"),
        pytest.param(LOST, BypassVerdict.ANSWER_LOST, id="lost"),
    ],
)
def test_answers_that_were_of_no_use_accuse_whichever_replica_gave_them(
    world: World, ill: dict[str, Any], expected: BypassVerdict
) -> None:
    world.request_log.take(answered(world, age=5.0, **ill))
    world.request_log.note(answered(world, **ill))

    assert world.request_log.verdict("uid-p") is expected


def test_the_log_is_bounded_and_knows_the_start_of_its_records(world: World) -> None:
    request_log = RequestLog(
        world.fleet, clock=lambda: world.now, monotonic=lambda: world.now, max_pods=2
    )
    first_at = world.now
    for number in range(3):
        request_log.note(answered(world, uid=str(number)))
        world.now += 1

    assert len(request_log) == 2
    assert request_log.forgotten_until == first_at
    assert request_log.verdict("0") is BypassVerdict.NOT_CALLED


def test_incidents_count_until_a_long_time_without_any(world: World) -> None:
    assert world.request_log.incidents == (0, 0, 0.0)
    world.request_log.note_answer(0.5, is_lost=True)
    world.request_log.note_answer(9.0, is_lost=False)
    world.request_log.note_unreadable()
    world.request_log.note_wrong_path("/wrong")

    world.now += SILENCE_SECONDS
    world.request_log.expire()

    assert world.request_log.incidents == (1, 1, 0.5)
    assert list(world.request_log.wrong_paths) == ["/wrong"]

    world.now += 0.1
    world.request_log.expire()

    assert world.request_log.incidents == (0, 0, 0.0)
    assert not world.request_log.wrong_paths


def test_the_latest_wrong_paths_are_remembered(world: World) -> None:
    paths = [f"/{number}" for number in range(_MAX_PATHS + 1)]
    for path in [*paths, "/1"]:
        world.request_log.note_wrong_path(path)

    assert list(world.request_log.wrong_paths) == [*paths[2:], "/1"]
