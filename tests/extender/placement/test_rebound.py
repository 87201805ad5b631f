"""A pod that is deleted and recreated under its name, as by a StatefulSet, is another pod."""

from dataclasses import replace

import pytest

from extender.core.nodes.inventory import PodRecord
from extender.core.request.request import PodRef
from extender.core.steps import finish
from extender.placement.request_log import PRIORITIZE, AnsweredRequest
from testkit.builders import GPU, request
from testkit.cards import IDLE
from testkit.judging import BindingWorld

OLD, NEW = "uid-old", "uid-new"


@pytest.fixture
def part() -> BindingWorld:
    made = BindingWorld()
    made.world.add({"a": [IDLE], "b": [IDLE]})
    return made


def web(uid: str) -> PodRecord:
    return PodRecord(uid=uid, namespace="team", name="web-0", resources={GPU: 1})


def call(part: BindingWorld, uid: str, verb: str = "filter") -> str:
    """Call the extender for a pod; return its first choice."""
    pod = PodRef(uid=uid, namespace="team", name="web-0")
    record = part.world.placer.place(verb, pod, request(), ("a", "b"))
    part.world.request_log.note(
        AnsweredRequest(verb=verb, uid=uid, key=pod.key, at=part.world.now, choices=2)
    )
    assert record.decision.best is not None
    return record.decision.best


def bind(part: BindingWorld, uid: str, node: str) -> None:
    part.tap.apply_pod(replace(web(uid), node=node))
    part.world.now += 0.1


def delete(part: BindingWorld, uid: str) -> None:
    part.tap.remove_pod(uid, part.world.now)
    part.world.now += 0.1


def assumed(part: BindingWorld) -> dict[str, list[str]]:
    overlay = part.world.fleet.ledger.overlays(without="").get(GPU, {})
    return {node: [tenant.uid for tenant in tenants] for node, tenants in overlay.items()}


def followed(part: BindingWorld, choice: str) -> float:
    return part.world.count("idlegpu_bound_pods_total", choice=choice)


@pytest.mark.parametrize("is_bound", [False, True], ids=["while it waits", "once it is bound"])
def test_request_for_the_first_pod_does_not_cover_the_second(
    part: BindingWorld, is_bound: bool
) -> None:
    part.create(web(OLD))
    call(part, OLD)
    call(part, OLD, PRIORITIZE)
    if is_bound:
        bind(part, OLD, "a")
    delete(part, OLD)
    part.create(web(NEW))
    bind(part, NEW, "a")
    part.judge()

    assert part.counted() == 1


def test_request_for_the_second_pod_does_not_cover_the_first(part: BindingWorld) -> None:
    part.create(web(OLD))
    bind(part, OLD, "a")
    delete(part, OLD)
    part.create(web(NEW))
    call(part, NEW)
    call(part, NEW, PRIORITIZE)
    bind(part, NEW, "a")
    part.judge()

    assert part.counted() == 1


def test_request_for_the_second_pod_can_come_before_the_watch(part: BindingWorld) -> None:
    part.create(web(OLD))
    call(part, NEW)  # kube-scheduler's watch is ahead of the extender's
    call(part, NEW, PRIORITIZE)
    delete(part, OLD)
    part.create(web(NEW))
    bind(part, NEW, "b")
    part.judge()

    assert part.counted() == 0
    assert part.unjudged == 0


def test_a_complete_list_that_shows_the_second_bound_accuses_no_pod(part: BindingWorld) -> None:
    part.create(web(OLD))
    part.tap.replace_pods([replace(web(NEW), node="a")])
    part.judge()

    assert part.counted() == 0
    assert part.world.fleet.pods_on("a") == (replace(web(NEW), node="a"),)
    assert not part.world.fleet.unbound_pods


@pytest.mark.parametrize("node", ["a", "b"], ids=["the same node", "another node"])
def test_both_hold_no_devices_at_once(part: BindingWorld, node: str) -> None:
    part.create(web(OLD))
    bind(part, OLD, "a")
    delete(part, OLD)
    part.create(web(NEW))
    bind(part, NEW, node)

    assert [record.uid for name in ("a", "b") for record in part.world.fleet.pods_on(name)] == [NEW]
    assert part.world.fleet.pods_on(node)
    pool = part.world.fleet.snapshot().pools[GPU]
    assert {name: row.held for name, row in zip(pool.nodes, pool.rows, strict=True)} == {
        "a": int(node == "a"),
        "b": int(node == "b"),
    }


def test_whether_we_were_followed_is_counted_for_each(part: BindingWorld) -> None:
    part.create(web(OLD))
    first = call(part, OLD, PRIORITIZE)
    bind(part, OLD, first)
    delete(part, OLD)
    part.create(web(NEW))
    second = call(part, NEW, PRIORITIZE)
    bind(part, NEW, "b" if second == "a" else "a")

    assert (followed(part, "first"), followed(part, "other")) == (1, 1)


def test_bound_pod_is_counted_after_its_decision_was_dropped(part: BindingWorld) -> None:
    finish(part.world.history.resize_in_steps(1))
    part.create(web(NEW))
    first = call(part, NEW, PRIORITIZE)
    part.create(web(OLD))
    call(part, OLD)
    bind(part, NEW, first)

    assert part.world.history.last_of(NEW) is None
    assert (followed(part, "first"), followed(part, "other")) == (1, 0)


def test_late_request_for_the_first_pod_takes_no_room_from_the_second(part: BindingWorld) -> None:
    part.create(web(OLD))
    call(part, OLD)
    delete(part, OLD)
    call(part, OLD, PRIORITIZE)  # kube-scheduler was placing it
    part.create(web(NEW))
    node = call(part, NEW, PRIORITIZE)

    assert assumed(part) == {node: [NEW]}
    bind(part, NEW, node)
    assert assumed(part) == {}


def test_a_late_report_about_the_first_pod_counts_nowhere(part: BindingWorld) -> None:
    part.create(web(OLD))
    delete(part, OLD)
    part.world.request_log.take(
        AnsweredRequest(
            verb=PRIORITIZE,
            uid=OLD,
            key="team/web-0",
            at=part.world.now - 0.2,
            choices=2,
            node="a",
            resources=((GPU, 1),),
        )
    )

    assert assumed(part) == {}


def test_records_of_removed_pods_are_dropped_soon(part: BindingWorld) -> None:
    for number in range(1000):
        part.create(web(f"uid-{number}"))
        call(part, f"uid-{number}")
        delete(part, f"uid-{number}")
    part.world.now += part.world.policy.assumed.tentative_seconds
    part.world.fleet.snapshot()

    assert not part.world.fleet.ledger._gone
    assert len(part.world.request_log) == 0
    assert not part.bypassed_pods._waiting
    assert not part.world.history._choices
