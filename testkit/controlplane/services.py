"""Processes behind all scenarios; started once, and restarted only after a test changed them."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Final

from testkit.controlplane.client import ApiClient
from testkit.controlplane.deployed import ExtenderServer, scheduler_config
from testkit.controlplane.kubelets import kwok
from testkit.controlplane.monitoring import EXTENDER_JOB
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.scheduler import kube_scheduler
from testkit.controlplane.shipped import OVERLAYS, built, find
from testkit.controlplane.telemetry import PrometheusServer
from testkit.controlplane.ways import Setup, elected

SCRAPE_SECONDS: Final = 1.0
"""With 0.5 s, the scrapes of thirty nodes time out on a busy machine, and their series end."""
HTTP_TIMEOUT: Final = "5s"
"""kube-scheduler's timeout of a call; 1 s as shipped. On a machine that runs five tests at once an
answer may take longer, and kube-scheduler would place the pod alone."""
WITHOUT_EXTENDER: Final = "E2E_WITHOUT_EXTENDER"
"""With this variable set kube-scheduler does not call the extender, and the scenarios must fail: a
check of the scenarios themselves."""


class Services:
    """Prometheus, extender, kube-scheduler and kwok of one control plane, for any event loop.

    Attributes:
        plane: etcd and kube-apiserver.
        setup: installation of extender and kube-scheduler.
        exporter_port: port of the fleet's exporter in every test.
        prometheus: Prometheus that scrapes that exporter.
        kubelets: kwok.
    """

    def __init__(self, plane: ControlPlane, setup: Setup | None = None) -> None:
        """Describe the processes of a control plane.

        Args:
            plane: running control plane.
            setup: installation; by default plain HTTP without manifests.
        """
        self.plane = plane
        self.setup = setup or Setup()
        self.exporter_port = free_port()
        self.prometheus = PrometheusServer(
            plane.folder,
            f"http://127.0.0.1:{self.exporter_port}/metrics",
            interval_seconds=SCRAPE_SECONDS,
            name="e2e-prometheus",
            tls=_scraping(self.setup),
        )
        self.extender = self.replica("extender")
        self.kubelets = kwok(plane)
        self._scheduler: ServerProcess | None = None
        self._scheduler_config = ""

    @property
    def scheduler(self) -> ServerProcess:
        """The current or last kube-scheduler."""
        if self._scheduler is None:
            raise RuntimeError("no kube-scheduler was started yet: call ensure_scheduler")
        return self._scheduler

    @property
    def started(self) -> Iterator[ServerProcess]:
        """Yield the extender and kube-scheduler, if they were started."""
        yield self.extender.process
        if self._scheduler is not None:
            yield self._scheduler

    def client(self) -> ApiClient:
        """Return an administrator's client of the API server: an async context manager."""
        return self.setup.client(self.plane)

    def replica(self, name: str) -> ExtenderServer:
        """Describe another replica of the extender; `ensure` starts it."""
        return ExtenderServer(self.plane, name=name, options=self.setup.options)

    def scheduler_config(self, changes: Mapping[str, object] | None = None) -> Object:
        """Return the shipped KubeSchedulerConfiguration with the extender's address.

        Calls time out after `HTTP_TIMEOUT`, if `changes` has no other value.

        Args:
            changes: fields of the extender's entry to change, e.g. `{"ignorable": False}`.
        """
        setup = self.setup
        return scheduler_config(
            self.extender.webhooks,
            {"httpTimeout": HTTP_TIMEOUT, **(changes or {})},
            file=setup.scheduler_file,
            certificates=setup.certificates and setup.certificates / "kube-scheduler",
        )

    async def ensure_scheduler(self, config: Object) -> None:
        """Make kube-scheduler run with a configuration."""
        if os.environ.get(WITHOUT_EXTENDER):
            config = {**config, "extenders": []}
        text = json.dumps(config, sort_keys=True)
        if self._scheduler is not None:
            if self._scheduler.is_running and text == self._scheduler_config:
                return
            await self._scheduler.stop()
        own: Object | None = None
        if kubeconfig := self.setup.scheduler_kubeconfig:
            connection = {**config.get("clientConnection", {}), "kubeconfig": str(kubeconfig)}
            election = await elected(self.plane, config)
            own = {"clientConnection": connection, "leaderElection": election}
        self._scheduler = kube_scheduler(self.plane, config, name="e2e-scheduler", own=own)
        self._scheduler_config = text
        await self._scheduler.start()

    async def ensure_kubelets(self, *, are_wanted: bool) -> None:
        """Start or stop kwok."""
        if are_wanted and not self.kubelets.is_running:
            await self.kubelets.start()
        if not are_wanted:
            await self.kubelets.stop()

    async def ensure_plane(self) -> None:
        """Start etcd and kube-apiserver if they do not run."""
        for process in (self.plane.etcd, self.plane.apiserver):
            if not process.is_running:
                await process.start()

    async def ensure_prometheus(self) -> None:
        """Start Prometheus if it does not run."""
        if not self.prometheus.process.is_running:
            await self.prometheus.process.start()

    def stop(self) -> None:
        """Kill all processes."""
        if self._scheduler is not None:
            self._scheduler.kill()
        for process in (self.extender.process, self.kubelets, self.prometheus.process):
            process.kill()


def _scraping(setup: Setup) -> Mapping[str, str]:
    """Return the ServiceMonitor's TLS options in Prometheus' own format."""
    if setup.certificates is None:
        return {}
    (endpoint,) = find(built(OVERLAYS / "monitoring"), "ServiceMonitor", EXTENDER_JOB)["spec"][
        "endpoints"
    ]
    tls = endpoint["tlsConfig"]
    ca_file = setup.certificates / "extender" / tls["ca"]["secret"]["key"]
    return {"ca_file": str(ca_file), "server_name": tls["serverName"]}
