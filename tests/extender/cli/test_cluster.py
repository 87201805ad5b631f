"""Access through the API server's proxy, with a kubeconfig."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from extender.cli.client import Client, ClientError, Failure
from extender.cli.cluster import Cluster
from testkit.cli_serving import serving


class Proxy:
    """Stand-in for the API server that records its requests.

    Attributes:
        ports: ports of every Service; None if Services may not be read.
        seen: path, Authorization and idlegpu's own header of each request for the extender.
        read: paths of Services that were read.
        is_reached: whether the proxy reaches the extender.
    """

    def __init__(self) -> None:
        self.ports: list[dict[str, object]] | None = [{"name": "status", "port": 8889}]
        self.seen: list[tuple[str, str, str]] = []
        self.read: list[str] = []
        self.is_reached = True

    async def answer(self, request: web.Request) -> web.Response:
        headers = request.headers
        if "/proxy/" not in request.path:
            self.read.append(request.path_qs)
            assert "X-Idlegpu-Token" not in headers, "that is the extender's alone"
            if self.ports is None:
                return web.json_response({"message": "forbidden"}, status=403)
            return web.json_response({"spec": {"ports": self.ports}})
        if not self.is_reached:
            return web.json_response({"message": "EOF"}, status=503)
        self.seen.append(
            (request.path_qs, headers.get("Authorization", ""), headers.get("X-Idlegpu-Token", ""))
        )
        if "gone" in request.path:
            return web.json_response({"kind": "Status", "message": "no such service"}, status=404)
        return web.json_response({"gpus": []})


@pytest.fixture
def proxy() -> Proxy:
    return Proxy()


@pytest.fixture
def kubeconfig(proxy: Proxy, tmp_path: Path) -> Iterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy.answer)
    with serving(app) as url:
        contexts = [
            {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
            {"name": "two", "context": {"cluster": "c", "user": "v"}},
        ]
        config = {
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [
                {"name": "u", "user": {"token": "of-u"}},
                {"name": "v", "user": {"token": "of-v"}},
            ],
            "contexts": contexts,
            "current-context": "one",
        }
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump(config))
        yield str(file)


BASE = "/api/v1/namespaces/idlegpu/services/idlegpu-extender:status/proxy"


def test_requests_use_the_proxy_with_the_users_token(proxy: Proxy, kubeconfig: str) -> None:
    Client.in_cluster_of(kubeconfig).gpus("node 1")

    assert proxy.seen == [(f"{BASE}/v1/gpus?node=node+1", "Bearer of-u", "")]


def test_the_extenders_token_has_a_header_that_the_proxy_forwards(
    proxy: Proxy, kubeconfig: str
) -> None:
    Client.in_cluster_of(kubeconfig, context="two", service="ns/s:http", token="own").gpus()

    path = "/api/v1/namespaces/ns/services/s:http/proxy/v1/gpus"
    assert proxy.seen == [(path, "Bearer of-v", "own")]


SECURE = "/api/v1/namespaces/idlegpu/services/https:idlegpu-extender:status/proxy"


@pytest.mark.parametrize(
    ("ports", "base"),
    [
        ([{"name": "status", "port": 8889, "appProtocol": "https"}], SECURE),
        ([{"name": "status", "port": 8889, "appProtocol": "HTTPS"}], SECURE),
        ([{"name": "status", "port": 8889, "appProtocol": "http"}], BASE),
        ([{"name": "webhooks", "port": 8888, "appProtocol": "https"}], BASE),
        ([{"name": "https", "port": 443}, {"name": "status", "port": 8889}], BASE),
        ([], BASE),
    ],
    ids=["said", "any-case", "plain", "another-port", "another-name", "no-ports"],
)
def test_the_service_declares_whether_its_port_speaks_tls(
    proxy: Proxy, kubeconfig: str, ports: list[dict[str, object]], base: str
) -> None:
    proxy.ports = ports
    client = Client.in_cluster_of(kubeconfig, token="own")

    for _ in range(2):
        client.gpus()

    assert [path for path, _, _ in proxy.seen] == [f"{base}/v1/gpus"] * 2
    assert proxy.read == ["/api/v1/namespaces/idlegpu/services/idlegpu-extender"], "once"


@pytest.mark.parametrize(
    ("service", "target"),
    [
        ("a/b:https", "https:b:https"),
        ("a/b:443", "https:b:443"),
        ("a/b", "https:b:"),
        ("a/https:b:x", "https:b:x"),
        ("a/http:b:https", "http:b:https"),
        ("a/https:b", "https:b:"),
    ],
)
def test_a_port_has_a_name_or_number_and_may_have_a_scheme(
    proxy: Proxy, kubeconfig: str, service: str, target: str
) -> None:
    proxy.ports = [{"name": "https", "port": 443}]

    Client.in_cluster_of(kubeconfig, service=service).gpus()

    assert [path for path, _, _ in proxy.seen] == [
        f"/api/v1/namespaces/a/services/{target}/proxy/v1/gpus"
    ]
    assert len(proxy.read) == (0 if "/http" in service else 1)


def test_unreadable_service_means_tls_with_a_hint_at_plain_http(
    proxy: Proxy, kubeconfig: str
) -> None:
    proxy.ports = None
    client = Client.in_cluster_of(kubeconfig)

    client.gpus()
    proxy.is_reached = False
    with pytest.raises(ClientError) as raised:
        client.gpus()

    assert [path for path, _, _ in proxy.seen] == [f"{SECURE}/v1/gpus"]
    assert "--service idlegpu/http:idlegpu-extender:status" in str(raised.value)


def test_an_extender_behind_a_network_policy_can_be_reached_over_a_port_forward(
    proxy: Proxy, kubeconfig: str
) -> None:
    proxy.is_reached = False

    with pytest.raises(ClientError, match="use --url over a port-forward") as raised:
        Client.in_cluster_of(kubeconfig).gpus()

    assert raised.value.failure is Failure.UNREACHABLE


def test_the_environment_configures_the_connection(proxy: Proxy, kubeconfig: str) -> None:
    Client.from_environment({"KUBECONFIG": kubeconfig}).gpus()
    Client.from_environment({"KUBECONFIG": kubeconfig, "IDLEGPU_SERVICE": "a/b:c"}).gpus()

    assert [path for path, _, _ in proxy.seen] == [
        f"{BASE}/v1/gpus",
        "/api/v1/namespaces/a/services/b:c/proxy/v1/gpus",
    ]


def test_the_environment_names_the_file_of_the_token(
    proxy: Proxy, kubeconfig: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of-file\n")
    file = {"KUBECONFIG": kubeconfig, "IDLEGPU_TOKEN_FILE": str(tmp_path / "token")}

    Client.from_environment(file).gpus()
    Client.from_environment({**file, "IDLEGPU_TOKEN": "own"}).gpus()

    assert [token for *_, token in proxy.seen] == ["of-file", "own"]
    with pytest.raises(ClientError, match="token file '/nowhere' cannot be read"):
        Client.from_environment({**file, "IDLEGPU_TOKEN_FILE": "/nowhere"})


def test_an_error_of_the_proxy_names_the_service(kubeconfig: str) -> None:
    with pytest.raises(ClientError, match="service gone/x:y: no such service") as raised:
        Client.in_cluster_of(kubeconfig, service="gone/x:y").gpus()

    assert raised.value.failure is Failure.NOT_FOUND


@pytest.mark.parametrize("service", ["", "a", "a/b/c", "A/b:c", "../x:y", "a/b:c?d"])
def test_a_malformed_service_is_refused(kubeconfig: str, service: str) -> None:
    with pytest.raises(ClientError, match="must be namespace/name:port"):
        Cluster.from_kubeconfig(kubeconfig).service(service)


def test_an_unknown_context_is_named(kubeconfig: str) -> None:
    with pytest.raises(
        ClientError, match=r" has no context 'three': `kubectl config get-contexts`"
    ):
        Cluster.from_kubeconfig(kubeconfig, context="three")


def test_a_kubeconfig_without_a_current_context_says_how_to_choose_one(kubeconfig: str) -> None:
    file = Path(kubeconfig)
    file.write_text(file.read_text().replace("current-context: one", 'current-context: ""'))

    with pytest.raises(ClientError, match="no current context: choose one with --context"):
        Cluster.from_kubeconfig(kubeconfig)


def test_the_namespace_is_that_of_the_context(kubeconfig: str) -> None:
    assert Cluster.from_kubeconfig(kubeconfig).namespace == "team"
    assert Cluster.from_kubeconfig(kubeconfig, context="two").namespace == "default"
