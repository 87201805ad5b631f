"""Classification of bound pods as bound without a call."""

from typing import Any

import pytest

from extender.core.nodes.inventory import PodPhase
from extender.placement.bypassed_pods import (
    _MAX_SCHEDULERS,
    _BoundPods,
    _BypassEvidence,
    _CauseKind,
    likely_causes,
)
from extender.placement.request_log import (
    PRIORITIZE,
    SILENCE_SECONDS,
    Answers,
    BypassVerdict,
    _judge,
)
from extender.settings.service import BypassSettings
from testkit.judging import DEFAULT, BindingWorld


@pytest.fixture
def part() -> BindingWorld:
    return BindingWorld()


def test_pod_without_requests_is_counted(part: BindingWorld) -> None:
    part.create(part.pod())
    part.bind(part.pod())
    part.judge()

    assert part.counted() == 1


def test_bypassed_pod_is_counted_once_despite_changes(part: BindingWorld) -> None:
    part.create(part.pod())
    part.bind(part.pod())
    part.bind(part.pod(phase=PodPhase.RUNNING))
    part.judge()
    part.judge()

    assert part.counted() == 1


def test_bypassed_pod_is_not_counted_before_replicas_could_report(part: BindingWorld) -> None:
    part.create(part.pod())
    part.bind(part.pod())
    part.bypassed_pods.sweep()
    part.call()
    part.judge()

    assert part.counted() == 0


def test_series_of_a_scheduler_starts_at_zero(part: BindingWorld) -> None:
    part.create(part.pod())
    part.call()
    part.bind(part.pod())
    part.judge()

    labels = {"scheduler": DEFAULT, "reason": "not-called"}
    registry = part.world.metrics.registry
    assert registry.get_sample_value("idlegpu_pods_bypassed_total", labels) == 0.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(BypassSettings(), {DEFAULT}, id="all-schedulers"),
        pytest.param(BypassSettings(schedulers=("a", "b")), {"a", "b"}, id="named-schedulers"),
        pytest.param(BypassSettings(enabled=False), set(), id="switched-off"),
    ],
)
def test_series_of_expected_schedulers_are_there_before_the_first_pod(
    settings: BypassSettings, expected: set[str]
) -> None:
    (family,) = BindingWorld(settings).world.metrics.bypassed.collect()

    assert {sample.labels["scheduler"] for sample in family.samples} == expected
    assert {sample.value for sample in family.samples} <= {0.0}


def test_callers_are_known_by_their_pods(part: BindingWorld) -> None:
    own, other = part.pod("own", scheduler_name="idlegpu-scheduler"), part.pod("other")
    for pod in (own, other):
        part.create(pod)
        part.bind(pod)
    part.call("own")
    assert part.bypassed_pods.report().schedulers == ()

    part.judge()

    assert part.bypassed_pods.report().schedulers == ("idlegpu-scheduler",)


def test_settings_name_the_schedulers_that_call() -> None:
    part = BindingWorld(BypassSettings(schedulers=("b", "a")))

    assert part.bypassed_pods.report().schedulers == ("b", "a")


def test_request_before_the_watch_shows_the_pod_counts(part: BindingWorld) -> None:
    part.call()
    part.create(part.pod())
    part.bind(part.pod())
    part.judge()

    assert part.counted() == 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"resources": {}, "has_claims": True}, id="only-claims"),
        pytest.param({"phase": PodPhase.FAILED}, id="ended-before-it-was-bound"),
    ],
)
def test_pods_without_gpus_are_not_counted(part: BindingWorld, changes: dict[str, Any]) -> None:
    part.create(part.pod(**changes))
    part.bind(part.pod(**changes))
    part.judge()

    assert part.counted() == 0
    assert part.bypassed_pods.report().pods == ()


def test_pod_that_we_never_saw_waiting_is_not_accused(part: BindingWorld) -> None:
    part.bind(part.pod())
    part.judge()

    assert part.counted() == 0


def test_pods_that_were_there_before_us_are_not_accused(part: BindingWorld) -> None:
    part.tap.replace_pods([part.pod()])
    part.bind(part.pod())
    part.judge()

    assert part.counted() == 0


