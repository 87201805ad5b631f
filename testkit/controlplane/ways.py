"""The ways in which scenarios are run: plainly, or as what is shipped says, with either scheduler.

`E2E_WAY` names one: see `Way`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from typing_extensions import override

from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.deployed import SCHEDULER_CONFIG, Manner, grant_rights
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ADMIN, SCHEDULER, ControlPlane
from testkit.controlplane.running import remove_certificates, shipped_manner, wait_account
from testkit.controlplane.scheduler import DEFAULT_PROFILE
from testkit.controlplane.shipped import EXTENDER_NAMESPACE, MANIFESTS, SECOND_SCHEDULER

VARIABLE: Final = "E2E_WAY"
SECOND_NAME: Final = "idlegpu-scheduler"
DIVISION: Final = "idlegpu.io/scheduler"
"""Label and taint of the second scheduler's nodes."""

NO_AGENTS: Final[Mapping[str, str]] = {
    f"IDLEGPU_AGENTS_{name}": "" for name in ("LISTEN", "CERT_FILE", "KEY_FILE")
}
"""Likewise: which nodes have agents, and where they report, each scenario says in its settings."""

LEASE: Final[Mapping[str, object]] = {
    "leaseDuration": "10m",
    "renewDeadline": "9m",
    "retryPeriod": "1s",
}
"""Likewise of kube-scheduler, which scenarios halt, and which ends where it loses its Lease."""


class Way(StrEnum):
    """How extender and kube-scheduler are run."""

    PLAIN = "plain"
    """Both on plain HTTP, with default settings, as users that the API server is told of."""

    DEFAULT = "default"
    """As the manifests say, asked by a default scheduler with the shipped configuration."""

    SECOND = "second"
    """Likewise, asked by the second scheduler as its own manifests say, on nodes of its own."""


def chosen_way() -> Way:
    """Return the way that the environment names.

    Raises:
        ValueError: it names none; the message says which there are.
    """
    name = os.environ.get(VARIABLE) or Way.PLAIN
    if name not in list(Way):
        raise ValueError(f"{VARIABLE}={name}: must be one of {', '.join(Way)}")
    return Way(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is in a cluster before the first scenario; bound to no event loop.

    Attributes:
        way: how extender and kube-scheduler are run.
        manner: how the extender is; None for plainly.
        certificates: folder of the Secrets, as volumes show them; None for none.
        scheduler_file: kube-scheduler's configuration.
        scheduler_kubeconfig: who kube-scheduler is.
        items: the objects that were applied.
    """

    way: Way = Way.PLAIN
    manner: Manner | None = None
    certificates: Path | None = None
    scheduler_file: Path = SCHEDULER_CONFIG
    scheduler_kubeconfig: Path | None = None
    items: tuple[Object, ...] = ()

    @property
    def scheduler_name(self) -> str:
        """The scheduler of pods that name none."""
        return SECOND_NAME if self.way is Way.SECOND else DEFAULT_PROFILE

    @property
    def token(self) -> str:
        """Opens the extender's API, "" where it is open."""
        return self.manner.token if self.manner else ""

    def client(self, plane: ControlPlane) -> ApiClient:
        """Return an administrator's client, whose pods and nodes are the scheduler's."""
        if self.way is Way.SECOND:
            return OptingIn(plane.server, plane.ca_file, plane.users[ADMIN])
        return plane.client()


async def set_up(plane: ControlPlane, way: Way) -> Setup:
    """Install what is shipped, as the documentation says, and wait until it is in force."""
    if way is Way.PLAIN:
        await grant_rights(plane)
        return Setup()
    certificates = plane.folder / "e2e-mounted"
    async with plane.client() as admin:
        installation = Installation(plane, admin)
        await installation.apply(MANIFESTS)
        manner = await shipped_manner(installation, certificates, NO_AGENTS)
        setup = Setup(
            way=way,
            manner=manner,
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
    """Remove what was installed."""
    if setup.way is Way.PLAIN:
        return
    async with plane.client() as admin:
        installation = Installation(plane, admin)
        installation.items += setup.items
        await installation.remove()
        await remove_certificates(installation)


async def elected(plane: ControlPlane, config: Object) -> Object:
    """Return a kube-scheduler's leader election, without a leader yet.

    One that was killed would hold the Lease until it is over.
    """
    election: Object = config["leaderElection"]
    namespace = election.get("resourceNamespace", "kube-system")
    name = election.get("resourceName", "kube-scheduler")
    async with plane.client() as admin:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        try:
            await admin.request("DELETE", path)
        except ApiError as error:
            if error.status != 404:  # no leader was elected
                raise
    return {**election, **LEASE}


class OptingIn(ApiClient):
    """Creates pods and nodes as users of the second scheduler do."""

    @override
    async def create(self, item: Object) -> Object:
        """Create an object, for the second scheduler where it says nothing else."""
        return await super().create(opted_in(item))


def opted_in(item: Object) -> Object:
    """Return a pod that waits for the second scheduler, or a node that is left to it.

    What docs/kube-scheduler.md asks for: a pod's name of the scheduler and toleration, a node's
    label and taint. Pods that are on a node already, or of yet another scheduler, stay as they are.
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
