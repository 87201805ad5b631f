"""Find likely causes of bypassed pods: bound without a request to us, or without our answer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from extender.placement.request_log import SILENCE_SECONDS, BypassVerdict

_SHOWN_NAMES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPods:
    """A group of bound pods with equal scheduler, GPU resources and verdict.

    Attributes:
        were_refused: filter had refused them everywhere, and no further request came.
        example: `namespace/name` of the last pod.
        first_at: time of the first binding, in seconds.
        last_at: time of the last binding, in seconds.
    """

    scheduler: str
    resources: tuple[str, ...]
    verdict: BypassVerdict
    were_refused: bool = False
    count: int = 1
    example: str = ""
    first_at: float = 0.0
    last_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BypassEvidence:
    """Observations of the last minutes about requests and bindings.

    Attributes:
        pods: groups of bound pods.
        at: time of the observation, on the clock of the groups' times.
        unjudged: number of pods since the start whose requests are unknown.
        schedulers: schedulers that call us: those of the setting, else those seen since the start.
        silence_seconds: time since the last request to any replica, None without any.
        lost_answers: requests whose client disconnected before our answer or while sending.
        slowest_seconds: duration of the slowest of these.
        unreadable: requests that could not be parsed.
        wrong_paths: requested paths that we do not serve.
    """

    pods: tuple[BoundPods, ...]
    at: float = 0.0
    unjudged: int = 0
    schedulers: tuple[str, ...] = ()
    silence_seconds: float | None = None
    lost_answers: int = 0
    slowest_seconds: float = 0.0
    unreadable: int = 0
    wrong_paths: tuple[str, ...] = ()


class CauseKind(StrEnum):
    """Kinds of causes, in the order in which equally likely causes are listed."""

    WRONG_PATH = "wrong-path"
    UNREADABLE = "unreadable"
    NO_EXTENDER = "no-extender"
    MANAGED_RESOURCES = "managed-resources"
    OTHER_SCHEDULER = "other-scheduler"
    PRIORITIZE_VERB = "prioritize-verb"
    HTTP_TIMEOUT = "http-timeout"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class _BypassCause:
    """A likely cause: the field to check in kube-scheduler's configuration or in ours, and why."""

    kind: CauseKind
    field: str
    pods: int  # that it may explain
    text: str


_TEXTS: Final = {
    CauseKind.WRONG_PATH: (
        "urlPrefix",
        "requests came for {names}, but we answer /filter, /prioritize and /preempt: see "
        "urlPrefix, filterVerb, prioritizeVerb and preemptVerb",
    ),
    CauseKind.UNREADABLE: (
        "nodeCacheCapable",
        "{evidence.unreadable} requests could not be read: the log says why (malformed request); "
        "nodeCacheCapable: true makes large requests small",
    ),
    CauseKind.NO_EXTENDER: (
        "extenders",
        "kube-scheduler {since}: its configuration (--config) has no entry for us under "
        "extenders, or the managedResources of that entry lack {names}, or kube-scheduler cannot "
        "reach us: check urlPrefix, enableHTTPS, tlsConfig and NetworkPolicies",
    ),
    CauseKind.MANAGED_RESOURCES: (
        "managedResources",
        "kube-scheduler sends requests, but none for pods that request {names}: managedResources "
        "lacks these names (exact names, no wildcards)",
    ),
    CauseKind.OTHER_SCHEDULER: (
        "schedulerName",
        "kube-scheduler sends requests, but none for pods with schedulerName {names}: the "
        "scheduler that serves this profile has no entry for us under extenders; if that is "
        "intended, list only the other schedulers in our setting unasked.schedulers",
    ),
    CauseKind.PRIORITIZE_VERB: (
        "prioritizeVerb",
        "kube-scheduler calls filter but never prioritize, so our scores do not count: "
        "prioritizeVerb is missing or wrong, or an extender that is called after us always leaves "
        "one node",
    ),
    CauseKind.HTTP_TIMEOUT: (
        "httpTimeout",
        "answers came too late: kube-scheduler disconnected before {evidence.lost_answers} answers "
        "(the slowest took {evidence.slowest_seconds:.2f} s): httpTimeout is too short, or we lack "
        "CPU",
    ),
    CauseKind.UNREACHABLE: (
        "ignorable",
        "requests come for some of these pods only: kube-scheduler cannot always reach us (a "
        "restart, TLS, httpTimeout) and then places pods without us (ignorable: true); or its "
        "configuration was changed; or another kube-scheduler with other extenders serves some "
        "of these pods; or another replica of idlegpu answers, and peers.service is not set",
    ),
}

