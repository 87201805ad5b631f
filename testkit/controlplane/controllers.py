"""Real kube-controller-manager, for tests in which workloads must create pods."""

from collections.abc import Sequence
from typing import Final

from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary

WORKLOADS: Final = (
    "daemonset-controller",
    "deployment-controller",
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "job-controller",
    "persistentvolume-binder-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "serviceaccount-controller",
    "ttl-after-finished-controller",
)
"""Controllers that tests of workloads need. Node controllers are left out, because no program sends
heartbeats here."""


def kube_controller_manager(
    plane: ControlPlane, controllers: Sequence[str] = WORKLOADS, *, options: Sequence[str] = ()
) -> ServerProcess:
    """Describe a kube-controller-manager with some of its controllers; `start` it.

    Args:
        plane: control plane with the objects.
        controllers: names of the controllers to run.
        options: further command line options.
    """
    port = free_port()
    command = [
        str(binary("kube-controller-manager")),
        f"--kubeconfig={plane.kubeconfig()}",
        f"--controllers={','.join(controllers)}",
        "--leader-elect=false",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={plane.folder / 'certificates' / 'kube-controller-manager'}",
        "--authentication-skip-lookup",
        "--authorization-always-allow-paths=/*",
        "--kube-api-qps=2000",
        "--kube-api-burst=4000",
        *options,
    ]
    return ServerProcess(
        name="kube-controller-manager",
        command=command,
        folder=plane.folder,
        ready_url=f"https://127.0.0.1:{port}/healthz",
    )
