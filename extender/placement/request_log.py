"""What replicas were asked about which pod: by us from kube-scheduler, by others as they tell."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from extender.core.nodes.assumed_pods import Assumption
from extender.fleet.fleet import Fleet
from extender.placement.bypass_causes import SILENCE_SECONDS, Answers, BypassVerdict, judge

FILTER: Final = "filter"
PRIORITIZE: Final = "prioritize"

KEPT_SECONDS: Final = 1800.0
"""kube-scheduler binds a pod at the latest so long after it asked: plugins may have it wait 15
minutes for permission, and 10 for its volumes."""

MAX_PODS: Final = 100_000
"""Pods that are asked about and not bound yet, of which that is remembered."""

ORDER_SECONDS: Final = 0.05
"""Answers that are told so close together are of one attempt. Between two replicas it is known to
a few milliseconds which came first, 20 where their clocks drift (see `Delay`). kube-scheduler tries
a pod again after a second, but from 1.33 on at once where no other pod waits."""

SLOW_SECONDS: Final = 1.0
"""The httpTimeout of the configuration that is shipped: a slower answer may be nobody's."""

MAX_INCIDENTS: Final = 1000
MAX_PATHS: Final = 10
SHOWN_PATH: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredQuestion:
    """What a replica was asked about a pod, and what it answered.

    Attributes:
        verb: filter or prioritize.
        uid: the pod's UID.
        key: `namespace/name`.
        at: when, in seconds of this process's monotonic clock.
        choices: nodes that were left, or got scores.
        is_lost: kube-scheduler was gone before the answer.
        node: the first choice, "" where there is none.
        resources: (resource, count) that the pod asks for; empty where nothing was decided.
        memory_bytes: room that it takes of each device, None where it did not say.
    """

    verb: str
    uid: str
    key: str
    at: float
    choices: int = 0
    is_lost: bool = False
    node: str = ""
    resources: tuple[tuple[str, int], ...] = ()
    memory_bytes: int | None = None

    @property
    def came_to(self) -> Answers:
        """What came of the answer."""
        if self.verb == PRIORITIZE:
            return Answers.SCORES_LOST if self.is_lost else Answers.SCORED
        if self.is_lost:
            return Answers.FILTER_LOST
        left = (Answers.REFUSED, Answers.LEFT_ONE, Answers.LEFT_SEVERAL)
        return left[min(self.choices, 2)]


@dataclass(slots=True)
class _Asked:
    """The answers about a pod.

    Attributes:
        at: when the last was given.
        last_at: likewise, by the verb.
        is_elsewhere: another replica gave the last.
        answers: what came of all of them.
    """

    at: float
    last_at: dict[str, float] = field(default_factory=dict)
    is_elsewhere: bool = False
    answers: Answers = Answers.NONE

    def is_before(self, question: AnsweredQuestion) -> bool:
        """Whether a question was answered after all of these."""
        return all(
            comes_later(question.verb, question.at, than=verb, at=at)
            for verb, at in self.last_at.items()
        )


def comes_later(verb: str, answered_at: float, *, than: str, at: float) -> bool:
    """Whether an answer about a pod was given after another one, of whichever replica.

    What is told looks a little newer than it is: of one attempt, prioritize came last.

    Args:
        verb: filter or prioritize ...
        answered_at: ... and when, in seconds on any clock.
        than: the other one's verb ...
        at: ... and when, on the same clock.
    """
    if verb == than:
        return answered_at >= at
    if verb == PRIORITIZE:
        return answered_at > at - ORDER_SECONDS
    return answered_at >= at + ORDER_SECONDS


