"""Real cert-manager with its controllers for certificates from a CA in the cluster."""

from pathlib import Path

from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary


def cert_manager(plane: ControlPlane, folder: Path) -> ServerProcess:
    """Describe cert-manager; `start` it after its custom resources are installed.

    Args:
        plane: control plane whose Certificates it issues.
        folder: folder of its log.
    """
    address = f"127.0.0.1:{free_port()}"
    return ServerProcess(
        name="cert-manager",
        command=[
            str(binary("cert-manager")),
            f"--kubeconfig={plane.kubeconfig()}",
            f"--listen={address}",
        ],
        folder=folder,
        ready_url=f"http://{address}/healthz",
    )