_Found = tuple[CauseKind, int, dict[str, str]]
"""Kind of a cause, number of pods, and values of its text."""


def likely_causes(evidence: BypassEvidence) -> tuple[_BypassCause, ...]:
    """Return the likely causes of bypassed pods, the most likely first."""
    missed = [group for group in evidence.pods if group.verdict is BypassVerdict.NOT_CALLED]
    found = list(_why_silent(evidence, missed) or _why_missed(evidence, missed))
    for kind, verdict in (
        (CauseKind.HTTP_TIMEOUT, BypassVerdict.ANSWER_LOST),
        (CauseKind.PRIORITIZE_VERB, BypassVerdict.NOT_SCORED),
    ):
        found.append((kind, _count(g for g in evidence.pods if g.verdict is verdict), {}))
    ranks = {kind: rank for rank, kind in enumerate(CauseKind)}
    return tuple(
        _BypassCause(
            kind=kind,
            field=_TEXTS[kind][0],
            pods=pods,
            text=_TEXTS[kind][1].format(evidence=evidence, **values),
        )
        for kind, pods, values in sorted(found, key=lambda one: (-one[1], ranks[one[0]]))
        if pods
    )


def _why_silent(evidence: BypassEvidence, missed: Sequence[BoundPods]) -> list[_Found]:
    """Return the causes if no requests come at all, else none."""
    seconds = evidence.silence_seconds
    if seconds is not None and seconds <= SILENCE_SECONDS:
        return []
    since = (
        "has never sent a request" if seconds is None else f"sent no request for {seconds:.0f} s"
    )
    values = {"since": since, "names": _names(name for group in missed for name in group.resources)}
    count = _count(missed)
    return [*_why_unread(evidence, count), (CauseKind.NO_EXTENDER, count, values)]


def _why_unread(evidence: BypassEvidence, pods: int) -> Iterator[_Found]:
    """Yield the causes of requests that we cannot parse or do not serve."""
    if evidence.wrong_paths:
        yield CauseKind.WRONG_PATH, pods, {"names": _names(evidence.wrong_paths)}
    yield CauseKind.UNREADABLE, min(pods, evidence.unreadable), {}


def _why_missed(evidence: BypassEvidence, missed: Sequence[BoundPods]) -> Iterator[_Found]:
    """Yield the causes of missing requests for some pods while requests for others come."""
    seen = [group for group in evidence.pods if group not in missed or group.were_refused]
    names = {name for group in seen for name in group.resources}
    schedulers = {group.scheduler for group in seen}
    unnamed = [group for group in missed if not names.intersection(group.resources)]
    others = [group for group in missed if seen and group.scheduler not in schedulers]
    rest = [group for group in missed if group not in unnamed and group not in others]
    yield (
        CauseKind.MANAGED_RESOURCES,
        _count(unnamed),
        {"names": _names(name for group in unnamed for name in group.resources)},
    )
    schedulers_of_others = _names(group.scheduler for group in others)
    yield CauseKind.OTHER_SCHEDULER, _count(others), {"names": schedulers_of_others}
    if not rest:
        return
    count = _count(rest)
    yield from _why_unread(evidence, count)
    if evidence.lost_answers:
        yield CauseKind.HTTP_TIMEOUT, count, {}
    yield CauseKind.UNREACHABLE, count, {}


def _count(groups: Iterable[BoundPods]) -> int:
    return sum(group.count for group in groups)


def _names(names: Iterable[str]) -> str:
    """Format names for a message: sorted, at most `_SHOWN_NAMES`."""
    ordered = sorted(set(names))
    more = len(ordered) - _SHOWN_NAMES
    return ", ".join(ordered[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
