"""Three ways to create certificates, each with the files that extender and kube-scheduler read."""

import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import pytest_asyncio
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agent.config import load as load_agent_settings
from extender.app import Extender, start
from extender.server.certificates.__main__ import main as make_certificates
from extender.server.certificates.storing import CA_SECRET, SECRETS
from extender.settings.config import Settings, load_settings
from simulation.cluster import run_cluster
from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import COMPONENTS, MANIFESTS, SCHEDULER_CONFIG, find
from testkit.fake_kube import eventually
from testkit.replicas import DEADLINE_SECONDS, equal_nodes
from tests.manifests.issuers import secrets_of_cert_manager, secrets_of_ones_own
from tests.manifests.issuing import EXTENDER, ONES_OWN, SCHEDULER

TO_THE_CLUSTER: Final = ("--secrets", "--ca-namespace")
"""Options that write to the cluster; the Job's other options describe the certificates."""
KEYS: Final = {"tls.crt", "tls.key", "ca.crt"}
SCHEDULER_FILES: Final = ("kube-scheduler.yaml", "second-scheduler/kube-scheduler.yaml")


Secrets = Mapping[str, Mapping[str, bytes]]


def read(path: Path) -> Object:
    """Return the only object of a file."""
    (item,) = yaml.safe_load_all(path.read_text())
    return dict(item)


def cert_manager_objects() -> list[Object]:
    folder = COMPONENTS / "cert-manager"
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [read(folder / name) for name in names]


def secrets_of_our_program() -> Secrets:
    """Return the Secrets of `python -m extender.server.certificates`, which the Job also runs."""
    (container,) = read(COMPONENTS / "certs-job" / "job.yaml")["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["command"] == ["python", "-m", "extender.server.certificates"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [word for word in container["args"] if not word.startswith(TO_THE_CLUSTER)]
        assert make_certificates([*arguments, f"--folder={folder}"]) == 0
        return {
            secret: {path.name: path.read_bytes() for path in (folder / side).iterdir()}
            for side, secret in SECRETS.items()
        }


def secrets_of_cert_managers_objects() -> Secrets:
    return secrets_of_cert_manager(cert_manager_objects())


def secrets_of_an_own_ca() -> Secrets:
    return secrets_of_ones_own(ONES_OWN)


WAYS: Final[Mapping[str, Callable[[], Secrets]]] = {
    "program": secrets_of_our_program,
    "cert-manager": secrets_of_cert_managers_objects,
    "existing-secrets": secrets_of_an_own_ca,
}


@pytest.fixture(params=WAYS)
def secrets(request: pytest.FixtureRequest) -> Secrets:
    made = WAYS[request.param]()
    return {name: data for name, data in made.items() if name in SECRETS.values()}


def shipped_settings(changes: Object | None = None) -> Settings:
    content = read(MANIFESTS / "extender" / "config-map.yaml")["data"]["settings.yaml"]
    values = {**yaml.safe_load(content), **(changes or {})}
    return load_settings(Path("settings.yaml"), {}, yaml.safe_dump(values).encode())


def mounted(item: Object, secret: str) -> Path:
    """Return the path at which a workload's pods mount a Secret, with all its keys."""
    spec = item["spec"]["template"]["spec"]
    (volume,) = (v for v in spec["volumes"] if v.get("secret", {}).get("secretName") == secret)
    assert "items" not in volume["secret"]
    (container,) = spec["containers"]
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == volume["name"])
    assert mount["readOnly"]
    return Path(mount["mountPath"])


def tls_of(file: str) -> Object:
    """Return the extender's `tlsConfig` in a shipped configuration."""
    (entry,) = read(SCHEDULER_CONFIG / file)["extenders"]
    assert entry["enableHTTPS"]
    return dict(entry["tlsConfig"])


def names_in(secret: Mapping[str, bytes]) -> set[str]:
    """Return the names of a certificate: common and alternative ones."""
    certificate = x509.load_pem_x509_certificate(secret["tls.crt"])
    (common,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    stated = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(common.value), *stated.get_values_for_type(x509.DNSName)}


def uses_of(secret: Mapping[str, bytes]) -> set[x509.ObjectIdentifier]:
    certificate = x509.load_pem_x509_certificate(secret["tls.crt"])
    return set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_pods_mount_the_secrets_where_their_settings_look(secrets: Secrets) -> None:
    settings = shipped_settings().tls
    extender = mounted(read(MANIFESTS / "extender" / "deployment.yaml"), EXTENDER)
    second = read(SCHEDULER_CONFIG / "second-scheduler" / "deployment.yaml")
    scheduler = mounted(second, SCHEDULER)

    assert secrets.keys() == {EXTENDER, SCHEDULER}
    assert all(data.keys() == KEYS for data in secrets.values())
    configured = {settings.cert_file, settings.key_file, settings.client_ca_file}
    assert configured == {extender / key for key in KEYS}
    requested = tls_of("second-scheduler/kube-scheduler.yaml")
    assert {Path(requested[name]) for name in ("certFile", "keyFile", "caFile")} == {
        scheduler / key for key in KEYS
    }


def test_certificates_have_the_names_that_clients_verify(secrets: Secrets) -> None:
    settings = shipped_settings().tls
    webhook = read(COMPONENTS / "admission" / "mutating-webhook-configuration.yaml")
    (service,) = (each["clientConfig"]["service"] for each in webhook["webhooks"])
    (patch,) = (
        each
        for each in read(COMPONENTS / "agent-reports" / "kustomization.yaml")["patches"]
        if each["target"]["name"] == "idlegpu-agent"
    )
    pod = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]
    environ = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    reports = load_agent_settings(None, environ).settings.reports

    extender, scheduler = names_in(secrets[EXTENDER]), names_in(secrets[SCHEDULER])

    assert {tls_of(file)["serverName"] for file in SCHEDULER_FILES} <= extender
    assert f"{service['name']}.{service['namespace']}.svc" in extender
    assert reports.server_name in extender
    assert extender & set(settings.peers)
    assert scheduler & set(settings.clients)
    assert not extender & set(settings.clients)
    assert not scheduler & set(settings.peers)


