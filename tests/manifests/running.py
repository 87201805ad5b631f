"""The extender as its manifests have it run: its settings, certificates, and rights."""

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from extender.certs.__main__ import main as make_certificates
from extender.certs.storing import CA_SECRET, SECRETS
from tests.controlplane.objects import Object
from tests.controlplane.process import ServerProcess, free_port
from tests.manifests.installing import Installation, wait_authorized
from tests.manifests.shipped import EXTENDER_NAMESPACE, ROOT, find

SECRETS_PATH = f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/secrets"


@dataclass(frozen=True, kw_only=True)
class RunningExtender:
    """An extender that runs as its manifest says, but for addresses and where files are.

    Attributes:
        installation: what was applied.
        process: the extender.
        webhooks: where it is asked, over TLS.
        status: where it is looked at.
        mounted: the Secrets, as volumes show them: a folder for each side.
    """

    installation: Installation
    process: ServerProcess
    webhooks: str
    status: str
    mounted: Path

    async def make_certificates(self, *arguments: str) -> None:
        """Do what the Job does, with its arguments and the rights of its service account."""
        kubeconfig = await self.installation.kubeconfig(EXTENDER_NAMESPACE, "idlegpu-certs")
        job = find(self.installation.items, "Job", "idlegpu-certs")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        own = [f"--kubeconfig={kubeconfig}", "--address=127.0.0.1"]
        given = [*container["args"], *own, *arguments]
        assert await asyncio.to_thread(make_certificates, given) == 0
        for side, name in SECRETS.items():
            secret = await self.installation.admin.request("GET", f"{SECRETS_PATH}/{name}")
            (self.mounted / side).mkdir(parents=True, exist_ok=True)
            for key, text in secret["data"].items():
                (self.mounted / side / key).write_bytes(base64.b64decode(text))

    async def read(self, path: str, token: str = "") -> tuple[int, Object]:
        """Ask the API with a token, "" for none; return status and answer."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            aiohttp.ClientSession(self.status) as session,
            session.get(path, headers=headers) as response,
        ):
            answer: Object = await response.json()
            return response.status, answer


@asynccontextmanager
async def running_extender(
    installation: Installation, folder: Path, variables: Mapping[str, str] | None = None
) -> AsyncIterator[RunningExtender]:
    """Run it, once what was applied is in force.

    Args:
        installation: with the base and the component certs-job applied.
        folder: an empty one.
        variables: of its environment, beside or in place of those that its container has.
    """
    for account, verb, resource in (("certs", "create", "secrets"), ("extender", "list", "pods")):
        async with await installation.client(EXTENDER_NAMESPACE, f"idlegpu-{account}") as client:
            await wait_authorized(client, verb, resource, namespace=EXTENDER_NAMESPACE)
    listen, status = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config, mounted = folder / "settings.yaml", folder / "mounted"
    deployment = find(installation.items, "Deployment", "idlegpu-extender")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    shipped = {entry["name"]: str(entry["value"]) for entry in container.get("env", [])}
    found = RunningExtender(
        installation=installation,
        process=ServerProcess(
            name="running-extender",
            command=[sys.executable, "-m", "extender", "--config", str(config)],
            folder=folder,
            ready_url=f"http://{status}/readyz",
            environment={
                **{name: "" for name in os.environ if name.startswith("IDLEGPU_")},
                **shipped,
                **(variables or {}),
                "PYTHONPATH": str(ROOT),
            },
        ),
        webhooks=f"https://{listen}",
        status=f"http://{status}",
        mounted=mounted,
    )
    await found.make_certificates()
    settings = yaml.safe_load(
        find(installation.items, "ConfigMap", "idlegpu-extender")["data"]["settings.yaml"]
    )
    kubeconfig = await installation.kubeconfig(EXTENDER_NAMESPACE, "idlegpu-extender")
    # What a pod has by its network and its volumes.
    settings |= {"listen": listen, "status_listen": status, "kubeconfig": str(kubeconfig)}
    settings["tls"] = {
        name: str(mounted / "extender" / Path(path).name) for name, path in settings["tls"].items()
    }
    for section in ("peers", "agents"):
        settings.pop(section, None)
    config.write_text(yaml.safe_dump(settings))
    try:
        await found.process.start()
        yield found
    finally:
        await found.process.stop()
        for name in (CA_SECRET, *SECRETS.values()):
            await installation.admin.request("DELETE", f"{SECRETS_PATH}/{name}")
