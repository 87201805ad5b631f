"""Find likely causes of bypassed pods: bound without a request to us, or without our answer."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Flag, StrEnum, auto
from itertools import chain
from typing import Final

SILENCE_SECONDS: Final = 900.0
"""Time without any request after which kube-scheduler counts as silent."""

SHOWN_NAMES: Final = 5
"""Maximum number of names in a text."""

PATHS: Final = "/filter, /prioritize and /preempt"


class BypassVerdict(StrEnum):
    """Outcome of our answers for a bound pod."""

    ASKED = "asked"
    """A request came, and kube-scheduler read the answer."""
    NOT_ASKED = "not-asked"
    """No replica got a request, or no further one after filter had refused every node."""
    ANSWER_LOST = "answer-lost"
    """A request came, and kube-scheduler disconnected before the answer."""
    NOT_SCORED = "not-scored"
    """Filter left several nodes, and prioritize is never called: scores have no effect."""


class Answers(Flag):
    """Outcomes of our answers about a pod, as flags."""

    NONE = 0
    SCORED = auto()
    """Scores were read."""
    LEFT_ONE = auto()
    """A filter answer with one node was read; kube-scheduler then requests no scores."""
    LEFT_SEVERAL = auto()
    """A filter answer with several nodes was read."""
    REFUSED = auto()
    """A filter answer without nodes was read."""
    SCORES_LOST = auto()
    """kube-scheduler disconnected before our scores."""
    FILTER_LOST = auto()
    """kube-scheduler disconnected before our filter answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPods:
    """A group of bound pods with equal properties.

    Attributes:
        scheduler: `spec.schedulerName`.
        resources: names of their GPU resources.
        verdict: outcome of our answers.
        is_early: they were bound shortly after our start.
        were_refused: filter had refused them everywhere, and no further request came.
        count: number of pods.
        example: `namespace/name` of the last pod.
        first_at: time of the first binding, in seconds.
        last_at: time of the last binding, in seconds.
    """

    scheduler: str
    resources: tuple[str, ...]
    verdict: BypassVerdict
    is_early: bool = False
    were_refused: bool = False
    count: int = 1
    example: str = ""
    first_at: float = 0.0
    last_at: float = 0.0


_Likeness = tuple[str, tuple[str, ...], BypassVerdict]
"""Group key: scheduler, resources and verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BypassEvidence:
    """Observations of the last minutes about requests and bindings.

    Attributes:
        pods: groups of bound pods.
        silence_seconds: time since the last request to any replica, None without any.
        lost_answers: requests whose client disconnected before our answer or while sending.
        slow_answers: answers slower than the httpTimeout in our example configuration.
        slowest_seconds: duration of the slowest lost or slow answer.
        unreadable: requests that could not be parsed.
        wrong_paths: requested paths that we do not serve.
        has_peers: the replicas exchange their requests.
    """

    pods: tuple[BoundPods, ...]
    silence_seconds: float | None = None
    lost_answers: int = 0
    slow_answers: int = 0
    slowest_seconds: float = 0.0
    unreadable: int = 0
    wrong_paths: tuple[str, ...] = ()
    has_peers: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether no requests come."""
        return self.silence_seconds is None or self.silence_seconds > SILENCE_SECONDS


def merge(replicas: Iterable[BypassEvidence]) -> BypassEvidence:
    """Merge the observations of several replicas; times are on one clock.

    All replicas see most pods, so counts must not be added: per group the replica with the highest
    count wins. Counts of failed requests are added, because only one replica saw each.
    """
    pods: dict[_Likeness, list[BoundPods]] = {}
    together = BypassEvidence(pods=())
    for one in replicas:
        alike: defaultdict[_Likeness, list[BoundPods]] = defaultdict(list)
        for group in one.pods:
            alike[group.scheduler, group.resources, group.verdict].append(group)
        for likeness, groups in alike.items():
            if _count(groups) > _count(pods.get(likeness, ())):
                pods[likeness] = groups
        silences = (together.silence_seconds, one.silence_seconds)
        together = BypassEvidence(
            pods=(),
            silence_seconds=min((each for each in silences if each is not None), default=None),
            lost_answers=together.lost_answers + one.lost_answers,
            slow_answers=together.slow_answers + one.slow_answers,
            slowest_seconds=max(together.slowest_seconds, one.slowest_seconds),
            unreadable=together.unreadable + one.unreadable,
            wrong_paths=tuple(dict.fromkeys((*together.wrong_paths, *one.wrong_paths))),
            has_peers=together.has_peers or one.has_peers,
        )
    most = sorted(chain.from_iterable(pods.values()), key=lambda group: group.last_at)
    return replace(together, pods=tuple(most))


