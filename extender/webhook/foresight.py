"""What prioritize will ask, decided before it does.

kube-scheduler asks prioritize about the nodes that filter has named, in its order, once its own
plugins have scored them: time enough to have the answer ready.
"""

from dataclasses import dataclass, replace
from typing import Final

from extender.core.names import JsonNames
from extender.core.request import GpuRequest, PodRef
from extender.placement.placer import Placer, Weighed
from extender.webhook import wire

_AFTER_NAMES: Final = b',"FailedNodes":'


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Foreseen:
    """A question of prioritize that has not been asked yet.

    Attributes:
        pod: the pod, as it was read.
        nodes: the nodes.
        max_score: highest score on the wire.
        weighed: what was decided; whoever takes it looks whether it still holds.
        answer: the body of the answer.
    """

    pod: wire.JsonObject
    nodes: JsonNames
    max_score: int
    weighed: Weighed
    answer: bytes


class Foresight:
    """Looks one question ahead."""

    def __init__(self) -> None:
        self._foreseen: Foreseen | None = None

    def look(  # noqa: PLR0913, PLR0917 - what an answer depends on
        self,
        placer: Placer,
        question: wire.Question,
        answer: bytes,
        pod: PodRef,
        request: GpuRequest,
        shortlist: int,
        max_score: int,
    ) -> None:
        """Decide what prioritize will ask; nothing is changed by that.

        Args:
            placer: decides.
            question: what filter was asked.
            answer: what it said.
            pod: the pod.
            request: what it asks for.
            shortlist: so many of the best nodes are put in order at least.
            max_score: highest score on the wire.
        """
        nodes = named_by(answer)
        if nodes is None:
            return
        weighed = placer.weigh(pod, request, nodes, ranked=shortlist)
        scores = wire.encode_scores(replace(question, nodes=nodes), weighed.decision, max_score)
        self._foreseen = Foreseen(
            pod=question.pod, nodes=nodes, max_score=max_score, weighed=weighed, answer=scores
        )

    def forget(self) -> None:
        """Forget what was foreseen: it has been asked, or will not be, and it takes memory."""
        self._foreseen = None

    def take(self, question: wire.Question, max_score: int) -> Foreseen | None:
        """Return what was foreseen of a question of prioritize, if anything; once."""
        foreseen, self._foreseen = self._foreseen, None
        is_foreseen = (
            foreseen is not None
            and question.pod is foreseen.pod
            and isinstance(question.nodes, JsonNames)
            and question.nodes.text == foreseen.nodes.text
            and max_score == foreseen.max_score
        )
        return foreseen if is_foreseen else None


def named_by(answer: bytes) -> JsonNames | None:
    """Return the nodes that an answer of filter names, None where these are whole objects."""
    key = wire.NAMES_KEY
    start, end = answer.find(key) + len(key), answer.find(_AFTER_NAMES)
    return JsonNames.read(answer[start:end]) if len(key) <= start < end else None
