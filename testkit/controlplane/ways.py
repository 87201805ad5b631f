"""Configurations in which scenarios run: plain, or as shipped with either scheduler.

The variable `E2E_WAY` selects one: see `Way`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from typing_extensions import override

from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.deployed import SCHEDULER_CONFIG, RunOptions, grant_rights
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ADMIN, SCHEDULER, ControlPlane
from testkit.controlplane.running import remove_certificates, shipped_options, wait_account
from testkit.controlplane.scheduler import DEFAULT_PROFILE
from testkit.controlplane.shipped import EXTENDER_NAMESPACE, MANIFESTS, SECOND_SCHEDULER

VARIABLE: Final = "E2E_WAY"
SECOND_NAME: Final = "idlegpu-scheduler"
DIVISION: Final = "idlegpu.io/scheduler"
"""Label and taint of the second scheduler's nodes."""

NO_AGENTS: Final[Mapping[str, str]] = {
    f"IDLEGPU_AGENTS_{name}": "" for name in ("LISTEN", "CERT_FILE", "KEY_FILE")
}
"""Variables that disable agents: each scenario sets nodes and port of agents in its settings."""

LEASE: Final[Mapping[str, object]] = {
    "leaseDuration": "10m",
    "renewDeadline": "9m",
    "retryPeriod": "1s",
}
"""Long lease for kube-scheduler: scenarios stop it, and it would end if it lost its Lease."""


class Way(StrEnum):
    """Configuration of extender and kube-scheduler."""

    PLAIN = "plain"
    """Plain HTTP and default settings, with users from the token file."""

    DEFAULT = "default"
    """The manifests, and the default scheduler with the shipped configuration."""

    SECOND = "second"
    """The manifests, and the second scheduler as its manifests say, on nodes of its own."""


def chosen_way() -> Way:
    """Return the configuration that the environment selects.

    Raises:
        ValueError: the variable has another value; the message lists the valid ones.
    """
    name = os.environ.get(VARIABLE) or Way.PLAIN
    if name not in list(Way):
        raise ValueError(f"{VARIABLE}={name}: must be one of {', '.join(Way)}")
    return Way(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Objects in a cluster before the first scenario; not bound to an event loop.

    Attributes:
        way: configuration of extender and kube-scheduler.
        options: options for running the extender; None for plain HTTP.
        certificates: folder of the Secrets as mounted volumes; None without certificates.
        scheduler_file: file of kube-scheduler's configuration.
        scheduler_kubeconfig: kubeconfig of kube-scheduler's user.
        items: applied objects.
    """

    way: Way = Way.PLAIN
    options: RunOptions | None = None
    certificates: Path | None = None
    scheduler_file: Path = SCHEDULER_CONFIG
    scheduler_kubeconfig: Path | None = None
    items: tuple[Object, ...] = ()

    @property
    def scheduler_name(self) -> str:
        """Name of the scheduler under test, for pods without a `schedulerName`."""
        return SECOND_NAME if self.way is Way.SECOND else DEFAULT_PROFILE

    @property
    def token(self) -> str:
        """Bearer token for the extender's API, "" if the API needs none."""
        return self.options.token if self.options else ""

    def client(self, plane: ControlPlane) -> ApiClient:
        """Return an administrator's client that creates objects for the scheduler under test."""
        if self.way is Way.SECOND:
            return OptingIn(plane.server, plane.ca_file, plane.users[ADMIN])
        return plane.client()


async def set_up(plane: ControlPlane, way: Way) -> Setup:
    """Install the shipped manifests as the documentation says, and wait until they are in force."""
    if way is Way.PLAIN:
        await grant_rights(plane)
        return Setup()
    certificates = plane.folder / "e2e-mounted"
    async with plane.client() as admin:
        installation = Installation(plane, admin)
        await installation.apply(MANIFESTS)
        options = await shipped_options(installation, certificates, NO_AGENTS)
        setup = Setup(
            way=way,
            options=options,
            certificates=certificates,
            scheduler_kubeconfig=plane.kubeconfig(SCHEDULER),
            items=tuple(installation.items),
        )
        if way is Way.DEFAULT:
            return setup
        await installation.apply(SECOND_SCHEDULER)
        lease = {"group": "coordination.k8s.io", "namespace": EXTENDER_NAMESPACE}
        await wait_account(installation, "scheduler", "update", "leases", **lease, name=SECOND_NAME)
        await wait_account(installation, "scheduler", "list", "pods")
        return replace(
            setup,
            scheduler_file=SECOND_SCHEDULER / "kube-scheduler.yaml",
            scheduler_kubeconfig=await installation.kubeconfig(EXTENDER_NAMESPACE, SECOND_NAME),
            items=tuple(installation.items),
        )


async def take_down(plane: ControlPlane, setup: Setup) -> None:
    """Remove the installed objects."""
    if setup.way is Way.PLAIN:
        return
    async with plane.client() as admin:
        installation = Installation(plane, admin)
        installation.items += setup.items
        await installation.remove()
        await remove_certificates(installation)


async def elected(plane: ControlPlane, config: Object) -> Object:
    """Return kube-scheduler's leader election, and delete its Lease.

    A killed kube-scheduler would hold the Lease until it expires.
    """
    election: Object = config["leaderElection"]
    namespace = election.get("resourceNamespace", "kube-system")
    name = election.get("resourceName", "kube-scheduler")
    async with plane.client() as admin:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        try:
            await admin.request("DELETE", path)
        except ApiError as error:
            if error.status != 404:  # no Lease exists yet
                raise
    return {**election, **LEASE}


class OptingIn(ApiClient):
    """Client that creates pods and nodes for the second scheduler."""

    @override
    async def create(self, item: Object) -> Object:
        """Create an object, changed for the second scheduler unless it names another."""
        return await super().create(opted_in(item))


def opted_in(item: Object) -> Object:
    """Return a pod that names the second scheduler, or a node with its label and taint.

    A pod gets the scheduler's name and a toleration, a node gets a label and a taint, as in
    docs/kube-scheduler.md. Bound pods and pods of other schedulers are not changed.
    """
    spec: Object = item.get("spec", {})
    if item["kind"] == "Pod":
        if spec.get("nodeName") or spec.get("schedulerName", SECOND_NAME) != SECOND_NAME:
            return item
        toleration = {"key": DIVISION, "value": SECOND_NAME, "effect": "NoSchedule"}
        tolerations = [*spec.get("tolerations", []), toleration]
        return {**item, "spec": {**spec, "schedulerName": SECOND_NAME, "tolerations": tolerations}}
    if item["kind"] == "Node":
        metadata: Object = item["metadata"]
        labels = {**metadata.get("labels", {}), DIVISION: SECOND_NAME}
        taint = {"key": DIVISION, "value": SECOND_NAME, "effect": "NoSchedule"}
        return {
            **item,
            "metadata": {**metadata, "labels": labels},
            "spec": {**spec, "taints": [*(spec.get("taints") or []), taint]},
        }
    return item
