"""Hold a Lease, so that only one run at a time changes the certificate Secrets."""

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Final

from extender.kube.client import KubeClient, KubeError
from extender.kube.lease import Lease

LEASE_NAME: Final = "idlegpu-certs"

_WAIT_SECONDS: Final = 60.0
"""Time to wait for another run. A run takes 1 to 2 s, and a dead run loses its Lease after 15 s.
After this time the run continues without the Lease, because `resourceVersion` protects every
write."""

_PAUSE_SECONDS: Final = (0.2, 0.4)


@contextlib.asynccontextmanager
async def hold_lease(
    client: KubeClient, namespace: str, *, wait_seconds: float = _WAIT_SECONDS
) -> AsyncIterator[None]:
    """Hold the Lease for the certificate Secrets while the block runs; other runs wait.

    If the Lease is forbidden or another run does not release it, print a warning to standard error
    and continue without it.

    Args:
        client: client for the API server.
        namespace: namespace of the Secrets and of the Lease.
        wait_seconds: time to wait for another holder.

    Raises:
        KubeError: the API server cannot be reached or refuses the request.
    """
    lease = Lease(client, namespace=namespace, name=LEASE_NAME)
    problem = await _acquire(lease, wait_seconds)
    if problem:
        sys.stderr.write(
            f"warning: another run may change the Secrets at the same time: {problem}\n"
        )
        yield
        return
    renewing = asyncio.create_task(lease.run(), name="certs lease")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        # A task cancelled before its first step has not released the Lease.
        with contextlib.suppress(KubeError):
            await lease.release()


async def _acquire(lease: Lease, wait_seconds: float) -> str:
    """Acquire the Lease; return the reason for a failure, "" on success."""
    ends = time.monotonic() + wait_seconds
    while time.monotonic() < ends:
        try:
            await lease.attempt()
        except KubeError as error:
            if error.status == HTTPStatus.FORBIDDEN:
                return str(error)
            raise
        if lease.is_held:
            return ""
        await asyncio.sleep(random.uniform(*_PAUSE_SECONDS))
    return f"another run holds the Lease {LEASE_NAME} for more than {wait_seconds:g} s"
