"""Control plane: etcd and kube-apiserver, with users, kubeconfigs and kubectl."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.kubeconfig import User, write_kubeconfig, write_token_file
from testkit.controlplane.objects import Object
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary
from testkit.controlplane.waiting import wait_for

ADMIN: Final = "admin"
SCHEDULER: Final = "scheduler"
EXTENDER: Final = "extender"
# The extender's user is the service account of manifests/, so that tests with applied manifests
# also test its rights. Without the manifests it has no rights.
EXTENDER_ACCOUNT: Final = "system:serviceaccount:idlegpu:idlegpu-extender"
KUBECTL_TIMEOUT_SECONDS: Final = 30.0
# Paths of the kinds to delete before the next test. Pods come before nodes, so that no pod outlives
# its node. Namespaces stay, because no controller finalizes them.
LEFTOVERS: Final = (
    "/api/v1/pods",
    "/api/v1/nodes",
    "/apis/scheduling.k8s.io/v1/priorityclasses",
    "/apis/policy/v1/poddisruptionbudgets",
    "/apis/resource.k8s.io/v1/resourceclaims",
    "/apis/resource.k8s.io/v1/resourceslices",
    "/apis/resource.k8s.io/v1/deviceclasses",
    "/apis/storage.k8s.io/v1/csistoragecapacities",
)


class ControlPlane:
    """etcd and kube-apiserver on free ports of 127.0.0.1.

    It is not bound to an event loop: a session's fixture may start it, and each test may use it.

    Attributes:
        folder: folder for data, certificates, kubeconfigs and logs.
        users: users by the short names `ADMIN`, `SCHEDULER`, `EXTENDER`.
        server: base URL of the API server.
        ca_file: CA of the API server's certificate.
        release: prefix of its programs' names in `tools.TOOLS`; "" for the newest release.
        features: feature gates to enable in all of its programs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        release: str = "",
        features: Sequence[str] = (),
        apis: Sequence[str] = (),
    ) -> None:
        """Describe a control plane; `start` it.

        Args:
            folder: empty folder.
            release: see the attribute.
            features: see the attribute.
            apis: group versions to serve besides the default ones.
        """
        self.folder = folder
        self.release = release
        self.features = features
        self.users = {
            ADMIN: User(name="admin", groups=("system:masters",)),
            SCHEDULER: User(name="system:kube-scheduler"),
            EXTENDER: User(name=EXTENDER_ACCOUNT, groups=("system:serviceaccounts",)),
        }
        etcd_port, peer_port, port = free_port(), free_port(), free_port()
        self.server = f"https://127.0.0.1:{port}"
        self.ca_file = folder / "certificates" / "apiserver.crt"
        self.etcd = _etcd(folder, port=etcd_port, peer_port=peer_port)
        self.apiserver = _apiserver(
            folder,
            binary(f"{release}kube-apiserver"),
            port=port,
            etcd_port=etcd_port,
            headers=self.users[ADMIN].headers,
            options=[*gates(features), *(f"--runtime-config={version}=true" for version in apis)],
        )

    async def start(self) -> None:
        """Start etcd and kube-apiserver, and wait until pods can be created.

        Raises:
            ProcessError: one of them did not start.
        """
        write_token_file(self.folder / "tokens.csv", self.users)
        await self.etcd.start()
        await self.apiserver.start()
        for user in self.users:
            self.kubeconfig(user)
        async with self.client() as client:
            await wait_for(partial(_create_default_account, client), "the namespace default exists")

    def stop(self) -> None:
        """Kill etcd and kube-apiserver: the data is disposable, and a graceful stop is slow."""
        self.apiserver.kill()
        self.etcd.kill()

    def client(self, user: str = ADMIN) -> ApiClient:
        """Return a client of the API server: an async context manager."""
        return ApiClient(self.server, self.ca_file, self.users[user])

    def kubeconfig(self, user: str = ADMIN) -> Path:
        """Return the path of a user's kubeconfig."""
        path = self.folder / f"{user}.kubeconfig"
        if not path.exists():
            write_kubeconfig(path, server=self.server, ca_file=self.ca_file, user=self.users[user])
        return path

    async def kubectl(self, *arguments: str) -> str:
        """Run the real kubectl as administrator, and return its output.

        Raises:
            RuntimeError: kubectl failed; the message is its output.
            TimeoutError: kubectl hangs.
        """
        process = await asyncio.create_subprocess_exec(
            binary("kubectl"),
            f"--kubeconfig={self.kubeconfig()}",
            f"--cache-dir={self.folder / 'kubectl'}",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(KUBECTL_TIMEOUT_SECONDS):
                output, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            raise RuntimeError(f"cannot kubectl {' '.join(arguments)}: {errors.decode()}")
        return output.decode()

    async def reset(self) -> None:
        """Delete the objects that tests left: pods, nodes, priority classes, claims."""
        async with self.client() as client:
            for path in LEFTOVERS:
                await wait_for(partial(_delete_all, client, path), f"{path} is empty")


async def _create_default_account(client: ApiClient) -> bool:
    """Create the default service account; return False if its namespace does not exist yet."""
    try:
        await client.create_default_account("default")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


async def _delete_all(client: ApiClient, path: str) -> bool:
    """Delete the objects of a list; return whether none of the tests' objects is left."""
    try:
        items = (await client.request("GET", path))["items"]
    except ApiError as error:
        if error.status == 404:  # the kind does not exist in an older release
            return True
        raise
    leftovers = [item for item in items if not item["metadata"]["name"].startswith("system-")]
    async with asyncio.TaskGroup() as group:
        for item in leftovers:
            group.create_task(_delete(client, path, item), name=f"delete of {path}")
    return not leftovers


async def _delete(client: ApiClient, path: str, item: Object) -> None:
    metadata = item["metadata"]
    prefix, _, plural = path.rpartition("/")
    if "namespace" in metadata:
        prefix += f"/namespaces/{metadata['namespace']}"
    target = f"{prefix}/{plural}/{metadata['name']}"
    try:
        if metadata.get("finalizers"):
            await client.request(
                "PATCH",
                target,
                {"metadata": {"finalizers": None}},
                content_type="application/merge-patch+json",
            )
        await client.request("DELETE", target, parameters={"gracePeriodSeconds": "0"})
    except ApiError as error:
        if error.status != 404:
            raise


def _etcd(folder: Path, *, port: int, peer_port: int) -> ServerProcess:
    url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    command = [
        str(binary("etcd")),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        "--unsafe-no-fsync",  # the data is disposable
        "--quota-backend-bytes=8589934592",
        "--log-level=warn",
    ]
    return ServerProcess(name="etcd", command=command, folder=folder, ready_url=f"{url}/health")


def gates(features: Sequence[str]) -> list[str]:
    """Return the command line options that enable feature gates.

    Example:
        >>> gates(["GenericWorkload", "PodGroupPreemptionPolicy"])
        ['--feature-gates=GenericWorkload=true,PodGroupPreemptionPolicy=true']
    """
    return [f"--feature-gates={','.join(f'{name}=true' for name in features)}"] if features else []


def _apiserver(
    folder: Path,
    program: Path,
    *,
    port: int,
    etcd_port: int,
    headers: Mapping[str, str],
    options: Sequence[str],
) -> ServerProcess:
    certificates = folder / "certificates"
    # kube-apiserver creates its serving certificate before it reads the key of service accounts, so
    # one key can serve both purposes.
    key = certificates / "apiserver.key"
    command = [
        str(program),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",  # kube-apiserver refuses to publish a loopback address
        f"--cert-dir={certificates}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--allow-privileged=true",  # as in most clusters
        # Its taint not-ready on new nodes needs a controller that does not run here.
        "--disable-admission-plugins=TaintNodesByCondition",
        "--max-requests-inflight=4000",
        "--max-mutating-requests-inflight=2000",
        "--profiling=false",
        *options,
    ]
    return ServerProcess(
        name="kube-apiserver",
        command=command,
        folder=folder,
        ready_url=f"https://127.0.0.1:{port}/readyz",
        ready_headers=headers,
    )
