"""Whether a scheduler is there: it holds its Lease as long as it renews it."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from extender.core.untyped import mapping_of, text_of
from extender.kube.client import KubeClient, KubeError

logger = logging.getLogger(__name__)

DURATION_SECONDS: Final = 15.0
"""Where the Lease does not say: what kube-scheduler writes unless told otherwise."""
MAX_DURATION_SECONDS: Final = 3600.0

TIMEOUT_SECONDS: Final = 5.0
LIMIT_BYTES: Final = 1 << 20
ACTION: Final = "get leases.coordination.k8s.io"


class SchedulerLease:
    """Looks at a Lease again and again; nobody who asks waits for that.

    A Lease counts from a renewal that was seen, on our own clock, for as long as it says itself:
    clocks of other machines are not trusted, and what a dead scheduler left behind proves nothing.

    Args:
        client: the API server.
        namespace: where the Lease is.
        name: its name.
        check_seconds: time between two looks.
        monotonic: seconds since any moment.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        check_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        self._name = f"{namespace}/{name}"
        self._check_seconds = check_seconds
        self._monotonic = monotonic
        self._seen: tuple[str, str] | None = None
        self._fresh_until = -math.inf
        self._was_fresh = False
        self._cause = ""

    @property
    def is_fresh(self) -> bool:
        """Whether somebody holds the Lease now."""
        return self._monotonic() < self._fresh_until

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._check_seconds * random.uniform(0.9, 1.1))

    async def look(self) -> None:
        """Look at the Lease once; a look that fails changes nothing, and time goes on."""
        # From before the question: the renewal is older than the answer.
        started = self._monotonic()
        try:
            lease = await self._client.get(
                self._path,
                {},
                action=ACTION,
                timeout_seconds=TIMEOUT_SECONDS,
                limit_bytes=LIMIT_BYTES,
            )
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                self._seen, self._fresh_until = ("", ""), -math.inf
            self._note(str(error))
        else:
            self._take(mapping_of(lease.get("spec")), started)
            self._note("")
        self._tell()

    def _take(self, spec: object, at: float) -> None:
        """Take what the Lease says."""
        told = mapping_of(spec)
        holder = text_of(told.get("holderIdentity"))
        seen = (holder, text_of(told.get("renewTime")))
        before, self._seen = self._seen, seen
        if not holder:  # given back
            self._fresh_until = -math.inf
        elif before is not None and seen != before:
            duration = told.get("leaseDurationSeconds")
            if not isinstance(duration, int) or duration <= 0:
                duration = DURATION_SECONDS
            self._fresh_until = at + min(float(duration), MAX_DURATION_SECONDS)

    def _note(self, cause: str) -> None:
        """Log a failure once, and once that it is over."""
        if cause and cause != self._cause:
            logger.warning(
                "cannot look at the scheduler's Lease", extra={"lease": self._name, "cause": cause}
            )
        self._cause = cause

    def _tell(self) -> None:
        """Log when the scheduler comes or goes."""
        if self.is_fresh == self._was_fresh:
            return
        self._was_fresh = self.is_fresh
        message = (
            "the scheduler is there: pods are given to it"
            if self._was_fresh
            else "the scheduler does not renew its Lease: pods keep theirs"
        )
        logger.info(message, extra={"lease": self._name})
