"""What an answer was about: noted on the answer, and told once that is on its way."""

from dataclasses import dataclass
from typing import Final

from aiohttp import web

from extender.placement.history import DecisionRecord
from extender.placement.request_log import AnsweredQuestion
from extender.webhook import wire


@dataclass(frozen=True, slots=True)
class About:
    """What an answer is about.

    Attributes:
        verb: filter or prioritize.
        question: what was asked.
        record: what was decided; None where nothing was.
    """

    verb: str
    question: wire.ExtenderRequest
    record: DecisionRecord | None

    def answered(self, shortlist: int, *, at: float, is_lost: bool) -> AnsweredQuestion:
        """Return which pod the answer is about, and where it places it.

        Args:
            shortlist: so many of the best nodes were named, 0 for all that pass.
            at: when it was given, in seconds of this process's monotonic clock.
            is_lost: kube-scheduler was gone before.
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
"""What an answer is about, where it is about a pod."""