class CauseKind(StrEnum):
    """Kinds of causes, in the order in which equally likely causes are listed."""

    WRONG_PATH = "wrong-path"
    UNREADABLE = "unreadable"
    NO_EXTENDER = "no-extender"
    MANAGED_RESOURCES = "managed-resources"
    OTHER_SCHEDULER = "other-scheduler"
    PRIORITIZE_VERB = "prioritize-verb"
    HTTP_TIMEOUT = "http-timeout"
    STARTED_LATE = "started-late"
    OTHER_REPLICA = "other-replica"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class BypassCause:
    """A likely cause.

    Attributes:
        kind: kind of the cause.
        field: field to check, as spelled in kube-scheduler's configuration or ours.
        pods: number of pods that it may explain.
        text: description for users.
    """

    kind: CauseKind
    field: str
    pods: int
    text: str


def judge(answers: Answers, *, is_scoring: bool) -> BypassVerdict:
    """Return the outcome of our answers for a bound pod.

    One useful answer is enough, whether or not it was the last: replicas exchange answers late, so
    their order is uncertain.

    Args:
        answers: answers of all replicas in all attempts.
        is_scoring: whether prioritize is called at all.
    """
    if answers & (Answers.SCORED | Answers.LEFT_ONE):
        return BypassVerdict.ASKED
    if answers & Answers.SCORES_LOST:
        return BypassVerdict.ANSWER_LOST
    if answers & Answers.LEFT_SEVERAL:
        # Another extender may have left one node.
        return BypassVerdict.ASKED if is_scoring else BypassVerdict.NOT_SCORED
    # After a refusal kube-scheduler sends another request before it binds the pod.
    return BypassVerdict.ANSWER_LOST if answers & Answers.FILTER_LOST else BypassVerdict.NOT_ASKED


def likely_causes(evidence: BypassEvidence) -> tuple[BypassCause, ...]:
    """Return the likely causes of bypassed pods, the most likely first."""
    by_verdict = {
        verdict: [group for group in evidence.pods if group.verdict is verdict]
        for verdict in BypassVerdict
    }
    missing = by_verdict[BypassVerdict.NOT_ASKED]
    lost = _count(by_verdict[BypassVerdict.ANSWER_LOST])
    unscored = _count(by_verdict[BypassVerdict.NOT_SCORED])
    causes: list[BypassCause] = []
    if missing:
        causes += _why_silent(evidence, missing) if evidence.is_silent else ()
        causes += () if evidence.is_silent else _why_missing(evidence, missing)
    if lost:
        causes.append(_http_timeout(evidence, lost))
    if unscored:
        causes.append(
            BypassCause(
                kind=CauseKind.PRIORITIZE_VERB,
                field="prioritizeVerb",
                pods=unscored,
                text="filter is called and prioritize never, so scores are lost: prioritizeVerb is "
                "missing or wrong, or an extender that is called after us always leaves one node",
            )
        )
    ranks = {kind: rank for rank, kind in enumerate(CauseKind)}
    return tuple(sorted(causes, key=lambda cause: (-cause.pods, ranks[cause.kind])))


def _why_silent(evidence: BypassEvidence, missing: list[BoundPods]) -> Iterable[BypassCause]:
    """Yield the causes of silence: no requests come at all."""
    count = _count(missing)
    yield from _why_unread(evidence, count)
    since = (
        "has never asked"
        if evidence.silence_seconds is None
        else f"has not asked for {evidence.silence_seconds:.0f} s"
    )
    yield BypassCause(
        kind=CauseKind.NO_EXTENDER,
        field="extenders",
        pods=count,
        text=f"kube-scheduler {since}: the configuration that it runs with (--config) has no entry "
        "for us under extenders, or its managedResources name none of "
        f"{_resources(missing)}, or it does not reach us: urlPrefix, enableHTTPS and tlsConfig, a "
        "NetworkPolicy",
    )
    early = _count(group for group in missing if group.is_early)
    if early:
        yield _started_late(early)


def _why_unread(evidence: BypassEvidence, pods: int) -> Iterable[BypassCause]:
    """Yield the causes of requests that we cannot parse or do not serve."""
    if evidence.wrong_paths:
        yield BypassCause(
            kind=CauseKind.WRONG_PATH,
            field="urlPrefix",
            pods=pods,
            text=f"questions came to {_names(evidence.wrong_paths)}, and we answer {PATHS}: see "
            "urlPrefix, filterVerb, prioritizeVerb and preemptVerb",
        )
    if evidence.unreadable:
        yield BypassCause(
            kind=CauseKind.UNREADABLE,
            field="nodeCacheCapable",
            pods=min(pods, evidence.unreadable),
            text=f"{evidence.unreadable} questions could not be read: the log says why "
            "(malformed request); too large ones become small with nodeCacheCapable: true",
        )


