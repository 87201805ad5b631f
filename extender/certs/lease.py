"""Of several runs that make certificates in the same Secrets one at a time acts: by a Lease."""

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Final

from extender.effects.lease import Lease
from extender.kube import KubeClient, KubeError

LEASE_NAME: Final = "idlegpu-certs"

WAIT_SECONDS: Final = 60.0
"""A run takes a second or two, and one that died loses its lease after 15 s. Whoever holds it for
longer keeps nobody from renewing what ends: that what is written is what was read is checked."""

PAUSE_SECONDS: Final = (0.2, 0.4)


@contextlib.asynccontextmanager
async def alone_with(
    client: KubeClient, namespace: str, *, wait_seconds: float = WAIT_SECONDS
) -> AsyncIterator[None]:
    """Keep others, who do the same, from changing the Secrets meanwhile: they wait.

    Without a right to the Lease, or where another does not let go of it, this is said on standard
    error, and nobody is kept from anything.

    Args:
        client: the API server.
        namespace: of the Secrets, and of the Lease.
        wait_seconds: how long another is waited for.

    Raises:
        KubeError: the API server could not be asked.
    """
    lease = Lease(client, namespace=namespace, name=LEASE_NAME)
    trouble = await _take(lease, wait_seconds)
    if trouble:
        sys.stderr.write(f"warning: not alone with the Secrets: {trouble}\n")
        yield
        return
    renewing = asyncio.create_task(lease.run(), name="certs lease")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        # What is cancelled before it began gives nothing back by itself.
        with contextlib.suppress(KubeError):
            await lease.release()


async def _take(lease: Lease, wait_seconds: float) -> str:
    """Take the Lease, at once where nobody has it; return why it is not ours, "" where it is."""
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
        await asyncio.sleep(random.uniform(*PAUSE_SECONDS))
    return f"another holds the Lease {LEASE_NAME} for more than {wait_seconds:g} s"
