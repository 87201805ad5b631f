"""Why an agent is refused: one of few reasons, counted, and said to it and in the log."""

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from http import HTTPStatus
from typing import Final

logger = logging.getLogger(__name__)

LOG_SECONDS: Final = 60.0
"""The same reason at the same sender is logged this often at most."""

MOST_REMEMBERED: Final = 2000


class Refusal(StrEnum):
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
    CLOSING = "closing"
    """The extender ends."""


STATUS: Final = {
    Refusal.NO_TOKEN: HTTPStatus.UNAUTHORIZED,
    Refusal.BAD_TOKEN: HTTPStatus.UNAUTHORIZED,
    Refusal.EXPIRED: HTTPStatus.UNAUTHORIZED,
    Refusal.WRONG_AUDIENCE: HTTPStatus.UNAUTHORIZED,
    Refusal.WRONG_ACCOUNT: HTTPStatus.FORBIDDEN,
    Refusal.NOT_BOUND: HTTPStatus.FORBIDDEN,
    Refusal.NOT_REVIEWED: HTTPStatus.SERVICE_UNAVAILABLE,
    Refusal.BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
    Refusal.CLOSING: HTTPStatus.SERVICE_UNAVAILABLE,
}
"""As HTTP says it; anything else is a bad request."""

EVERYDAY: Final = frozenset({Refusal.REPLACED, Refusal.CLOSING, Refusal.BUSY})
"""These happen in a cluster where all is well."""


class RefusedError(Exception):
    """An agent is refused; the message says why, and what to do.

    Attributes:
        refusal: which reason it is.
    """

    def __init__(self, refusal: Refusal, message: str) -> None:
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
        self.counts: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        self._monotonic = monotonic
        self._logged: dict[tuple[Refusal, str], tuple[float, int]] = {}

    def note(self, error: RefusedError, sender: str, address: str) -> None:
        """Count a refusal, and log it unless the same was logged lately.

        Args:
            error: why.
            sender: node of the token, "" where it is not known.
            address: where the connection came from.
        """
        self.counts[error.refusal] += 1
        key, now = (error.refusal, sender or address), self._monotonic()
        logged_at, unlogged = self._logged.get(key, (float("-inf"), 0))
        if now - logged_at < LOG_SECONDS:
            self._logged[key] = logged_at, unlogged + 1
            return
        if len(self._logged) >= MOST_REMEMBERED:
            self._logged.clear()
        self._logged[key] = now, 0
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
