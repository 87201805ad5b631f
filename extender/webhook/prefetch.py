"""Compute the answer to the next prioritize request in advance.

kube-scheduler sends prioritize the nodes of filter's answer, in the same order, after its own
plugins have scored them. The answer can be ready by then.
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
    """A filter request and its answer.

    Attributes:
        body: body of the request.
        question: the decoded request.
        pod: the pod.
        request: the pod's GPU request.
        answer: body of the answer.
        answered_at: time of the answer, `time.perf_counter`.
    """

    body: bytes
    question: wire.ExtenderRequest
    pod: PodRef
    request: GpuRequest
    answer: bytes
    answered_at: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefetchedRequest:
    """A prioritize request that is expected, and its answer.

    Attributes:
        body: expected body of the request.
        question: the same, decoded.
        max_score: highest score on the wire.
        weighed: the decision; the caller must check that it is still valid.
        answer: body of the answer.
        filtered_at: time of filter's answer, `time.perf_counter`.
    """

    body: bytes
    question: wire.ExtenderRequest
    max_score: int
    weighed: Weighed
    answer: bytes
    filtered_at: float


class Prefetch:
    """Holds the answer to the next prioritize request."""

    def __init__(self) -> None:
        self._prefetched: PrefetchedRequest | None = None

    def look(
        self, placer: Placer, filtered: FilteredRequest, shortlist: int, max_score: int
    ) -> None:
        """Compute the answer to the prioritize request that follows a filter request.

        This changes no state of the placer.

        Args:
            placer: ranks the nodes.
            filtered: the filter request and its answer.
            shortlist: minimum number of nodes to rank.
            max_score: highest score on the wire.
        """
        answer, at = filtered.answer, filtered.body.find(NAMES_KEY)
        start, end = answer.find(NAMES_KEY) + len(NAMES_KEY), answer.find(_AFTER_NAMES)
        if at < 0 or not len(NAMES_KEY) <= start < end:
            return
        nodes = read_names(
            answer, start, end, placer.fleet.node_index, len(filtered.question.nodes)
        )
        if nodes is None:
            return
        question = replace(filtered.question, nodes=nodes)
        weighed = placer.weigh(filtered.pod, filtered.request, nodes, ranked=shortlist)
        self._prefetched = PrefetchedRequest(
            body=b"".join((filtered.body[:at], NAMES_KEY, answer[start:end], b"}")),
            question=question,
            max_score=max_score,
            weighed=weighed,
            answer=wire.encode_scores(question, weighed.decision, max_score),
            filtered_at=filtered.answered_at,
        )

    def forget(self, pod: PodRef) -> None:
        """Drop the answer for a pod, because its prioritize request will not come."""
        if self._prefetched is not None and self._prefetched.weighed.pod == pod:
            self._prefetched = None

    def take(self, body: bytes, max_score: int) -> PrefetchedRequest | None:
        """Return and drop the answer computed for this request body, None if there is none."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or body != prefetched.body or max_score != prefetched.max_score:
            return None
        return prefetched
