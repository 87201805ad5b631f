"""The real kube-scheduler asks the extender with certificates that the Job has not made."""

import asyncio
from base64 import b64encode
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from extender.certs.__main__ import main as make_certificates
from extender.certs.storing import CA_SECRET, SECRETS
from tests.controlplane.certmanager import cert_manager
from tests.controlplane.deployed import scheduler_config
from tests.controlplane.fixtures import StartScheduler
from tests.controlplane.objects import Object, node, pod
from tests.controlplane.waiting import wait_for
from tests.manifests.installing import Installation
from tests.manifests.issuers import secrets_of_cert_manager, secrets_of_ones_own
from tests.manifests.running import SECRETS_PATH, Certify, running_extender
from tests.manifests.shipped import OVERLAYS, ROOT
from tests.manifests.test_certificates import ONES_OWN

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SCHEDULER_SIDE: Final = "kube-scheduler"


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


async def as_cert_manager(installation: Installation) -> None:
    """Do what cert-manager does with the objects that were applied."""
    await create(installation, secrets_of_cert_manager(installation.items))


async def by_cert_manager(folder: Path, installation: Installation) -> None:
    """Have cert-manager issue what the objects that were applied ask for."""
    program = cert_manager(installation.plane, folder)
    await program.start()

    async def are_issued() -> bool:
        listed = (await installation.admin.request("GET", SECRETS_PATH))["items"]
        issued = {
            item["metadata"]["name"] for item in listed if item.get("data", {}).get("tls.crt")
        }
        return issued >= {CA_SECRET, *SECRETS.values()}

    try:
        await wait_for(are_issued, "cert-manager has issued all certificates")
    finally:
        await program.stop()  # else it would make anew what is deleted after the test


async def with_ones_own_ca(installation: Installation) -> None:
    """Bring certificates of an organization's CA, as the guide asks for them."""
    await create(installation, secrets_of_ones_own(ONES_OWN))


async def as_the_guide_says(folder: Path, installation: Installation) -> None:
    """Make certificates with our program, and the Secrets with the guide's commands."""
    made = folder / "certs"
    assert await asyncio.to_thread(make_certificates, [f"--folder={made}"]) == 0
    guide = (ROOT / "docs" / "install.md").read_text()
    lines = [line.strip() for line in guide.splitlines() if "create secret generic" in line]
    assert len(lines) == len(SECRETS)
    for line in lines:
        program, *words = line.replace("DIR/", f"{made}/").split()
        assert program == "kubectl"
        await installation.plane.kubectl(*words)


@pytest.mark.parametrize(
    "way", ["cert-manager", "as-cert-manager", "ones-own-ca", "the-guides-commands"]
)
async def test_kube_scheduler_and_extender_know_each_other(
    installation: Installation, start_scheduler: StartScheduler, tmp_path: Path, way: str
) -> None:
    admin = installation.admin
    certify: Certify = with_ones_own_ca
    if way.endswith("cert-manager"):
        await installation.add_kinds_of_others()
        await installation.apply(OVERLAYS / "cert-manager")
        itself = partial(by_cert_manager, tmp_path)
        certify = itself if way == "cert-manager" else as_cert_manager
    else:
        await installation.apply(OVERLAYS / "existing-secrets")
    if way == "the-guides-commands":
        certify = partial(as_the_guide_says, tmp_path)
    async with running_extender(installation, tmp_path, certify=certify) as running:
        certificates = running.mounted / SCHEDULER_SIDE
        await start_scheduler(scheduler_config(running.webhooks, certificates=certificates))
        await admin.create_all([node(name) for name in "ab"])
        await admin.create(pod("asked"))
        await admin.wait_bound(pod("asked"))

        answer = await running.server.get("/v1/decisions")

        assert {each["pod"] for each in answer["decisions"]} == {"default/asked"}