class RequestLog:
    """Remembers by pod what any replica was asked. Only the event loop's thread changes it.

    Args:
        fleet: where pods that other replicas place are assumed.
        clock: seconds since the epoch.
        monotonic: seconds since any moment.
        max_pods: of so many pods it is remembered.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        max_pods: int = MAX_PODS,
    ) -> None:
        self.clock = clock
        self.monotonic = monotonic
        self.tell: Callable[[AnsweredQuestion], None] = lambda _: None
        """Tells other replicas; to be set before the first question."""
        self.on_elsewhere: list[Callable[[str, str, float], None]] = []
        """Are told of another replica's answer about a pod where none later is known: the UID, the
        verb, and when (seconds since the epoch). The pod may be bound, and judged, by then."""
        self.last_at: float | None = None
        self.wrong_paths: OrderedDict[str, float] = OrderedDict()
        self.forgotten_until = float("-inf")
        """Of pods that waited already then it may be forgotten that they were asked about."""
        self._fleet = fleet
        self._max_pods = max_pods
        self._pods: OrderedDict[str, _Asked] = OrderedDict()
        self._scored_at = float("-inf")
        self._lost: deque[tuple[float, float]] = deque(maxlen=MAX_INCIDENTS)
        self._slow: deque[tuple[float, float]] = deque(maxlen=MAX_INCIDENTS)
        self._unreadable: deque[float] = deque(maxlen=MAX_INCIDENTS)

    def __len__(self) -> int:
        return len(self._pods)

    def __contains__(self, uid: str) -> bool:
        return uid in self._pods

    # --- what we are asked ---------------------------------------------------------------------

    def note(self, question: AnsweredQuestion) -> None:
        """Remember what we were asked, and tell the other replicas."""
        self.last_at = question.at
        if question.uid:
            self._remember(question, is_elsewhere=False)
            self.tell(question)

    def note_answer(self, seconds: float, *, is_lost: bool) -> None:
        """Note how long an answer took, where that is more than it may, or nobody's to read."""
        if is_lost:
            self._lost.append((self.monotonic(), seconds))
        elif seconds >= SLOW_SECONDS:
            self._slow.append((self.monotonic(), seconds))

    def note_unreadable(self) -> None:
        """Note a question that could not be read."""
        self.last_at = self.monotonic()
        self._unreadable.append(self.last_at)

    def note_wrong_path(self, path: str) -> None:
        """Note a path that was asked and that we do not serve."""
        shown = path[:SHOWN_PATH]
        self.wrong_paths.pop(shown, None)
        self.wrong_paths[shown] = self.monotonic()
        if len(self.wrong_paths) > MAX_PATHS:
            self.wrong_paths.popitem(last=False)

    # --- what others are asked -----------------------------------------------------------------

    def take(self, question: AnsweredQuestion) -> None:
        """Remember what another replica was asked, and count the pod where that one placed it."""
        if not self._remember(question, is_elsewhere=True):
            return
        if question.resources:
            self._assume(question)
        age_seconds = self.monotonic() - question.at
        for tell in self.on_elsewhere:
            tell(question.uid, question.verb, self.clock() - age_seconds)

    def _assume(self, question: AnsweredQuestion) -> None:
        """Count a pod on another replica's first choice, by the same rules as on our own."""
        ledger, record = self._fleet.ledger, self._fleet.pods.get(question.uid)
        known = ledger.get(question.uid)
        is_firm = known is not None and known.expires_at is None
        if is_firm or (record is not None and (record.node or record.phase.is_terminal)):
            return
        left = question.at + self._fleet.policy.assumed.tentative_seconds - self.monotonic()
        offered = self._fleet.offered
        # Before the nodes are known any resource may be one that they offer.
        resources = tuple(part for part in question.resources if part[0] in offered or not offered)
        if not question.node or not resources or left <= 0:
            ledger.drop(question.uid)
            return
        ledger.assume(
            Assumption(
                uid=question.uid,
                key=question.key,
                node=question.node,
                resources=resources,
                memory_bytes=question.memory_bytes,
                expected_bytes=self._fleet.expected_bytes(record) if record else None,
                expires_at=self.clock() + left,
                last_word=record.message if record and record.is_unscheduled else None,
            )
        )

    # --- what is made of it ----------------------------------------------------------------------

    def verdict(self, uid: str) -> BypassVerdict:
        """Say what a bound pod got from us, as far as is known by now."""
        asked = self._pods.get(uid)
        return judge(
            asked.answers if asked else Answers.NONE,
            is_scoring=self.monotonic() - self._scored_at < SILENCE_SECONDS,
        )

    def is_elsewhere(self, uid: str) -> bool:
        """Whether another replica gave the last answer about a pod, as far as it has told."""
        asked = self._pods.get(uid)
        return asked is not None and asked.is_elsewhere

    def answered_at(self, uid: str) -> float | None:
        """Return when the last answer about a pod was given (monotonic seconds), if it is known."""
        asked = self._pods.get(uid)
        return None if asked is None else asked.at

    def forget(self, uid: str) -> None:
        """Forget a pod that is bound and judged, or gone."""
        self._pods.pop(uid, None)

    def expire(self) -> None:
        """Forget what is too old to matter."""
        now = self.monotonic()
        while self._pods:
            uid, oldest = next(iter(self._pods.items()))
            if now - oldest.at < KEPT_SECONDS:
                break
            del self._pods[uid]
            self.forgotten_until = max(self.forgotten_until, oldest.at)
        for incidents in (self._lost, self._slow):
            while incidents and now - incidents[0][0] > SILENCE_SECONDS:
                incidents.popleft()
        while self._unreadable and now - self._unreadable[0] > SILENCE_SECONDS:
            self._unreadable.popleft()
        for path in [path for path, at in self.wrong_paths.items() if now - at > SILENCE_SECONDS]:
            del self.wrong_paths[path]

    @property
    def incidents(self) -> tuple[int, int, int, float]:
        """Lost answers, slow ones, unreadable questions, and the slowest answer in seconds."""
        slowest = max((seconds for _, seconds in (*self._lost, *self._slow)), default=0.0)
        return len(self._lost), len(self._slow), len(self._unreadable), slowest

    def _remember(self, question: AnsweredQuestion, *, is_elsewhere: bool) -> bool:
        """Remember a question; return whether no later one about the pod is known."""
        at = question.at
        self.last_at = at if self.last_at is None else max(at, self.last_at)
        asked = self._pods.pop(question.uid, None) or _Asked(at)
        is_last = asked.is_before(question)
        if is_last:
            asked.is_elsewhere = is_elsewhere
        asked.at = max(asked.at, at)
        asked.last_at[question.verb] = max(asked.last_at.get(question.verb, at), at)
        asked.answers |= question.came_to
        if question.verb == PRIORITIZE:
            self._scored_at = max(self._scored_at, at)
        self._pods[question.uid] = asked
        if len(self._pods) > self._max_pods:
            _, oldest = self._pods.popitem(last=False)
            self.forgotten_until = max(self.forgotten_until, oldest.at)
        return is_last
