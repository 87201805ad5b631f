"""Hold a Lease, so that one of several replicas acts at a time.

The protocol is client-go's. `kubernetes_asyncio.leaderelection` is not used: it ends when a
connection breaks, logs each refusal with a traceback, never logs in again, writes local time as
UTC, and does not release the lease, so that after each rollout no replica would act for a while.
"""

import asyncio
import contextlib
import logging
import math
import random
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from extender.core.untyped import mapping_of, text_of
from extender.kube.client import KubeClient, KubeError, OnceLogger

logger = logging.getLogger(__name__)

_DURATION_SECONDS: Final = 15.0
"""Time after which another process takes over from one that died: as for kube-scheduler's Lease."""
_TIMEOUT_SECONDS: Final = 5.0
_RELEASE_SECONDS: Final = 2.0
_MAX_PAUSE_SECONDS: Final = 60.0

_HELD_SHARE: Final = 2 / 3
"""The holder relies on the lease for this share of its duration, and other processes wait for the
full duration. So clocks of different speeds and late answers never cause two holders."""

_PERIOD_SHARE: Final = 1 / 5
"""Share of the duration between two attempts to renew or take the lease."""

_RESOURCE: Final = "leases.coordination.k8s.io"


def make_identity() -> str:
    """Return a name that is unique to this process, also after a restart."""
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:12]}"


class Lease:
    """Takes and renews a Lease; two replicas never hold it at the same time.

    Args:
        namespace: namespace of the Lease.
        name: name of the Lease.
        identity: name of this process, unique among all processes.
        duration_seconds: a holder that does not renew for this long loses the lease.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        identity: str = "",
        duration_seconds: float = _DURATION_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity or make_identity()
        self._client = client
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._duration_seconds = duration_seconds
        self._monotonic = monotonic
        self._held_until = -math.inf
        self._seen_version = ""
        self._seen_at = -math.inf
        self._failures = 0
        self._once_logger = OnceLogger(
            logger, "cannot take the lease", "the lease can be taken again"
        )

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lease and may act."""
        return self._monotonic() < self._held_until

    async def run(self) -> None:
        """Take and renew the lease until cancelled, then release it."""
        try:
            while True:
                await self._try()
                await asyncio.sleep(self._pause_seconds())
        finally:
            with contextlib.suppress(KubeError, TimeoutError):
                async with asyncio.timeout(_RELEASE_SECONDS):
                    await self.release()

    async def attempt(self) -> None:
        """Take or renew the lease, unless another process holds it.

        Raises:
            KubeError: the request failed or was refused.
        """
        # Before the request, so that the lease expires for us before it expires for other
        # processes.
        started = self._monotonic()
        try:
            lease = await self._read()
            if lease is None:
                await self._create()
            elif self._is_free(lease, started):
                await self._renew(lease)
            else:
                self._held_until = -math.inf
                return
        except KubeError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            self._held_until = -math.inf  # another process was faster
            return
        self._held_until = started + self._duration_seconds * _HELD_SHARE

    async def release(self) -> None:
        """Release the lease, so that another process can take it at once.

        Raises:
            KubeError: the request failed or was refused.
        """
        if not self.is_held:
            return
        self._held_until = -math.inf
        lease = await self._read()
        if lease is not None and _holder(lease) == self.identity:
            await self._patch(lease, {"holderIdentity": None})

    async def _try(self) -> None:
        """Make one attempt, and log when the lease is taken or lost."""
        was_held = self.is_held
        try:
            await self.attempt()
        except KubeError as error:
            self._failures += 1
            self._once_logger.note(error)
        else:
            self._failures = 0
            self._once_logger.end()
        if self.is_held != was_held:
            message = "took the lease" if self.is_held else "lost the lease"
            logger.info(message, extra={"lease": self._name, "identity": self.identity})

    def _pause_seconds(self) -> float:
        """Return the time until the next attempt; failures lengthen it unless the lease is held."""
        pause = self._duration_seconds * _PERIOD_SHARE
        if self._failures and not self.is_held:
            pause = min(pause * 2.0 ** min(self._failures, 10), _MAX_PAUSE_SECONDS)
        return pause * random.uniform(0.8, 1.0)

    def _is_free(self, lease: Mapping[str, object], now: float) -> bool:
        """Return whether this process may take the lease: it is ours, free or expired.

        Expiry counts from the last change that we saw, because other clocks are not trusted.
        """
        version = text_of(mapping_of(lease.get("metadata")).get("resourceVersion"))
        if version != self._seen_version:
            self._seen_version, self._seen_at = version, now
        spec = mapping_of(lease.get("spec"))
        value = spec.get("leaseDurationSeconds")
        duration = value if isinstance(value, int) and value > 0 else self._duration_seconds
        is_over = now - self._seen_at > duration
        return _holder(lease) in {"", self.identity} or is_over

    async def _read(self) -> Mapping[str, object] | None:
        return await self._client.find(
            f"{self._path}/{self._name}",
            action=f"get {_RESOURCE}",
            timeout_seconds=_TIMEOUT_SECONDS,
        )

    async def _create(self) -> None:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": self._spec(transitions=0),
        }
        await self._send("POST", self._path, body)

    async def _renew(self, lease: Mapping[str, object]) -> None:
        value = mapping_of(lease.get("spec")).get("leaseTransitions")
        transitions = value if isinstance(value, int) else 0
        if _holder(lease) == self.identity:
            spec = self._spec(transitions=transitions)
            del spec["acquireTime"]
        else:
            spec = self._spec(transitions=transitions + 1)
        await self._patch(lease, spec)

    def _spec(self, *, transitions: int) -> dict[str, object]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self._duration_seconds),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    async def _patch(self, lease: Mapping[str, object], spec: Mapping[str, object]) -> None:
        """Patch the Lease at the version that was read; a change since then is a conflict."""
        version = text_of(mapping_of(lease.get("metadata")).get("resourceVersion"))
        body = {"metadata": {"resourceVersion": version}, "spec": spec}
        await self._send("PATCH", f"{self._path}/{self._name}", body)

    async def _send(self, method: str, path: str, body: object) -> None:
        await self._client.send(
            method,
            path,
            body,
            action=f"{'create' if method == 'POST' else 'patch'} {_RESOURCE}",
            timeout_seconds=_TIMEOUT_SECONDS,
        )


def _holder(lease: Mapping[str, object]) -> str:
    """Return the identity of the holder, or "" if there is none."""
    return text_of(mapping_of(lease.get("spec")).get("holderIdentity"))
