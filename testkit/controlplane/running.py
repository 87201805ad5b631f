"""Extender with the settings, certificates and rights of its manifests."""

import asyncio
import base64
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from extender.server.certificates.__main__ import main as make_certificates
from extender.server.certificates.storing import CA_CONFIG_MAP, CA_SECRET, LEASE_NAME, SECRETS
from testkit.controlplane.client import ApiError
from testkit.controlplane.deployed import ExtenderServer, RunOptions
from testkit.controlplane.installing import Installation, wait_authorized
from testkit.controlplane.objects import Object
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.shipped import AGENT_NAMESPACE, EXTENDER_NAMESPACE, find

SECRETS_PATH: Final = f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/secrets"
CA_PATH: Final = f"/api/v1/namespaces/{AGENT_NAMESPACE}/configmaps/{CA_CONFIG_MAP}"
COORDINATION: Final = "coordination.k8s.io"
LEASE_PATH: Final = f"/apis/{COORDINATION}/v1/namespaces/{EXTENDER_NAMESPACE}/leases/{LEASE_NAME}"
AUDIENCE: Final = "idlegpu-api"

Certify = Callable[[Installation], Awaitable[None]]
"""Creates the Secrets with the certificates."""


@dataclass(frozen=True, kw_only=True)
class RunningExtender:
    """Running extender as in its manifest, except for addresses and paths.

    Attributes:
        installation: the applied objects.
        mounted: the Secrets as mounted volumes: a folder each for extender and kube-scheduler.
    """

    installation: Installation
    server: ExtenderServer
    mounted: Path

    @property
    def process(self) -> ServerProcess:
        """The extender's process."""
        return self.server.process

    @property
    def webhooks(self) -> str:
        """Base URL of the webhooks, with TLS."""
        return self.server.webhooks

    @property
    def status(self) -> str:
        """Base URL of the status port."""
        return self.server.url

    async def make_certificates(self, *arguments: str) -> None:
        """Create the certificates as the Job does, with further arguments."""
        await run_job(self.installation, self.mounted, *arguments)

    async def read(self, path: str, token: str = "") -> tuple[int, Object]:
        """Send a GET to the API with a token, "" for none; return status and JSON."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.server.session() as session, session.get(path, headers=headers) as response:
            answer: Object = await response.json()
            return response.status, answer


@asynccontextmanager
async def running_extender(
    installation: Installation,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    certify: Certify | None = None,
) -> AsyncIterator[RunningExtender]:
    """Run the extender after the applied objects are in force.

    Args:
        installation: installation of the base, and of the component certs-job unless `certify` is
            given.
        folder: empty folder.
        variables: environment variables that add to or replace those of its container.
        certify: creates the Secrets; by default as the Job does.
    """
    mounted = folder / "mounted"
    options = await shipped_options(installation, mounted, variables, certify)
    server = ExtenderServer(
        installation.plane, name="running-extender", options=options, folder=folder
    )
    try:
        await server.ensure({})
        yield RunningExtender(installation=installation, server=server, mounted=mounted)
    finally:
        await server.process.stop()
        await remove_certificates(installation)


async def shipped_options(
    installation: Installation,
    mounted: Path,
    variables: Mapping[str, str] | None = None,
    certify: Certify | None = None,
) -> RunOptions:
    """Wait for the applied objects, create certificates, and return the extender's options.

    Args:
        installation: installation of the base, and of the component certs-job unless `certify` is
            given.
        mounted: folder for the certificates: see `show_secrets`.
        variables: environment variables that add to or replace those of its container.
        certify: creates the Secrets; by default as the Job does.
    """
    here = {"namespace": EXTENDER_NAMESPACE}
    await wait_account(installation, "extender", "list", "pods", **here)
    for resource, group in (
        ("tokenreviews", "authentication.k8s.io"),
        ("subjectaccessreviews", "authorization.k8s.io"),
    ):
        await wait_account(installation, "extender", "create", resource, group=group)
    if certify is None:
        await wait_account(installation, "certs", "create", "secrets", **here)
        await wait_account(installation, "certs", "create", "leases", **here, group=COORDINATION)
        if _is_published(installation):
            there = {"namespace": AGENT_NAMESPACE}
            await wait_account(installation, "certs", "create", "configmaps", **there)
        await run_job(installation, mounted)
    else:
        await certify(installation)
        await show_secrets(installation, mounted)
    config = find(installation.items, "ConfigMap", "idlegpu-extender")
    settings: Object = yaml.safe_load(config["data"]["settings.yaml"])
    settings["tls"] = {
        name: str(mounted / "extender" / Path(path).name) for name, path in settings["tls"].items()
    }
    container = _container(installation, "Deployment", "idlegpu-extender")
    words: list[str] = [*container["command"], *container["args"]]
    assert (words[0], words[-1]) == ("python", "/etc/idlegpu/settings.yaml")
    shipped = {
        entry["name"]: _here(str(entry["value"]), mounted) for entry in container.get("env", [])
    }
    return RunOptions(
        kubeconfig=await installation.kubeconfig(EXTENDER_NAMESPACE, "idlegpu-extender"),
        settings=settings,
        command=[sys.executable, *words[1:-1]],
        environment={**shipped, **(variables or {})},
        # The account may list all pods, so the resources in all namespaces are listed.
        token=await installation.token(EXTENDER_NAMESPACE, "idlegpu-extender", AUDIENCE),
    )


async def run_job(installation: Installation, mounted: Path, *arguments: str) -> None:
    """Run the Job of certificates in this process, with the rights of its service account.

    Args:
        installation: installation of the component certs-job.
        mounted: folder for the certificates: see `show_secrets`.
        arguments: arguments besides the Job's.
    """
    kubeconfig = await installation.kubeconfig(EXTENDER_NAMESPACE, "idlegpu-certs")
    container = _container(installation, "Job", "idlegpu-certs")
    assert container["command"] == ["python", "-m", "extender.server.certificates"]
    own = [f"--kubeconfig={kubeconfig}", "--address=127.0.0.1"]
    given = [*container["args"], *own, *arguments]
    assert await asyncio.to_thread(make_certificates, given) == 0
    await show_secrets(installation, mounted)


async def show_secrets(installation: Installation, mounted: Path) -> None:
    """Write the Secrets of extender and kube-scheduler as mounted volumes: a folder for each."""
    for side, name in SECRETS.items():
        secret = await installation.admin.request("GET", f"{SECRETS_PATH}/{name}")
        (mounted / side).mkdir(parents=True, exist_ok=True)
        for key, text in secret["data"].items():
            (mounted / side / key).write_bytes(base64.b64decode(text))


async def remove_certificates(installation: Installation) -> None:
    """Delete the objects that the Job has created, which the manifests do not contain."""
    paths = [f"{SECRETS_PATH}/{name}" for name in (CA_SECRET, *SECRETS.values())]
    for path in (*paths, CA_PATH, LEASE_PATH):
        try:
            await installation.admin.request("DELETE", path)
        except ApiError as error:
            if error.status != 404:  # the Job did not create it
                raise


async def wait_account(
    installation: Installation, account: str, verb: str, resource: str, **where: str
) -> None:
    """Wait until a service account `idlegpu-...` is authorized for a request."""
    async with await installation.client(EXTENDER_NAMESPACE, f"idlegpu-{account}") as client:
        await wait_authorized(client, verb, resource, **where)


def _here(value: str, mounted: Path) -> str:
    """Replace a shipped path or listen address by one of the test."""
    path = Path(value)
    if path.is_relative_to("/etc/idlegpu-tls"):
        return str(mounted / "extender" / path.name)
    return f"127.0.0.1:{free_port()}" if value.startswith("0.0.0.0:") else value


def _is_published(installation: Installation) -> bool:
    """Return whether the Job has also published the CA in the agents' namespace."""
    container = _container(installation, "Job", "idlegpu-certs")
    return f"--ca-namespace={AGENT_NAMESPACE}" in container["args"]


def _container(installation: Installation, kind: str, name: str) -> Object:
    spec = find(installation.items, kind, name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return dict(container)
