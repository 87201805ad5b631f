"""The processes behind all scenarios: started once, and anew only where a test changed them."""

import json
import os
from typing import Final

from tests.controlplane.deployed import ExtenderServer
from tests.controlplane.kubelets import kwok
from tests.controlplane.objects import Object
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import ServerProcess, free_port
from tests.controlplane.scheduler import kube_scheduler
from tests.controlplane.telemetry import PrometheusServer

SCRAPE_SECONDS: Final = 0.5
WITHOUT_EXTENDER: Final = "E2E_WITHOUT_EXTENDER"
"""With this variable set kube-scheduler decides alone, and the scenarios must fail: a check of
the scenarios themselves."""


class Services:
    """Prometheus, extender, kube-scheduler and kwok of one control plane; bound to no event loop.

    Attributes:
        plane: etcd and kube-apiserver.
        exporter_port: where the fleet's exporter of every test is.
        prometheus: scrapes that exporter.
        extender: the extender.
        kubelets: kwok.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.exporter_port = free_port()
        self.prometheus = PrometheusServer(
            plane.folder,
            f"http://127.0.0.1:{self.exporter_port}/metrics",
            interval_seconds=SCRAPE_SECONDS,
            name="e2e-prometheus",
        )
        self.extender = ExtenderServer(plane)
        self.kubelets = kwok(plane)
        self._scheduler: ServerProcess | None = None
        self._scheduler_config = ""

    @property
    def scheduler(self) -> ServerProcess:
        """The kube-scheduler that runs, or ran last."""
        if self._scheduler is None:
            raise RuntimeError("no kube-scheduler was started yet: call ensure_scheduler")
        return self._scheduler

    async def ensure_scheduler(self, config: Object) -> None:
        """Have kube-scheduler run with a configuration."""
        if os.environ.get(WITHOUT_EXTENDER):
            config = {**config, "extenders": []}
        text = json.dumps(config, sort_keys=True)
        if self._scheduler is not None:
            if self._scheduler.is_running and text == self._scheduler_config:
                return
            await self._scheduler.stop()
        self._scheduler = kube_scheduler(self.plane, config, name="e2e-scheduler")
        self._scheduler_config = text
        await self._scheduler.start()

    async def ensure_kubelets(self, *, are_wanted: bool) -> None:
        """Have kwok run, or not."""
        if are_wanted and not self.kubelets.is_running:
            await self.kubelets.start()
        if not are_wanted:
            await self.kubelets.stop()

    async def ensure_plane(self) -> None:
        """Have etcd and kube-apiserver run."""
        for process in (self.plane.etcd, self.plane.apiserver):
            if not process.is_running:
                await process.start()

    async def ensure_prometheus(self) -> None:
        """Have Prometheus run."""
        if not self.prometheus.process.is_running:
            await self.prometheus.process.start()

    def stop(self) -> None:
        """End all of them at once."""
        if self._scheduler is not None:
            self._scheduler.kill()
        for process in (self.extender.process, self.kubelets, self.prometheus.process):
            process.kill()
