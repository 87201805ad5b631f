"""Define the reasons to refuse agents; each is counted, logged, and sent to the agent."""

import logging
from collections.abc import Callable
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from extender.runtime.logs import LogThrottle

logger = logging.getLogger(__name__)

_MAX_LINES: Final = 500
"""Limit per minute: in a large cluster many nodes may have the same problem, and each is named."""


class AgentRefusal(StrEnum):
    """Reason to refuse an agent, or to end its connection."""

    NO_TOKEN = "no-token"  # noqa: S105 - a reason
    BAD_TOKEN = "bad-token"  # noqa: S105 - a reason
    EXPIRED = "expired"
    WRONG_AUDIENCE = "wrong-audience"
    WRONG_ACCOUNT = "wrong-account"
    NOT_BOUND = "not-bound"
    """The token names neither a node nor a pod with a node."""
    WRONG_NODE = "wrong-node"
    """The report is from another node than the token."""
    NOT_REVIEWED = "not-reviewed"
    """The API server could not review the token."""
    BUSY = "busy"
    BAD_REQUEST = "bad-request"
    BAD_REPORT = "bad-report"
    SILENT = "silent"
    REPLACED = "replaced"
    """The node has opened another connection."""
    FAULT = "fault"
    """A bug: the extender failed on the report."""
    CLOSING = "closing"
    """The extender is stopping."""


HTTP_STATUS: Final = {
    AgentRefusal.NO_TOKEN: HTTPStatus.UNAUTHORIZED,
    AgentRefusal.BAD_TOKEN: HTTPStatus.UNAUTHORIZED,
    AgentRefusal.EXPIRED: HTTPStatus.UNAUTHORIZED,
    AgentRefusal.WRONG_AUDIENCE: HTTPStatus.UNAUTHORIZED,
    AgentRefusal.WRONG_ACCOUNT: HTTPStatus.FORBIDDEN,
    AgentRefusal.NOT_BOUND: HTTPStatus.FORBIDDEN,
    AgentRefusal.NOT_REVIEWED: HTTPStatus.SERVICE_UNAVAILABLE,
    AgentRefusal.BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
    AgentRefusal.CLOSING: HTTPStatus.SERVICE_UNAVAILABLE,
}
"""HTTP status by reason; for others it is 400."""

_EXPECTED_REASONS: Final = frozenset(
    {AgentRefusal.REPLACED, AgentRefusal.CLOSING, AgentRefusal.BUSY}
)
"""Reasons that also occur in a healthy cluster, logged as information."""


class RefusedError(Exception):
    """An agent is refused; the message says why, and what to do."""

    def __init__(self, refusal: AgentRefusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


class Refusals:
    """Counts refused agents, and logs each reason per agent at a limited rate.

    Attributes:
        counts: refusals by reason.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.counts: dict[AgentRefusal, int] = dict.fromkeys(AgentRefusal, 0)
        self._throttle = LogThrottle(most=_MAX_LINES, monotonic=monotonic)

    def note(self, error: RefusedError, sender: str, address: str) -> None:
        """Count a refusal, and log it unless the same one was logged recently.

        Args:
            error: the refusal.
            sender: node of the token, "" if unknown.
            address: IP address of the agent.
        """
        self.counts[error.refusal] += 1
        unlogged = self._throttle.due(error.refusal, sender or address)
        if unlogged is None:
            return
        logger.log(
            logging.INFO if error.refusal in _EXPECTED_REASONS else logging.WARNING,
            "agent refused",
            extra={
                "reason": error.refusal.value,
                "cause": str(error),
                "node": sender,
                "address": address,
                "also_unlogged": unlogged,
            },
        )
