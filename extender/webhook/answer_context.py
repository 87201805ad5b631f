"""Attach the pod and the decision to an HTTP answer, to record them after it was sent."""

from dataclasses import dataclass
from typing import Final

from aiohttp import web

from extender.placement.history import DecisionRecord
from extender.placement.request_log import AnsweredQuestion
from extender.webhook import wire


@dataclass(frozen=True, slots=True)
class About:
    """The request and the decision behind an answer.

    Attributes:
        verb: filter or prioritize.
        question: the decoded request.
        record: the decision; None if none was made.
    """

    verb: str
    question: wire.ExtenderRequest
    record: DecisionRecord | None

    def answered(self, shortlist: int, *, at: float, is_lost: bool) -> AnsweredQuestion:
        """Build the entry for the request log: the pod, and the node that was its first choice.

        Args:
            shortlist: maximum number of nodes in filter's answer; 0 for all that pass.
            at: time of the answer, seconds of this process's monotonic clock.
            is_lost: whether kube-scheduler had disconnected before the answer.
        """
        record = self.record
        if record is None:
            pod = self.question.about
            return AnsweredQuestion(
                verb=self.verb,
                uid=pod.uid,
                key=pod.key,
                at=at,
                choices=len(self.question.nodes),
                is_lost=is_lost,
            )
        feasible = record.decision.feasible
        return AnsweredQuestion(
            verb=self.verb,
            uid=record.pod.uid,
            key=record.pod.key,
            at=at,
            choices=min(feasible, shortlist or feasible),
            is_lost=is_lost,
            node=record.decision.best or "",
            resources=record.request.resources,
            memory_bytes=record.request.memory_bytes,
        )


ABOUT: Final = web.ResponseKey("about", About)
"""Key of the `About` of an answer about a pod."""
