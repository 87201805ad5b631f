"""kwok in place of the kubelets."""

from typing import Final

from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import MODULES, binary

STAGES: Final = MODULES / "kwok" / "stages.yaml"
ENDS_AFTER: Final = "test.idlegpu.io/ends-after"  # a duration as Go writes it, e.g. "500ms"
FAILS: Final = "test.idlegpu.io/fails"  # any value: the pod fails instead of succeeding


def kwok(plane: ControlPlane) -> ServerProcess:
    """Describe a kwok for all nodes; `start` it.

    A bound pod runs at once, ends as its annotations `ENDS_AFTER` and `FAILS` say, and is removed
    when it is deleted. Nodes are not changed.
    """
    port = free_port()
    command = [
        str(binary("kwok")),
        f"--kubeconfig={plane.kubeconfig()}",
        f"--config={STAGES}",
        "--manage-all-nodes=true",
        f"--server-address=127.0.0.1:{port}",
        "--node-lease-duration-seconds=0",  # no heartbeats: no controller checks them here
    ]
    return ServerProcess(
        name="kwok",
        command=command,
        folder=plane.folder,
        ready_url=f"http://127.0.0.1:{port}/healthz",
    )
