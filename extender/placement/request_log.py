"""Log the requests about pods that this replica and the other replicas received."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from typing import Final, Protocol

from extender.core.nodes.assumed_pods import Assumption
from extender.core.nodes.host_resources import NONE
from extender.fleet.fleet import Fleet
from extender.runtime.topic import Topic

FILTER: Final = "filter"
PRIORITIZE: Final = "prioritize"

_KEPT_SECONDS: Final = 1800.0
"""Longest time from a request to the binding: plugins may delay a pod for 15 minutes at Permit,
and for 10 until its volumes are bound."""

_MAX_PODS: Final = 100_000
"""Maximum number of logged pods that are not bound yet."""

_ORDER_SECONDS: Final = 0.05
"""Answers this close together belong to one scheduling attempt. The order of two replicas' answers
is known to a few milliseconds, or 20 if their clocks drift. kube-scheduler retries a pod after a
second, but from 1.33 on at once if no other pod waits."""

_MAX_INCIDENTS: Final = 1000
_MAX_PATHS: Final = 10
_SHOWN_PATH: Final = 100

SILENCE_SECONDS: Final = 900.0
"""Time without any request after which kube-scheduler counts as silent."""


class PeerReports(Protocol):
    """Period for which the requests to all other replicas are known, in monotonic seconds."""

    @property
    def since(self) -> float:
        """Start of the period; earlier requests are lost for good."""

    @property
    def until(self) -> float:
        """End of the period; each replica has sent a report later than this."""


class BypassVerdict(StrEnum):
    """Outcome of our answers for a bound pod."""

    CALLED = "called"
    """A request came, and kube-scheduler read the answer."""
    NOT_CALLED = "not-called"
    """No replica got a request, or no further one after filter had refused every node."""
    ANSWER_LOST = "answer-lost"
    """A request came, and kube-scheduler disconnected before the answer."""
    NOT_SCORED = "not-scored"
    """Filter left several nodes, and prioritize is never called: scores have no effect."""


class Answers(Flag):
    """Our answers about a pod: read by kube-scheduler, or lost because it had disconnected."""

    NONE = 0
    SCORED = auto()
    LEFT_ONE = auto()
    """Filter left one node; kube-scheduler then requests no scores."""
    LEFT_SEVERAL = auto()
    REFUSED = auto()
    SCORES_LOST = auto()
    FILTER_LOST = auto()


def _judge(answers: Answers, *, is_scoring: bool) -> BypassVerdict:
    """Return the outcome of our answers for a bound pod.

    One useful answer is enough, whether or not it was the last: replicas exchange answers late, so
    their order is uncertain.

    Args:
        answers: answers of all replicas in all attempts.
        is_scoring: whether prioritize is called at all.
    """
    if answers & (Answers.SCORED | Answers.LEFT_ONE):
        return BypassVerdict.CALLED
    if answers & Answers.SCORES_LOST:
        return BypassVerdict.ANSWER_LOST
    if answers & Answers.LEFT_SEVERAL:
        # Another extender may have left one node.
        return BypassVerdict.CALLED if is_scoring else BypassVerdict.NOT_SCORED
    # After a refusal kube-scheduler sends another request before it binds the pod.
    return BypassVerdict.ANSWER_LOST if answers & Answers.FILTER_LOST else BypassVerdict.NOT_CALLED


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """A request about a pod, and the answer of a replica.

    Attributes:
        verb: filter or prioritize.
        key: `namespace/name`.
        at: time of the answer, seconds of this process's monotonic clock.
        choices: number of nodes that passed or were scored.
        is_lost: whether kube-scheduler had disconnected before the answer.
        node: first choice; "" without one.
        resources: requested (resource, count) pairs; empty if nothing was decided.
        memory_bytes: declared memory per device; None without a declaration.
    """

    verb: str
    uid: str
    key: str
    at: float
    choices: int
    is_lost: bool = False
    node: str = ""
    resources: tuple[tuple[str, int], ...] = ()
    memory_bytes: int | None = None

    @property
    def came_to(self) -> Answers:
        """Outcome of the answer for the pod."""
        if self.verb == PRIORITIZE:
            return Answers.SCORES_LOST if self.is_lost else Answers.SCORED
        if self.is_lost:
            return Answers.FILTER_LOST
        left = (Answers.REFUSED, Answers.LEFT_ONE, Answers.LEFT_SEVERAL)
        return left[min(self.choices, 2)]


@dataclass(slots=True)
class _PodAnswers:
    """All answers about a pod.

    Attributes:
        is_elsewhere: whether another replica gave the last answer.
        last_at: time of the last answer, by verb.
        answers: effects of all answers.
    """

    at: float
    is_elsewhere: bool
    last_at: dict[str, float] = field(default_factory=dict)
    answers: Answers = Answers.NONE

    def is_before(self, request: AnsweredRequest) -> bool:
        """Return whether all logged answers are older than this one."""
        return all(
            comes_later(request.verb, request.at, than=verb, at=at)
            for verb, at in self.last_at.items()
        )


def comes_later(verb: str, answered_at: float, *, than: str, at: float) -> bool:
    """Return whether one answer about a pod is later than another, across replicas.

    Reports of other replicas look slightly newer than they are. Within one attempt, prioritize
    comes last.

    Args:
        verb: filter or prioritize.
        answered_at: time of this answer, seconds of any clock.
        than: verb of the other answer.
        at: time of the other answer, on the same clock.
    """
    if verb == than:
        return answered_at >= at
    if verb == PRIORITIZE:
        return answered_at > at - _ORDER_SECONDS
    return answered_at >= at + _ORDER_SECONDS


class RequestLog:
    """Logs the requests to all replicas by pod. Runs on the event loop's thread only.

    Args:
        fleet: state of the fleet, in which pods placed by other replicas are assumed.
        clock: seconds since the epoch.
        max_pods: maximum number of pods.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        max_pods: int = _MAX_PODS,
    ) -> None:
        self.clock = clock
        self.monotonic = monotonic
        self.answered: Topic[[AnsweredRequest]] = Topic()
        """Published with each answer of this replica about a pod."""
        self.answered_elsewhere: Topic[[str, str, float]] = Topic()
        """Published with UID, verb and time (seconds since the epoch) of another replica's answer,
        if it is the latest about that pod. The pod may be bound already."""
        self.last_at: float | None = None
        self.wrong_paths: OrderedDict[str, float] = OrderedDict()
        self.forgotten_until = float("-inf")
        """Requests before this time may have been dropped from the log, monotonic seconds."""
        self._fleet = fleet
        self._max_pods = max_pods
        self._pods: OrderedDict[str, _PodAnswers] = OrderedDict()
        self._scored_at = float("-inf")
        self._lost: deque[tuple[float, float]] = deque(maxlen=_MAX_INCIDENTS)
        self._unreadable: deque[float] = deque(maxlen=_MAX_INCIDENTS)

    def __len__(self) -> int:
        return len(self._pods)

    def __contains__(self, uid: str) -> bool:
        return uid in self._pods

    # --- requests to this replica ----------------------------------------------------------------

    def note(self, request: AnsweredRequest) -> None:
        """Log a request to this replica, and publish its answer."""
        self.last_at = request.at
        if request.uid:
            self._remember(request, is_elsewhere=False)
            self.answered.publish(request)

    def note_answer(self, seconds: float, *, is_lost: bool) -> None:
        """Count an answer that was sent after kube-scheduler had disconnected."""
        if is_lost:
            self._lost.append((self.monotonic(), seconds))

    def note_unreadable(self) -> None:
        """Count a malformed request."""
        self.last_at = self.monotonic()
        self._unreadable.append(self.last_at)

    def note_wrong_path(self, path: str) -> None:
        """Record a requested path that no route serves."""
        shown = path[:_SHOWN_PATH]
        self.wrong_paths.pop(shown, None)
        self.wrong_paths[shown] = self.monotonic()
        if len(self.wrong_paths) > _MAX_PATHS:
            self.wrong_paths.popitem(last=False)

    # --- requests to other replicas --------------------------------------------------------------

    def take(self, request: AnsweredRequest) -> None:
        """Log a request to another replica, and assume the pod on that replica's first choice."""
        if not self._remember(request, is_elsewhere=True):
            return
        if request.resources:
            self._assume(request)
        age_seconds = self.monotonic() - request.at
        answered_at = self.clock() - age_seconds
        self.answered_elsewhere.publish(request.uid, request.verb, answered_at)

    def _assume(self, request: AnsweredRequest) -> None:
        """Assume a pod on another replica's first choice; a nominated pod stays where it is."""
        ledger, record = self._fleet.ledger, self._fleet.pods.get(request.uid)
        known = ledger.get(request.uid)
        is_firm = known is not None and known.expires_at is None
        if is_firm or (record is not None and (record.node or record.phase.is_terminal)):
            return
        assumed = self._fleet.policy.assumed
        seconds = self._fleet.groups.tentative_seconds(request.uid, assumed)
        left = request.at + seconds - self.monotonic()
        offered = self._fleet.offered
        # Before the nodes are known, any resource may be offered.
        resources = tuple(part for part in request.resources if part[0] in offered or not offered)
        if not request.node or not resources or left <= 0:
            ledger.drop(request.uid)
            return
        ledger.assume(
            Assumption(
                uid=request.uid,
                key=request.key,
                node=request.node,
                resources=resources,
                memory_bytes=request.memory_bytes,
                expected_bytes=self._fleet.expected_bytes(record) if record else None,
                host=record.host if record else NONE,
                expires_at=self.clock() + left,
                last_refusal=record.message if record and record.is_unscheduled else None,
            )
        )

    # --- evaluation ------------------------------------------------------------------------------

    def verdict(self, uid: str) -> BypassVerdict:
        """Judge by the logged answers whether a bound pod bypassed idlegpu."""
        answers = self._pods.get(uid)
        return _judge(
            answers.answers if answers else Answers.NONE,
            is_scoring=self.monotonic() - self._scored_at < SILENCE_SECONDS,
        )

    def is_elsewhere(self, uid: str) -> bool:
        """Return whether another replica reported the last answer about a pod."""
        answers = self._pods.get(uid)
        return answers is not None and answers.is_elsewhere

    def answered_at(self, uid: str) -> float | None:
        """Return the time of the last answer about a pod, monotonic seconds; None without one."""
        answers = self._pods.get(uid)
        return None if answers is None else answers.at

    def forget(self, uid: str) -> None:
        """Drop a pod that is bound and judged, or deleted."""
        self._pods.pop(uid, None)

    def expire(self) -> None:
        """Drop old entries."""
        now = self.monotonic()
        while self._pods:
            uid, oldest = next(iter(self._pods.items()))
            if now - oldest.at < _KEPT_SECONDS:
                break
            del self._pods[uid]
            self.forgotten_until = max(self.forgotten_until, oldest.at)
        while self._lost and now - self._lost[0][0] > SILENCE_SECONDS:
            self._lost.popleft()
        while self._unreadable and now - self._unreadable[0] > SILENCE_SECONDS:
            self._unreadable.popleft()
        for path in [path for path, at in self.wrong_paths.items() if now - at > SILENCE_SECONDS]:
            del self.wrong_paths[path]

    @property
    def incidents(self) -> tuple[int, int, float]:
        """Number of lost answers and malformed requests; seconds of the slowest lost answer."""
        slowest = max((seconds for _, seconds in self._lost), default=0.0)
        return len(self._lost), len(self._unreadable), slowest

    def _remember(self, request: AnsweredRequest, *, is_elsewhere: bool) -> bool:
        """Log a request; return whether it is the latest about its pod."""
        at = request.at
        self.last_at = at if self.last_at is None else max(at, self.last_at)
        answers = self._pods.pop(request.uid, None) or _PodAnswers(at, is_elsewhere)
        is_last = answers.is_before(request)
        if is_last:
            answers.is_elsewhere = is_elsewhere
        answers.at = max(answers.at, at)
        answers.last_at[request.verb] = max(answers.last_at.get(request.verb, at), at)
        answers.answers |= request.came_to
        if request.verb == PRIORITIZE:
            self._scored_at = max(self._scored_at, at)
        self._pods[request.uid] = answers
        if len(self._pods) > self._max_pods:
            _, oldest = self._pods.popitem(last=False)
            self.forgotten_until = max(self.forgotten_until, oldest.at)
        return is_last
