"""Agents of the fleet's nodes, with tokens from the real API server."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent.options import ReportOptions
from simulation.agents import PERIOD_SECONDS, REPORTS, SimulatedAgent, run_agents
from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.plane import EXTENDER
from testkit.controlplane.process import free_port
from testkit.controlplane.world import World

NAMESPACE: Final = "idlegpu-agent"
ACCOUNT: Final = "idlegpu-agent"
AUDIENCE: Final = "idlegpu-extender"
CONFLICT: Final = 409

SERVER_NAME: Final = "idlegpu-extender.idlegpu.svc"

POD_RIGHTS: Final[list[Object]] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
"""Right that the extender needs in addition if tokens name only their pods, not their nodes."""


class Tokens:
    """Issuer of agents' tokens through the API server.

    Args:
        client: client with administrator rights.
        folder: folder of the token files.
        certificates: folder of the extender's certificates, None for reports without TLS.
    """

    def __init__(self, client: ApiClient, folder: Path, certificates: Path | None = None) -> None:
        self.client = client
        self.folder = folder
        self.port = free_port()
        self._certificates = certificates and certificates / "extender"

    @property
    def address(self) -> str:
        """Address at which the extender receives reports."""
        return f"127.0.0.1:{self.port}"

    @property
    def settings(self) -> Object:
        """Settings of the extender's section `agents`."""
        own = self._certificates
        tls = own and {"cert_file": str(own / "tls.crt"), "key_file": str(own / "tls.key")}
        return {"listen": self.address, **(tls or {})}

    def reporting(self, reports: ReportOptions = REPORTS) -> ReportOptions:
        """Return the options of agents that trust the extender's CA."""
        if self._certificates is None:
            return reports
        return replace(reports, ca_file=str(self._certificates / "ca.crt"), server_name=SERVER_NAME)

    def file(self, node: str) -> Path:
        """Return the path of a node's token file."""
        return self.folder / f"{node}.token"

    async def prepare(self) -> None:
        """Create the namespace and the service accounts."""
        for path, item in (
            ("/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": NAMESPACE}}),
            (f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", _account(ACCOUNT)),
            (f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", _account("default")),
            (f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", _account("other")),
        ):
            try:
                await self.client.request("POST", path, {"apiVersion": "v1", **item})
            except ApiError as error:
                if error.status != CONFLICT:
                    raise

    async def issue(
        self,
        node: str,
        *,
        account: str = ACCOUNT,
        audience: str = AUDIENCE,
        name: str = "",
        bound: bool = True,
    ) -> str:
        """Issue a token as the kubelet does: bound to a pod on the node."""
        spec: Object = {"audiences": [audience], "expirationSeconds": 600}
        if bound:
            agent = pod(
                name or f"{account}-{node}",
                0,
                namespace=NAMESPACE,
                nodeName=node,
                serviceAccountName=account,
            )
            spec["boundObjectRef"] = _reference(await self.client.create(agent))
        return await self._request(account, spec)

    async def issue_before_binding(self, node: str) -> str:
        """Issue a token that names its pod but no node, because the pod was not bound yet."""
        agent = pod(
            f"early-{node}", 0, namespace=NAMESPACE, serviceAccountName=ACCOUNT, schedulerName="me"
        )
        made = await self.client.create(agent)
        spec: Object = {"audiences": [AUDIENCE], "expirationSeconds": 600}
        token = await self._request(ACCOUNT, {**spec, "boundObjectRef": _reference(made)})
        name = made["metadata"]["name"]
        await self.client.request(
            "POST",
            f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            },
        )
        return token

    async def review(self, token: str) -> Object:
        """Return the API server's review of a token."""
        answer = await self.client.request(
            "POST",
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenReview",
                "spec": {"token": token, "audiences": [AUDIENCE]},
            },
        )
        return dict(answer["status"])

    async def _request(self, account: str, spec: Object) -> str:
        answer = await self.client.request(
            "POST",
            f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        token: str = answer["status"]["token"]
        return token

    async def issue_all(self, nodes: Iterable[str]) -> None:
        """Issue and store a token for each of these nodes."""
        for node in nodes:
            self.file(node).write_text(await self.issue(node))


def _reference(made: Object) -> Object:
    metadata = made["metadata"]
    return {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}


def _account(name: str) -> Object:
    return {"kind": "ServiceAccount", "metadata": {"name": name, "namespace": NAMESPACE}}


@asynccontextmanager
async def tokens_of(
    world: World, folder: Path, rights: Sequence[Object] = ()
) -> AsyncIterator[Tokens]:
    """Issue agents' tokens and grant the extender extra rights while the context is open."""
    services = world.services
    async with AsyncExitStack() as stack:
        if rights:
            user = services.plane.users[EXTENDER]
            await stack.enter_async_context(world.client.granted(user, [*rights]))
        tokens = Tokens(world.client, folder, services.setup.certificates)
        await tokens.prepare()
        yield tokens


@asynccontextmanager
async def agents_on(
    world: World,
    tokens: Tokens,
    *nodes: str,
    reports: ReportOptions = REPORTS,
    period_seconds: float = PERIOD_SECONDS,
) -> AsyncIterator[Mapping[str, SimulatedAgent]]:
    """Run the agents of these nodes while the context is open."""
    await world.register()
    await tokens.issue_all(nodes)
    async with run_agents(
        world.fleet,
        nodes,
        tokens.address,
        tokens.file,
        reports=tokens.reporting(reports),
        period_seconds=period_seconds,
    ) as agents:
        yield agents