def test_pod_that_is_bound_when_all_are_listed_again_is_judged(part: BindingWorld) -> None:
    part.create(part.pod())
    part.create(part.pod("gone"))
    part.call("gone")
    part.tap.replace_pods([part.pod(node="a")])
    part.judge()

    assert part.counted() == 1
    assert len(part.world.request_log) == 0


def test_pod_that_is_deleted_before_its_binding_leaves_nothing_behind(part: BindingWorld) -> None:
    part.call()
    part.create(part.pod())
    part.tap.remove_pod("uid-p", part.world.now)
    part.judge()

    assert part.counted() == 0
    assert len(part.world.request_log) == 0


def test_pod_deleted_soon_after_binding_is_judged(part: BindingWorld) -> None:
    part.create(part.pod())
    part.bind(part.pod())
    part.tap.remove_pod("uid-p", part.world.now)
    part.judge()

    assert part.counted() == 1


def test_judged_pod_leaves_the_request_log(part: BindingWorld) -> None:
    part.create(part.pod())
    part.call()
    part.bind(part.pod())
    part.judge()

    assert len(part.world.request_log) == 0


def test_only_named_schedulers_are_judged() -> None:
    part = BindingWorld(BypassSettings(schedulers=("gpu",)))
    for name, scheduler in (("a", DEFAULT), ("b", "gpu")):
        part.create(part.pod(name, scheduler_name=scheduler))
        part.bind(part.pod(name, scheduler_name=scheduler))
    part.judge()

    assert (part.counted(), part.counted(scheduler="gpu")) == (0, 1)


def test_switched_off_it_counts_nothing() -> None:
    part = BindingWorld(BypassSettings(enabled=False))
    part.create(part.pod())
    part.bind(part.pod())
    part.judge()

    assert part.counted() == 0


def test_invented_scheduler_names_make_no_series_without_end(part: BindingWorld) -> None:
    for number in range(_MAX_SCHEDULERS + 3):
        record = part.pod(str(number), scheduler_name=f"s{number}")
        part.create(record)
        part.bind(record)
    part.judge()

    assert part.counted(scheduler="other") == 4  # one is reserved for the default scheduler
    assert part.counted(scheduler="s0") == 1


def test_pod_bound_after_a_refusal_without_a_new_request_is_counted(part: BindingWorld) -> None:
    part.create(part.pod())
    part.call(choices=0)
    part.bind(part.pod())
    part.judge()

    assert part.counted() == 1
    cause = likely_causes(part.bypassed_pods.report())[0]
    assert cause.kind is _CauseKind.UNREACHABLE


def test_refused_pod_that_passes_on_retry_is_not_counted(part: BindingWorld) -> None:
    part.create(part.pod())
    part.call(choices=0)
    part.world.now += 5.0
    part.call(choices=1)
    part.bind(part.pod())
    part.judge()

    assert part.counted() == 0


def test_known_refusal_counts_although_other_requests_are_forgotten(part: BindingWorld) -> None:
    part.create(part.pod())
    part.call(choices=0)
    part.world.request_log.forgotten_until = part.world.now
    part.bind(part.pod())
    part.judge()

    assert (part.counted(), part.unjudged) == (1, 0)


def test_answer_that_no_client_read_is_counted_as_lost(part: BindingWorld) -> None:
    part.create(part.pod())
    part.call(is_lost=True)
    part.world.request_log.note_answer(2.5, is_lost=True)
    part.bind(part.pod())
    part.judge()

    assert (part.counted(), part.counted("answer-lost")) == (0, 1)
    (cause,) = likely_causes(part.bypassed_pods.report())
    assert (cause.kind, "2.50 s" in cause.text) == (_CauseKind.HTTP_TIMEOUT, True)


def test_pods_without_prioritize_are_counted(part: BindingWorld) -> None:
    part.create(part.pod())
    part.call(choices=2)
    part.bind(part.pod())
    part.judge()

    assert part.counted("not-scored") == 1


def test_a_pod_without_scores_does_not_count_if_prioritize_is_called(part: BindingWorld) -> None:
    part.call("other", PRIORITIZE, choices=2)
    part.create(part.pod())
    part.call(choices=2)
    part.bind(part.pod())
    part.judge()

    assert part.counted("not-scored") == 0


GPU, MIG, SHARED = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"
DEFAULT, BATCH = "default-scheduler", "batch"