def test_only_the_extender_may_serve(secrets: Secrets) -> None:
    client, server = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH

    assert uses_of(secrets[EXTENDER]) == {server, client}
    assert uses_of(secrets[SCHEDULER]) == {client}


def test_cert_managers_objects_name_each_other_and_the_same_secrets_as_the_job() -> None:
    objects = cert_manager_objects()
    made = secrets_of_cert_manager(objects)
    authority = find(objects, "Certificate", "idlegpu-ca")["spec"]

    assert made.keys() == {*SECRETS.values(), CA_SECRET}
    assert authority["isCA"]
    certificates = x509.load_pem_x509_certificates(made[CA_SECRET]["tls.crt"])
    assert [one.issuer == one.subject for one in certificates] == [True]
    for name in SECRETS.values():
        assert made[name]["ca.crt"] == made[CA_SECRET]["tls.crt"]
    annotation = read(COMPONENTS / "cert-manager-admission" / "kustomization.yaml")["patches"]
    injected = yaml.safe_load(annotation[0]["patch"])["metadata"]["annotations"]
    namespace, _, certificate = injected["cert-manager.io/inject-ca-from"].partition("/")
    found = find(objects, "Certificate", certificate)
    assert (found["metadata"]["namespace"], found["spec"]["secretName"]) == (namespace, EXTENDER)


def test_every_installation_requests_the_same_certificates() -> None:
    made = {way: make() for way, make in WAYS.items()}

    for name in SECRETS.values():
        for find_out in (names_in, uses_of):
            program, manager, own = (find_out(made[way][name]) for way in WAYS)
            assert program == manager
            assert own <= program


def test_extender_certificate_is_valid_over_a_port_forward() -> None:
    made = [make()[EXTENDER] for way, make in WAYS.items() if way != "existing-secrets"]

    assert ["localhost" in names_in(one) for one in made] == [True, True]


# --- the real handshake ---------------------------------------------------------------------------


def write_mounted(secrets: Secrets, folder: Path) -> None:
    """Write Secrets as mounted volumes: a folder for each."""
    for name, data in secrets.items():
        (folder / name).mkdir()
        for key, content in data.items():
            (folder / name / key).write_bytes(content)


@pytest_asyncio.fixture
async def extender(secrets: Secrets, tmp_path: Path) -> AsyncIterator[Extender]:
    """Run the extender with its shipped settings, except for paths and addresses."""
    write_mounted(secrets, tmp_path)
    async with run_cluster(equal_nodes(), interval_seconds=0.5) as cluster:
        tls = yaml.safe_load(
            read(MANIFESTS / "extender" / "config-map.yaml")["data"]["settings.yaml"]
        )["tls"]
        here = {name: str(tmp_path / EXTENDER / Path(path).name) for name, path in tls.items()}
        settings = shipped_settings(
            {
                "listen": "127.0.0.1:0",
                "status_listen": "127.0.0.1:0",
                "kubeconfig": str(cluster.kubeconfig),
                "prometheus": {"url": ""},
                "peers": {"addresses": ["127.0.0.1:1"]},  # a peer, so that the route exists
                "tls": here,
            }
        )
        async with start(settings) as running:
            await eventually(lambda: running.is_ready, deadline_seconds=DEADLINE_SECONDS)
            yield running


async def post(extender: Extender, folder: Path, path: str, *, shows: str | None, file: str) -> int:
    """Send a POST with the server name, CA and certificate of a shipped configuration."""
    tls = tls_of(file)
    context = ssl.create_default_context(cafile=folder / SCHEDULER / Path(tls["caFile"]).name)
    if shows is not None:
        certificate, key = (
            folder / shows / Path(tls[name]).name for name in ("certFile", "keyFile")
        )
        context.load_cert_chain(certificate, key)
    request = {"Pod": {"metadata": {"name": "a"}, "spec": {}}, "Nodes": None, "NodeNames": ["n"]}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.post(
            f"{extender.addresses[0]}{path}", json=request, server_hostname=tls["serverName"]
        ) as answer,
    ):
        return answer.status


@pytest.mark.parametrize("file", SCHEDULER_FILES)
async def test_kube_scheduler_and_extender_trust_each_other(
    extender: Extender, tmp_path: Path, file: str
) -> None:
    assert extender.addresses[0].startswith("https://")
    assert await post(extender, tmp_path, "/filter", shows=SCHEDULER, file=file) == 200


async def test_replica_certificate_opens_only_the_peer_routes(
    extender: Extender, tmp_path: Path
) -> None:
    file = SCHEDULER_FILES[0]
    route = "/v1/peers/requests"

    assert await post(extender, tmp_path, "/filter", shows=EXTENDER, file=file) == 403
    assert await post(extender, tmp_path, route, shows=SCHEDULER, file=file) == 403
    # The name is right, but the message is invalid.
    assert await post(extender, tmp_path, route, shows=EXTENDER, file=file) == 400


async def test_no_client_is_let_in_without_a_certificate(
    extender: Extender, tmp_path: Path
) -> None:
    with pytest.raises(aiohttp.ClientError):
        await post(extender, tmp_path, "/filter", shows=None, file=SCHEDULER_FILES[0])
