"""Why an agent is refused: one of few reasons, counted, and said to it and in the log."""

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from extender.runtime.log_throttle import LogThrottle

logger = logging.getLogger(__name__)

MOST_LINES: Final = 500
"""A minute: of large fleets many nodes may have the same trouble, and each is to be named."""


class AgentRefusal(StrEnum):
    """Why an agent is refused, or its connection ended."""

    NO_TOKEN = "no-token"  # noqa: S105 - a reason
    BAD_TOKEN = "bad-token"  # noqa: S105 - a reason
    EXPIRED = "expired"
    WRONG_AUDIENCE = "wrong-audience"
    WRONG_ACCOUNT = "wrong-account"
    NOT_BOUND = "not-bound"
    """The token says no node, and no pod that has one."""
    WRONG_NODE = "wrong-node"
    """The report is of another node than the token."""
    NOT_REVIEWED = "not-reviewed"
    """The API server could not be asked about the token."""
    BUSY = "busy"
    BAD_REQUEST = "bad-request"
    BAD_REPORT = "bad-report"
    SILENT = "silent"
    REPLACED = "replaced"
    """The node has opened another connection."""
    FAULT = "fault"
    """The report made our own code fail."""
    CLOSING = "closing"
    """The extender ends."""


STATUS: Final = {
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
"""As HTTP says it; anything else is a bad request."""

EVERYDAY: Final = frozenset({AgentRefusal.REPLACED, AgentRefusal.CLOSING, AgentRefusal.BUSY})
"""These happen in a cluster where all is well."""


class RefusedError(Exception):
    """An agent is refused; the message says why, and what to do.

    Attributes:
        refusal: which reason it is.
    """

    def __init__(self, refusal: AgentRefusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


class Refusals:
    """Counts refusals, and logs each reason at each sender now and then.

    Args:
        monotonic: seconds since any moment.

    Attributes:
        counts: refusals by reason.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[AgentRefusal, int] = dict.fromkeys(AgentRefusal, 0)
        self._throttle = LogThrottle(most=MOST_LINES, monotonic=monotonic)

    def note(self, error: RefusedError, sender: str, address: str) -> None:
        """Count a refusal, and log it unless the same was logged lately.

        Args:
            error: why.
            sender: node of the token, "" where it is not known.
            address: where the connection came from.
        """
        self.counts[error.refusal] += 1
        unlogged = self._throttle.due(error.refusal, sender or address)
        if unlogged is None:
            return
        logger.log(
            logging.INFO if error.refusal in EVERYDAY else logging.WARNING,
            "agent refused",
            extra={
                "reason": error.refusal.value,
                "cause": str(error),
                "node": sender,
                "address": address,
                "also_unlogged": unlogged,
            },
        )
