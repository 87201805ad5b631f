"""Certificates from the real cert-manager."""

from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from extender.server.certificates.storing import CA_SECRET, SECRETS
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.running import SECRETS_PATH
from testkit.controlplane.shipped import EXTENDER_NAMESPACE
from testkit.controlplane.tools import binary
from testkit.controlplane.waiting import wait_for


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


CERT_MANAGER_PATH: Final = f"/apis/cert-manager.io/v1/namespaces/{EXTENDER_NAMESPACE}"


async def create(installation: Installation, secrets: Mapping[str, Mapping[str, bytes]]) -> None:
    """Create Secrets as cert-manager does."""
    for name, data in secrets.items():
        secret: Object = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "type": "kubernetes.io/tls",
            "data": {key: b64encode(content).decode() for key, content in data.items()},
        }
        await installation.admin.request("POST", SECRETS_PATH, secret)


@asynccontextmanager
async def issuing(folder: Path, installation: Installation) -> AsyncIterator[None]:
    """Run cert-manager, and yield once it has issued the certificates of the applied objects."""
    program = cert_manager(installation.plane, folder)
    await program.start()

    async def are_issued() -> bool:
        return (await issued(installation)).keys() >= {CA_SECRET, *SECRETS.values()}

    try:
        await wait_for(are_issued, "cert-manager has issued all certificates")
        yield
    finally:
        await program.stop()  # otherwise it would recreate objects that are deleted after the test
        # No controller deletes the dependents of Certificates, whose names the next ones reuse.
        await installation.admin.request("DELETE", f"{CERT_MANAGER_PATH}/certificaterequests")


async def issued(installation: Installation) -> dict[str, dict[str, bytes]]:
    """Return the current Secrets with certificates."""
    listed = (await installation.admin.request("GET", SECRETS_PATH))["items"]
    return {
        item["metadata"]["name"]: {key: b64decode(text) for key, text in item["data"].items()}
        for item in listed
        if item.get("data", {}).get("tls.crt")
    }


SERVICE: Final = "idlegpu-extender.idlegpu.svc"
EXTENDER: Final = SECRETS["extender"]
SCHEDULER: Final = SECRETS["kube-scheduler"]
ONES_OWN: Final[Mapping[str, Object]] = {
    EXTENDER: {
        "commonName": "idlegpu-extender",
        "dnsNames": [SERVICE],
        "usages": ["digital signature", "server auth", "client auth"],
    },
    SCHEDULER: {
        "commonName": "idlegpu-kube-scheduler",
        "dnsNames": ["idlegpu-kube-scheduler"],
        "usages": ["digital signature", "client auth"],
    },
}
"""Requirements of docs/install.md for an organization's own certificates."""
