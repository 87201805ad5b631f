"""Log a repeated failure once for each cause."""

import logging
from typing import Final

from extender.kube.client import KubeError

_MAX_REMEMBERED: Final = 32


class OnceLogger:
    """Logs each cause of a failure once, and its end.

    Args:
        logger: receives the lines.
        failed: message for a failure; the cause is a field.
        recovered: message for the first success afterwards.
    """

    def __init__(self, logger: logging.Logger, failed: str, recovered: str) -> None:
        self._logger = logger
        self._failed = failed
        self._recovered = recovered
        self._causes: dict[str, None] = {}

    def note(self, error: KubeError) -> None:
        """Log a failure with a new cause; the API server's message names the verb and resource."""
        # A refusal also names the object, but the missing right is the same for all objects.
        cause = error.right or str(error)
        if cause in self._causes:
            return
        self._causes[cause] = None
        if len(self._causes) > _MAX_REMEMBERED:
            del self._causes[next(iter(self._causes))]
        self._logger.warning(self._failed, extra={"cause": str(error)})

    def end(self) -> None:
        """Record a success, and log it after a failure."""
        if self._causes:
            self._causes.clear()
            self._logger.info(self._recovered)
