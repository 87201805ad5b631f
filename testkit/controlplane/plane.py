"""The control plane itself: etcd and kube-apiserver, with users, kubeconfigs and kubectl."""

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
# The extender's user is the service account that manifests/ bind rights to, so that a test with
# these manifests applied proves the rights too. It has none until they are.
EXTENDER_ACCOUNT: Final = "system:serviceaccount:idlegpu:idlegpu-extender"
KUBECTL_TIMEOUT_SECONDS: Final = 30.0
# Objects in the way of the next test, and the path of all of one kind. Pods before nodes: a pod
# whose node is gone is no test's starting point. Namespaces stay: no controller finalizes them.
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

    Bound to no event loop: a fixture of the whole session may start it, and each test use it.

    Attributes:
        folder: where data, certificates, kubeconfigs and logs go.
        users: who may talk to it, by the short names `ADMIN`, `SCHEDULER`, `EXTENDER`.
        server: base URL of the API server.
        ca_file: certificate that the API server's own certificate is verified with.
        release: what stands before the names of its programs in `tools.TOOLS`; "" for the newest.
        features: gates that are open in all of its programs, beside those that are by default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        release: str = "",
        features: Sequence[str] = (),
        apis: Sequence[str] = (),
    ) -> None:
        """Describe it.

        Args:
            folder: an empty one.
            release: see the attribute.
            features: see the attribute.
            apis: group versions that are served beside those that are by default.
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
            options=[
                *gates(features),
                *(f"--runtime-config={version}=true" for version in apis),
            ],
        )

    async def start(self) -> None:
        """Start both, and wait until pods can be created.

        Raises:
            ProcessError: one of them did not come up.
        """
        write_token_file(self.folder / "tokens.csv", self.users)
        await self.etcd.start()
        await self.apiserver.start()
        for user in self.users:
            self.kubeconfig(user)
        async with self.client() as client:
            await wait_for(partial(_create_default_account, client), "the namespace default exists")

    def stop(self) -> None:
        """End both at once: their data is worth nothing now, and they take long to say goodbye."""
        self.apiserver.kill()
        self.etcd.kill()

    def client(self, user: str = ADMIN) -> ApiClient:
        """Return a client of the API server, an async context manager."""
        return ApiClient(self.server, self.ca_file, self.users[user])

    def kubeconfig(self, user: str = ADMIN) -> Path:
        """Return the path of a user's kubeconfig."""
        path = self.folder / f"{user}.kubeconfig"
        if not path.exists():
            write_kubeconfig(path, server=self.server, ca_file=self.ca_file, user=self.users[user])
        return path

    async def kubectl(self, *arguments: str) -> str:
        """Run the real kubectl as administrator, and return what it prints.

        Raises:
            RuntimeError: it failed; the message is its own.
            TimeoutError: it hangs.
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
        """Delete what tests left behind: pods, nodes, priority classes, claims."""
        async with self.client() as client:
            for path in LEFTOVERS:
                await wait_for(partial(_delete_all, client, path), f"{path} is empty")


async def _create_default_account(client: ApiClient) -> bool:
    """Create what kube-controller-manager would; not before the namespace is there."""
    try:
        await client.create_default_account("default")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


async def _delete_all(client: ApiClient, path: str) -> bool:
    """Delete what a list has; true once it has nothing left of the tests'."""
    try:
        items = (await client.request("GET", path))["items"]
    except ApiError as error:
        if error.status == 404:  # a kind that an older release does not know
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
        "--unsafe-no-fsync",  # the data is worth nothing after the test
        "--quota-backend-bytes=8589934592",
        "--log-level=warn",
    ]
    return ServerProcess(name="etcd", command=command, folder=folder, ready_url=f"{url}/health")


def gates(features: Sequence[str]) -> list[str]:
    """Return the options that open feature gates in one of Kubernetes' programs.

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
    # kube-apiserver makes its serving certificate before it reads the key of service accounts, so
    # that one key serves for both, and no test has to make one.
    key = certificates / "apiserver.key"
    command = [
        str(program),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",  # refuses to publish a loopback address
        f"--cert-dir={certificates}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--allow-privileged=true",  # as on every cluster
        # Its taint not-ready on each new node is for a controller that does not run here.
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
