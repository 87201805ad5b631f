"""Agents of the fleet's nodes, with tokens that the real API server has issued."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from agent.options import ReportOptions
from simulation.agents import PERIOD_SECONDS, REPORTS, SimulatedAgent, run_agents
from tests.controlplane.client import ApiClient, ApiError
from tests.controlplane.objects import Object, pod
from tests.controlplane.plane import EXTENDER
from tests.controlplane.process import free_port
from tests.e2e.world import World

NAMESPACE: Final = "idlegpu-agent"
ACCOUNT: Final = "idlegpu-agent"
AUDIENCE: Final = "idlegpu-extender"
CONFLICT: Final = 409

RIGHTS: Final[list[Object]] = [
    {
        "apiGroups": ["authentication.k8s.io"],
        "resources": ["tokenreviews"],
        "verbs": ["create"],
    }
]
"""What the extender needs to know whose a token is."""


class Tokens:
    """Has the API server issue tokens.

    Args:
        client: an administrator's.
        folder: where they are kept.
    """

    def __init__(self, client: ApiClient, folder: Path) -> None:
        self.client = client
        self.folder = folder
        self.port = free_port()

    @property
    def address(self) -> str:
        """Where the extender is to take reports."""
        return f"127.0.0.1:{self.port}"

    def file(self, node: str) -> Path:
        """Return where a node's token is kept."""
        return self.folder / f"{node}.token"

    async def prepare(self) -> None:
        """Have namespace and service accounts."""
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
        """Return a token as the kubelet would ask for: bound to a pod on the node."""
        spec: Object = {"audiences": [audience], "expirationSeconds": 600}
        if bound:
            agent = pod(
                name or f"{account}-{node}",
                0,
                namespace=NAMESPACE,
                nodeName=node,
                serviceAccountName=account,
            )
            made = await self.client.create(agent)
            spec["boundObjectRef"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": made["metadata"]["name"],
                "uid": made["metadata"]["uid"],
            }
        answer = await self.client.request(
            "POST",
            f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        token: str = answer["status"]["token"]
        return token

    async def issue_all(self, nodes: Iterable[str]) -> None:
        """Have a token for each of some nodes."""
        for node in nodes:
            self.file(node).write_text(await self.issue(node))


def _account(name: str) -> Object:
    return {"kind": "ServiceAccount", "metadata": {"name": name, "namespace": NAMESPACE}}


@asynccontextmanager
async def tokens_of(world: World, folder: Path) -> AsyncIterator[Tokens]:
    """Let the extender ask whose tokens are while the context is open."""
    plane = world.services.plane
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(world.client.granted(plane.users[EXTENDER], RIGHTS))
        tokens = Tokens(world.client, folder)
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
    """Run the agents of some nodes while the context is open."""
    await world.register()
    await tokens.issue_all(nodes)
    async with run_agents(
        world.fleet,
        nodes,
        tokens.address,
        tokens.file,
        reports=reports,
        period_seconds=period_seconds,
    ) as agents:
        yield agents
