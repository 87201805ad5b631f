"""Table of likely causes of pods bound without a call, and the answers that a bound pod got."""

from typing import Any

import pytest

from extender.placement.bypass_causes import (
    BoundPods,
    BypassEvidence,
    CauseKind,
    likely_causes,
)
from extender.placement.request_log import SILENCE_SECONDS, Answers, BypassVerdict, _judge

GPU, MIG, SHARED = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"
DEFAULT, BATCH = "default-scheduler", "batch"


def pods(
    verdict: BypassVerdict,
    count: int = 1,
    *resources: str,
    scheduler: str = DEFAULT,
) -> BoundPods:
    return BoundPods(
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


def evidence(*groups: BoundPods, silence: float | None = 1.0, **rest: Any) -> BypassEvidence:
    return BypassEvidence(pods=groups, silence_seconds=silence, **rest)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        pytest.param(evidence(ASKED), [], id="nothing-is-wrong"),
        pytest.param(evidence(), [], id="nothing-is-known"),
        pytest.param(
            evidence(MISSED, silence=None),
            [(CauseKind.NO_EXTENDER, "extenders", 3)],
            id="no-request-ever-came",
        ),
        pytest.param(
            evidence(MISSED, silence=SILENCE_SECONDS + 1),
            [(CauseKind.NO_EXTENDER, "extenders", 3)],
            id="no-scheduler-asks-any-more",
        ),
        pytest.param(
            evidence(MISSED, silence=None, wrong_paths=("/idlegpu/filter",)),
            [(CauseKind.WRONG_PATH, "urlPrefix", 3), (CauseKind.NO_EXTENDER, "extenders", 3)],
            id="requests-come-to-another-path",
        ),
        pytest.param(
            evidence(ASKED, pods(BypassVerdict.NOT_CALLED, 5, MIG)),
            [(CauseKind.MANAGED_RESOURCES, "managedResources", 5)],
            id="no-requests-for-one-resource",
        ),
        pytest.param(
            evidence(pods(BypassVerdict.NOT_CALLED, 5, MIG)),
            [(CauseKind.MANAGED_RESOURCES, "managedResources", 5)],
            id="requests-come-about-pods-that-are-not-bound",
        ),
        pytest.param(
            evidence(
                pods(BypassVerdict.CALLED, 1, GPU, MIG),
                pods(BypassVerdict.NOT_CALLED, 5, SHARED, "x/y"),
            ),
            [(CauseKind.MANAGED_RESOURCES, "managedResources", 5)],
            id="no-requests-for-several-resources",
        ),
        pytest.param(
            evidence(ASKED, pods(BypassVerdict.NOT_CALLED, 5, scheduler=BATCH)),
            [(CauseKind.OTHER_SCHEDULER, "schedulerName", 5)],
            id="one-scheduler-never-asks",
        ),
        pytest.param(
            evidence(ASKED, pods(BypassVerdict.NOT_CALLED, 5, MIG, scheduler=BATCH)),
            [
                (CauseKind.MANAGED_RESOURCES, "managedResources", 5),
                (CauseKind.OTHER_SCHEDULER, "schedulerName", 5),
            ],
            id="one-scheduler-with-a-resource-of-its-own-never-asks",
        ),
        pytest.param(
            evidence(ASKED, LOST, lost_answers=2, slowest_seconds=3.5),
            [(CauseKind.HTTP_TIMEOUT, "httpTimeout", 2)],
            id="answers-come-too-late",
        ),
        pytest.param(
            evidence(ASKED, MISSED, lost_answers=1, slowest_seconds=1.5),
            [
                (CauseKind.HTTP_TIMEOUT, "httpTimeout", 3),
                (CauseKind.UNREACHABLE, "ignorable", 3),
            ],
            id="some-are-missed-while-answers-are-slow",
        ),
        pytest.param(
            evidence(ASKED, MISSED),
            [(CauseKind.UNREACHABLE, "ignorable", 3)],
            id="some-of-equal-pods-are-missed",
        ),
        pytest.param(
            evidence(ASKED, UNSCORED),
            [(CauseKind.PRIORITIZE_VERB, "prioritizeVerb", 4)],
            id="prioritize-is-never-called",
        ),
        pytest.param(
            evidence(ASKED, MISSED, unreadable=2),
            [
                (CauseKind.UNREACHABLE, "ignorable", 3),
                (CauseKind.UNREADABLE, "nodeCacheCapable", 2),
            ],
            id="requests-cannot-be-read",
        ),
        pytest.param(
            evidence(ASKED, LOST, pods(BypassVerdict.NOT_CALLED, 5, MIG), UNSCORED),
            [
                (CauseKind.MANAGED_RESOURCES, "managedResources", 5),
                (CauseKind.PRIORITIZE_VERB, "prioritizeVerb", 4),
                (CauseKind.HTTP_TIMEOUT, "httpTimeout", 2),
            ],
            id="what-explains-most-comes-first",
        ),
    ],
)
def test_causes(known: BypassEvidence, expected: list[tuple[CauseKind, str, int]]) -> None:
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