def pods(
    verdict: BypassVerdict, count: int = 1, *resources: str, scheduler: str = DEFAULT
) -> _BoundPods:
    return _BoundPods(
        scheduler=scheduler,
        resources=resources or (GPU,),
        verdict=verdict,
        count=count,
        example="team/a",
    )


ASKED = pods(BypassVerdict.CALLED, 10)
MISSED = pods(BypassVerdict.NOT_CALLED, 3)
LOST = pods(BypassVerdict.ANSWER_LOST, 2)
UNSCORED = pods(BypassVerdict.NOT_SCORED, 4)


def evidence(*groups: _BoundPods, silence: float | None = 1.0, **rest: Any) -> _BypassEvidence:
    return _BypassEvidence(pods=groups, silence_seconds=silence, **rest)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        pytest.param(evidence(ASKED), [], id="nothing-is-wrong"),
        pytest.param(evidence(), [], id="nothing-is-known"),
        pytest.param(
            evidence(MISSED, silence=None),
            [(_CauseKind.NO_EXTENDER, "extenders", 3)],
            id="no-request-ever-came",
        ),
        pytest.param(
            evidence(MISSED, silence=SILENCE_SECONDS + 1),
            [(_CauseKind.NO_EXTENDER, "extenders", 3)],
            id="no-scheduler-asks-any-more",
        ),
        pytest.param(
            evidence(MISSED, silence=None, wrong_paths=("/idlegpu/filter",)),
            [(_CauseKind.WRONG_PATH, "urlPrefix", 3), (_CauseKind.NO_EXTENDER, "extenders", 3)],
            id="requests-come-to-another-path",
        ),
        pytest.param(
            evidence(ASKED, pods(BypassVerdict.NOT_CALLED, 5, MIG)),
            [(_CauseKind.MANAGED_RESOURCES, "managedResources", 5)],
            id="no-requests-for-one-resource",
        ),
        pytest.param(
            evidence(pods(BypassVerdict.NOT_CALLED, 5, MIG)),
            [(_CauseKind.MANAGED_RESOURCES, "managedResources", 5)],
            id="requests-come-about-pods-that-are-not-bound",
        ),
        pytest.param(
            evidence(
                pods(BypassVerdict.CALLED, 1, GPU, MIG),
                pods(BypassVerdict.NOT_CALLED, 5, SHARED, "x/y"),
            ),
            [(_CauseKind.MANAGED_RESOURCES, "managedResources", 5)],
            id="no-requests-for-several-resources",
        ),
        pytest.param(
            evidence(ASKED, pods(BypassVerdict.NOT_CALLED, 5, scheduler=BATCH)),
            [(_CauseKind.OTHER_SCHEDULER, "schedulerName", 5)],
            id="one-scheduler-never-asks",
        ),
        pytest.param(
            evidence(ASKED, pods(BypassVerdict.NOT_CALLED, 5, MIG, scheduler=BATCH)),
            [
                (_CauseKind.MANAGED_RESOURCES, "managedResources", 5),
                (_CauseKind.OTHER_SCHEDULER, "schedulerName", 5),
            ],
            id="one-scheduler-with-a-resource-of-its-own-never-asks",
        ),
        pytest.param(
            evidence(ASKED, LOST, lost_answers=2, slowest_seconds=3.5),
            [(_CauseKind.HTTP_TIMEOUT, "httpTimeout", 2)],
            id="answers-come-too-late",
        ),
        pytest.param(
            evidence(ASKED, MISSED, lost_answers=1, slowest_seconds=1.5),
            [(_CauseKind.HTTP_TIMEOUT, "httpTimeout", 3), (_CauseKind.UNREACHABLE, "ignorable", 3)],
            id="some-are-missed-while-answers-are-slow",
        ),
        pytest.param(
            evidence(ASKED, MISSED),
            [(_CauseKind.UNREACHABLE, "ignorable", 3)],
            id="some-of-equal-pods-are-missed",
        ),
        pytest.param(
            evidence(ASKED, UNSCORED),
            [(_CauseKind.PRIORITIZE_VERB, "prioritizeVerb", 4)],
            id="prioritize-is-never-called",
        ),
        pytest.param(
            evidence(ASKED, MISSED, unreadable=2),
            [
                (_CauseKind.UNREACHABLE, "ignorable", 3),
                (_CauseKind.UNREADABLE, "nodeCacheCapable", 2),
            ],
            id="requests-cannot-be-read",
        ),
        pytest.param(
            evidence(ASKED, LOST, pods(BypassVerdict.NOT_CALLED, 5, MIG), UNSCORED),
            [
                (_CauseKind.MANAGED_RESOURCES, "managedResources", 5),
                (_CauseKind.PRIORITIZE_VERB, "prioritizeVerb", 4),
                (_CauseKind.HTTP_TIMEOUT, "httpTimeout", 2),
            ],
            id="what-explains-most-comes-first",
        ),
    ],
)
def test_causes(known: _BypassEvidence, expected: list[tuple[_CauseKind, str, int]]) -> None:
    causes = likely_causes(known)

    assert [(cause.kind, cause.field, cause.pods) for cause in causes] == expected


