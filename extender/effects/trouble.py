"""Says once what is wrong, however often it is tried again."""

import logging
from typing import Final

from extender.kube import KubeError

MAX_REMEMBERED: Final = 32


class Trouble:
    """Logs each cause of a failure once, and once that it is over.

    Args:
        logger: where to.
        failed: message for a failure; its cause goes beside it.
        recovered: message for its end.
    """

    def __init__(self, logger: logging.Logger, failed: str, recovered: str) -> None:
        self._logger = logger
        self._failed = failed
        self._recovered = recovered
        self._causes: dict[str, None] = {}

    def note(self, error: KubeError) -> None:
        """Take a failure; the API server's message names the verb, the resource and the cure."""
        # A refusal names the object, too: of many objects it is one right all the same.
        cause = error.right or str(error)
        if cause in self._causes:
            return
        self._causes[cause] = None
        if len(self._causes) > MAX_REMEMBERED:
            del self._causes[next(iter(self._causes))]
        self._logger.warning(self._failed, extra={"cause": str(error)})

    def end(self) -> None:
        """Take a success."""
        if self._causes:
            self._causes.clear()
            self._logger.info(self._recovered)
