"""The real cert-manager: its controllers for certificates that a CA in the cluster signs."""

from pathlib import Path

from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary


def cert_manager(plane: ControlPlane, folder: Path) -> ServerProcess:
    """Describe cert-manager; `start` it once the API server knows its kinds.

    Args:
        plane: whose Certificates it has issued.
        folder: where its log goes.
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
