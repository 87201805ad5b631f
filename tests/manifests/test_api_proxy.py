"""The shipped extender's API through the service proxy of a real API server."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDictProxy

from extender.api.access import COOKIE
from extender.api.caller import HEADER
from extender.cli.client import Client, ClientError, Failure
from extender.cli.cluster import Cluster
from testkit.controlplane.forwarding import machine_address
from testkit.controlplane.installing import Installation, wait_authorized
from testkit.controlplane.kubeconfig import write_kubeconfig
from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import EXTENDER_NAMESPACE, find, with_components
from testkit.controlplane.waiting import wait_for
from tests.manifests.api_readers import (
    BLUE,
    CLUSTER_READER,
    PROXY_USER,
    RBAC,
    READER,
    Read,
    reading,
)

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(180)]

SERVICE: Final = "idlegpu-extender"
SERVICES: Final = f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/services"


def is_over_tls(read: Read) -> bool:
    return read.extender.status.startswith("https://")


@dataclass
class Way:
    """Forwarding from the API server to the extender, in place of the pod network.

    Attributes:
        address: address of this machine that is not loopback.
        seen: headers of forwarded requests.
    """

    address: str
    seen: list[CIMultiDictProxy[str]] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, read: Read) -> AsyncIterator[int]:
        """Forward to an extender; yield the port."""
        server = read.extender.server
        connector = aiohttp.TCPConnector(local_addr=(self.address, 0), ssl=server.trust)
        shown = None
        if is_over_tls(read):
            own = read.extender.mounted / "extender"
            shown = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            shown.load_cert_chain(own / "tls.crt", own / "tls.key")
        async with aiohttp.ClientSession(server.url, connector=connector) as session:

            async def pass_on(request: web.Request) -> web.Response:
                self.seen.append(request.headers)
                headers = {name: text for name, text in request.headers.items() if name != "Host"}
                async with session.get(request.rel_url, headers=headers) as answer:
                    kind = answer.content_type
                    return web.Response(
                        status=answer.status, body=await answer.read(), content_type=kind
                    )

            app = web.Application()
            app.router.add_get("/{path:.*}", pass_on)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            try:
                await web.TCPSite(runner, self.address, 0, ssl_context=shown).start()
                yield int(runner.addresses[0][1])
            finally:
                await runner.cleanup()


@pytest.fixture
def way() -> Way:
    """Return the forwarding at an address of this machine that is not loopback."""
    address = machine_address()
    if not address:
        pytest.skip("this machine has loopback addresses alone, and no API server proxies to these")
    return Way(address)


@asynccontextmanager
async def proxied(read: Read, way: Way) -> AsyncIterator[None]:
    """Connect the shipped Service to the extender, and let one account use the proxy to it."""
    admin = read.installation.admin
    here = {"namespace": EXTENDER_NAMESPACE}
    named = {"name": SERVICE, **here}
    role: Object = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "Role",
        "metadata": {"name": "test-proxy", **here},
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["services/proxy"],
                "resourceNames": [f"{SERVICE}:status", f"https:{SERVICE}:status"],
                "verbs": ["get"],
            },
            {
                "apiGroups": [""],
                "resources": ["services"],
                "resourceNames": [SERVICE],
                "verbs": ["get"],
            },
        ],
    }
    bound: Object = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "test-proxy", **here},
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": "test-proxy"},
        "subjects": [{"kind": "ServiceAccount", "name": PROXY_USER, "namespace": BLUE}],
    }
    stand_in: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": SERVICE, **here},
        "spec": {
            "nodeName": "a",
            "serviceAccountName": SERVICE,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "extender",
                    "image": SERVICE,
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "runAsNonRoot": True,
                        "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            ],
        },
    }
    # The API server only proxies to addresses of pods.
    target = {"kind": "Pod", **named}
    async with way.open(read) as port:
        endpoints: Object = {
            "apiVersion": "v1",
            "kind": "Endpoints",
            "metadata": named,
            "subsets": [
                {
                    "addresses": [{"ip": way.address, "targetRef": target}],
                    "ports": [{"name": "status", "port": port}],
                }
            ],
        }
        # The API server may read either object, and no controller derives one from the other.
        a_slice: Object = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**named, "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "endpoints": [
                {"addresses": [way.address], "conditions": {"ready": True}, "targetRef": target}
            ],
            "ports": [{"name": "status", "port": port, "protocol": "TCP"}],
        }
        rbac = f"/apis/{RBAC}/v1/namespaces/{EXTENDER_NAMESPACE}"
        made = {
            f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/pods": stand_in,
            f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/endpoints": endpoints,
            f"/apis/discovery.k8s.io/v1/namespaces/{EXTENDER_NAMESPACE}/endpointslices": a_slice,
            f"{rbac}/roles": role,
            f"{rbac}/rolebindings": bound,
        }
        for path, item in made.items():
            await admin.request("POST", path, item)
        addresses = {"podIP": way.address, "podIPs": [{"ip": way.address}], "phase": "Running"}
        await admin.patch(stand_in, {"status": addresses}, "status")
        try:
            async with await read.installation.client(BLUE, PROXY_USER) as client:
                await wait_authorized(
                    client, "get", "services/proxy", name=f"{SERVICE}:status", **here
                )

            async def is_there() -> bool:
                status, body = await through_proxy(read, PROXY_USER, "/readyz")
                assert status in {200, 503}, body
                return status == 200

            await wait_for(is_there, "the API server knows where the Service leads")
            way.seen.clear()
            yield
        finally:
            for path, item in made.items():
                await admin.request(
                    "DELETE",
                    f"{path}/{item['metadata']['name']}",
                    parameters={"gracePeriodSeconds": "0"},
                )


async def through_proxy(
    read: Read, account: str, path: str, headers: Mapping[str, str] | None = None
) -> tuple[int, Object]:
    """Send a GET through the API server as a service account of the first tenant."""
    plane = read.installation.plane
    scheme = "https:" if is_over_tls(read) else ""
    user = await read.installation.user(BLUE, account)
    context = ssl.create_default_context(cafile=plane.ca_file)
    async with (
        aiohttp.ClientSession(
            plane.server, connector=aiohttp.TCPConnector(ssl=context), headers=user.headers
        ) as session,
        session.get(
            f"{SERVICES}/{scheme}{SERVICE}:status/proxy{path}", headers=headers
        ) as response,
    ):
        answer: Object = await response.json()
        return response.status, answer


async def test_api_proxy_right_decides_at_the_named_address(
    installation: Installation, tmp_path: Path, way: Way
) -> None:
    async with (
        reading(installation, tmp_path, {"IDLEGPU_API_PROXIES": way.address}) as read,
        proxied(read, way),
    ):
        status, body = await through_proxy(read, PROXY_USER, "/v1/nodes/a")

        assert (status, body["pods"]) == (200, ["blue/p", "red/p"])  # it may read no pod
        (headers,) = way.seen
        assert "Authorization" not in headers, "the API server keeps its users' tokens to itself"

        status, body = await through_proxy(read, CLUSTER_READER, "/v1/nodes/a")
        assert (status, body["reason"]) == (403, "Forbidden")  # independent of its rights for pods
        assert len(way.seen) == 1, "nothing of it came to the extender"
        status, _ = await read.extender.read("/v1/nodes/a")
        assert status == 401  # from another address than the API server's

        # A caller that also sends a token sees what the token's owner may see.
        own = {HEADER: await read.token(READER)}
        _, body = await through_proxy(read, PROXY_USER, "/v1/nodes/a", own)
        assert body["pods"] == ["blue/p", "another pod"]
        status, _ = await through_proxy(read, PROXY_USER, "/v1/nodes", {HEADER: "forged"})
        assert status == 401


@pytest.mark.parametrize("components", [["api-proxy"], ["api-proxy", "status-plain"]], ids=str)
async def test_the_command_lines_usual_way_is_open_with_the_components(
    installation: Installation, tmp_path: Path, way: Way, components: list[str]
) -> None:
    (tmp_path / "overlay").mkdir()
    folder = with_components(tmp_path / "overlay", ["certs-job", *components])
    await installation.add_kinds_of_others()
    # As an administrator fills it in, in place of the reserved range.
    filled_in = {"IDLEGPU_API_PROXIES": way.address}
    async with reading(installation, tmp_path, filled_in, folder) as read, proxied(read, way):
        (container,) = find(installation.items, "Deployment", SERVICE)["spec"]["template"]["spec"][
            "containers"
        ]
        assert {entry["name"] for entry in container["env"]} >= filled_in.keys()
        assert is_over_tls(read) != ("status-plain" in components)
        mine = tmp_path / "kubeconfig"
        plane, user = installation.plane, await installation.user(BLUE, PROXY_USER)
        write_kubeconfig(mine, server=plane.server, ca_file=plane.ca_file, user=user)

        client = await asyncio.to_thread(Client.in_cluster_of, str(mine))
        nodes = await asyncio.to_thread(client.nodes)

        assert [node.name for node in nodes.nodes] == ["a"]
        if is_over_tls(read):
            # The proxy uses plain HTTP unless the request names https, and the error then hints at
            # that.
            plain = await asyncio.to_thread(Cluster.from_kubeconfig, str(mine))
            with pytest.raises(ClientError) as raised:
                await asyncio.to_thread(plain.get, f"{SERVICES}/{SERVICE}:status/proxy/v1/nodes")
            assert raised.value.failure is Failure.UNREACHABLE


async def test_unless_its_address_is_named_the_proxy_opens_nothing_by_itself(
    installation: Installation, tmp_path: Path, way: Way
) -> None:
    async with reading(installation, tmp_path) as read, proxied(read, way):
        status, body = await through_proxy(read, PROXY_USER, "/v1/nodes/a")

        assert status == 401
        assert "kubectl create token" in body["error"]
        assert "Authorization" not in way.seen[-1]
        token = await read.token(READER)
        for headers in ({HEADER: token}, {"Cookie": f"{COOKIE}={token}"}):
            status, body = await through_proxy(read, PROXY_USER, "/v1/nodes/a", headers)
            assert (status, body["pods"]) == (200, ["blue/p", "another pod"])
        # The Authorization header is for the API server, which does not know this token.
        usual = {"Authorization": f"Bearer {token}"}
        status, _ = await through_proxy(read, PROXY_USER, "/v1/nodes/a", usual)
        assert status == 401
        assert (await through_proxy(read, PROXY_USER, "/readyz"))[0] == 200


async def test_of_the_usual_roles_view_does_not_open_the_proxy_and_edit_does(
    installation: Installation,
) -> None:
    opens = {}
    for name in ("view", "edit"):
        path = f"/apis/{RBAC}/v1/clusterroles/system:aggregate-to-{name}"
        rules = (await installation.admin.request("GET", path))["rules"]
        opens[name] = any(
            "services/proxy" in rule["resources"] and "get" in rule["verbs"] for rule in rules
        )

    assert opens == {"view": False, "edit": True}