def _why_missing(evidence: BypassEvidence, missing: list[BoundPods]) -> Iterable[BypassCause]:
    """Yield the causes of missing requests for some pods while requests for others come."""
    asked = [
        group
        for group in evidence.pods
        if group.verdict is not BypassVerdict.NOT_ASKED or group.were_refused
    ]
    names = {name for group in asked for name in group.resources}
    schedulers = {group.scheduler for group in asked}
    unnamed = [group for group in missing if not names.intersection(group.resources)]
    others = [group for group in missing if asked and group.scheduler not in schedulers]
    sometimes = [group for group in missing if group not in unnamed and group not in others]
    if unnamed:
        yield BypassCause(
            kind=CauseKind.MANAGED_RESOURCES,
            field="managedResources",
            pods=_count(unnamed),
            text=f"kube-scheduler asks, but never about pods that request {_resources(unnamed)}: "
            "managedResources lacks that (exact names, no wildcards)",
        )
    if others:
        shown = _names(group.scheduler for group in others)
        yield BypassCause(
            kind=CauseKind.OTHER_SCHEDULER,
            field="schedulerName",
            pods=_count(others),
            text=f"pods with schedulerName {shown} are never asked about, others are: the "
            "scheduler that serves this profile has no entry for us under extenders; where that is "
            "meant so, let our setting unasked.schedulers name the others alone",
        )
    if sometimes:
        yield from _why_sometimes(evidence, sometimes)


def _why_sometimes(evidence: BypassEvidence, missing: list[BoundPods]) -> Iterable[BypassCause]:
    """Yield why some of equal pods are asked about and others not."""
    early = _count(group for group in missing if group.is_early)
    if early:
        yield _started_late(early)
    rest = [group for group in missing if not group.is_early]
    if not rest:
        return
    count = _count(rest)
    yield from _why_unread(evidence, count)
    first = min(rest, key=lambda group: group.first_at)
    if all(
        group.last_at <= first.first_at
        for group in evidence.pods
        if group.verdict is not BypassVerdict.NOT_ASKED
    ):
        yield BypassCause(
            kind=CauseKind.NO_EXTENDER,
            field="extenders",
            pods=count,
            text="kube-scheduler asked about such pods before, and does not any more: its "
            "configuration was changed (extenders, managedResources), or it does not reach us: "
            "urlPrefix, enableHTTPS and tlsConfig, a NetworkPolicy",
        )
    if evidence.lost_answers or evidence.slow_answers:
        yield _http_timeout(evidence, count)
    if not evidence.has_peers:
        yield BypassCause(
            kind=CauseKind.OTHER_REPLICA,
            field="peers.service",
            pods=count,
            text="requests for such pods come only at times: with several replicas of idlegpu, set "
            "peers.service, so that the replicas exchange their requests",
        )
    yield BypassCause(
        kind=CauseKind.UNREACHABLE,
        field="ignorable",
        pods=count,
        text="requests for such pods come only sometimes: kube-scheduler cannot always reach us (a "
        "restart, TLS, httpTimeout), and then places pods without us (ignorable: true); or another "
        "kube-scheduler, with other extenders, serves some of them",
    )


def _http_timeout(evidence: BypassEvidence, pods: int) -> BypassCause:
    """Return the cause for answers that come too late."""
    return BypassCause(
        kind=CauseKind.HTTP_TIMEOUT,
        field="httpTimeout",
        pods=pods,
        text=f"answers came too late: for {evidence.lost_answers} questions kube-scheduler was "
        f"gone before the answer, and {evidence.slow_answers} answers were slow (the slowest took "
        f"{evidence.slowest_seconds:.2f} s): httpTimeout is too short, or we lack CPU",
    )


def _started_late(pods: int) -> BypassCause:
    return BypassCause(
        kind=CauseKind.STARTED_LATE,
        field="ignorable",
        pods=pods,
        text="we had just started: until then kube-scheduler placed pods without us (ignorable: "
        "true); a second replica would have answered",
    )


def _count(groups: Iterable[BoundPods]) -> int:
    return sum(group.count for group in groups)


def _resources(groups: Iterable[BoundPods]) -> str:
    """Format the resources of the pods for a text."""
    return _names(name for group in groups for name in group.resources)


def _names(names: Iterable[str]) -> str:
    """Format names for a text: sorted, at most `SHOWN_NAMES`."""
    ordered = sorted(set(names))
    more = len(ordered) - SHOWN_NAMES
    return ", ".join(ordered[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
