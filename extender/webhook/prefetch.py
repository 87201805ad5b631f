"""What prioritize will ask, decided before it does.

kube-scheduler asks prioritize about the nodes that filter has named, in its order, once its own
plugins have scored them: time enough to have the answer ready.
"""

from dataclasses import dataclass, replace
from typing import Final

from extender.core.request.request import GpuRequest, PodRef
from extender.placement.placer import Placer, Weighed
from extender.webhook import wire
from extender.webhook.name_list import NAMES_KEY, read_names

_AFTER_NAMES: Final = b',"FailedNodes":'


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredRequest:
    """A question of filter, and what was answered.

    Attributes:
        body: the question as it came.
        question: the same, decoded.
        pod: the pod that it is about.
        request: what the pod asks for.
        answer: the body of the answer.
        answered_at: when, `time.perf_counter`.
    """

    body: bytes
    question: wire.ExtenderRequest
    pod: PodRef
    request: GpuRequest
    answer: bytes
    answered_at: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefetchedRequest:
    """A question of prioritize that has not been asked yet.

    Attributes:
        body: the question as it would come.
        question: the same, decoded.
        max_score: highest score on the wire.
        weighed: what was decided; whoever takes it looks whether it still holds.
        answer: the body of the answer.
        filtered_at: when filter was answered, `time.perf_counter`.
    """

    body: bytes
    question: wire.ExtenderRequest
    max_score: int
    weighed: Weighed
    answer: bytes
    filtered_at: float


class Prefetch:
    """Looks one question ahead."""

    def __init__(self) -> None:
        self._foreseen: PrefetchedRequest | None = None

    def look(
        self, placer: Placer, filtered: FilteredRequest, shortlist: int, max_score: int
    ) -> None:
        """Decide what prioritize will ask; nothing is changed by that.

        Args:
            placer: decides.
            filtered: what filter was asked and has answered.
            shortlist: so many of the best nodes are put in order at least.
            max_score: highest score on the wire.
        """
        answer, at = filtered.answer, filtered.body.find(NAMES_KEY)
        start, end = answer.find(NAMES_KEY) + len(NAMES_KEY), answer.find(_AFTER_NAMES)
        if at < 0 or not len(NAMES_KEY) <= start < end:
            return
        nodes = read_names(answer, start, end, placer.node_index, len(filtered.question.nodes))
        if nodes is None:
            return
        question = replace(filtered.question, nodes=nodes)
        weighed = placer.weigh(filtered.pod, filtered.request, nodes, ranked=shortlist)
        self._foreseen = PrefetchedRequest(
            body=b"".join((filtered.body[:at], NAMES_KEY, answer[start:end], b"}")),
            question=question,
            max_score=max_score,
            weighed=weighed,
            answer=wire.encode_scores(question, weighed.decision, max_score),
            filtered_at=filtered.answered_at,
        )

    def forget(self, pod: PodRef) -> None:
        """Forget what was foreseen for a pod: it will not be asked, and it takes memory."""
        if self._foreseen is not None and self._foreseen.weighed.pod == pod:
            self._foreseen = None

    def take(self, body: bytes, max_score: int) -> PrefetchedRequest | None:
        """Return what was foreseen of a question of prioritize, if anything; once."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None or body != foreseen.body or max_score != foreseen.max_score:
            return None
        return foreseen
