"""Start a separate control plane with all services, for tests of other Kubernetes versions."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from testkit.controlplane.deployed import grant_rights
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.services import Services


@contextmanager
def services_on(plane: ControlPlane) -> Iterator[Services]:
    """Start a control plane and its services while the context is open."""
    running = Services(plane)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(plane.start())
            runner.run(grant_rights(plane))
        yield running
    finally:
        running.stop()
        plane.stop()
