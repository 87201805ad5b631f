"""kwok, which plays the kubelets where pods should run."""

from typing import Final

from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import MODULES, binary

STAGES: Final = MODULES / "kwok" / "stages.yaml"
ENDS_AFTER: Final = "test.idlegpu.io/ends-after"  # a duration as Go writes it, e.g. "500ms"
FAILS: Final = "test.idlegpu.io/fails"  # any value: the pod ends as Failed


def kwok(plane: ControlPlane) -> ServerProcess:
    """Describe a kwok that plays every node's kubelet; `start` it to have it run.

    A bound pod runs at once, ends if its annotations `ENDS_AFTER` and `FAILS` say so, and is gone
    once it is deleted. Nodes are left as they are.
    """
    port = free_port()
    command = [
        str(binary("kwok")),
        f"--kubeconfig={plane.kubeconfig()}",
        f"--config={STAGES}",
        "--manage-all-nodes=true",
        f"--server-address=127.0.0.1:{port}",
        "--node-lease-duration-seconds=0",  # no heartbeats: no controller here checks them
    ]
    return ServerProcess(
        name="kwok",
        command=command,
        folder=plane.folder,
        ready_url=f"http://127.0.0.1:{port}/healthz",
    )