def test_cause_names_exactly_the_resources_without_requests() -> None:
    known = evidence(
        ASKED, pods(BypassVerdict.NOT_CALLED, 5, MIG), pods(BypassVerdict.NOT_CALLED, 1, SHARED)
    )

    (cause,) = likely_causes(known)

    assert f"request {SHARED}, {MIG}: managedResources lacks" in cause.text


def test_cause_names_only_the_scheduler_without_requests() -> None:
    (cause,) = likely_causes(evidence(ASKED, pods(BypassVerdict.NOT_CALLED, scheduler=BATCH)))

    assert "schedulerName batch:" in cause.text
    assert DEFAULT not in cause.text


def test_cause_states_the_time_of_the_slowest_answer() -> None:
    (cause,) = likely_causes(evidence(LOST, lost_answers=2, slowest_seconds=3.456))

    assert "3.46 s" in cause.text
    assert "2 answers" in cause.text


@pytest.mark.parametrize(("count", "more"), [(5, ":"), (6, " and 1 more:"), (9, " and 4 more:")])
def test_many_names_are_cut(count: int, more: str) -> None:
    names = [f"nvidia.com/mig-{number}" for number in range(count)]

    (cause,) = likely_causes(evidence(ASKED, pods(BypassVerdict.NOT_CALLED, 1, *names)))

    assert f"nvidia.com/mig-4{more}" in cause.text


A = Answers


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        pytest.param(A.NONE, BypassVerdict.NOT_CALLED, id="no-request"),
        pytest.param(A.LEFT_SEVERAL | A.SCORED, BypassVerdict.CALLED, id="both-verbs"),
        pytest.param(A.SCORED, BypassVerdict.CALLED, id="only-prioritize-is-called"),
        pytest.param(A.LEFT_ONE, BypassVerdict.CALLED, id="one-node-needs-no-scores"),
        pytest.param(A.LEFT_SEVERAL, BypassVerdict.CALLED, id="another-extender-left-one"),
        pytest.param(A.FILTER_LOST, BypassVerdict.ANSWER_LOST, id="filter-lost"),
        pytest.param(A.LEFT_SEVERAL | A.SCORES_LOST, BypassVerdict.ANSWER_LOST, id="scores-lost"),
        pytest.param(A.FILTER_LOST | A.SCORED, BypassVerdict.CALLED, id="scores-made-up-for-it"),
        pytest.param(A.REFUSED, BypassVerdict.NOT_CALLED, id="refused-and-bound"),
        pytest.param(A.REFUSED | A.FILTER_LOST, BypassVerdict.ANSWER_LOST, id="lost-once-refused"),
        pytest.param(
            A.REFUSED | A.LEFT_ONE, BypassVerdict.CALLED, id="called-again-after-a-refusal"
        ),
        pytest.param(
            A.SCORES_LOST | A.SCORED, BypassVerdict.CALLED, id="called-again-after-a-lost-answer"
        ),
    ],
)
def test_verdict(answers: Answers, verdict: BypassVerdict) -> None:
    assert _judge(answers, is_scoring=True) is verdict


def test_uncalled_prioritize_matters_only_with_several_nodes() -> None:
    assert _judge(A.LEFT_SEVERAL, is_scoring=False) is BypassVerdict.NOT_SCORED
    assert _judge(A.LEFT_ONE, is_scoring=False) is BypassVerdict.CALLED
