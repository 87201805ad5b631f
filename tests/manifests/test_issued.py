"""The real kube-scheduler calls the extender with certificates that the Job did not issue."""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from extender.server.certificates.__main__ import main as make_certificates
from extender.server.certificates.issuing import EXTENDER_NAME
from extender.server.certificates.storing import CA_SECRET, SECRETS
from testkit.controlplane.deployed import scheduler_config
from testkit.controlplane.fixtures import StartScheduler
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.running import Certify, remove_certificates, running_extender
from testkit.controlplane.services import HTTP_TIMEOUT
from testkit.controlplane.shipped import OVERLAYS, ROOT
from testkit.controlplane.waiting import wait_for
from tests.manifests.issuers import secrets_of_cert_manager, secrets_of_ones_own
from tests.manifests.issuing import CERT_MANAGER_PATH, ONES_OWN, create, issued, issuing

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

SCHEDULER_SIDE: Final = "kube-scheduler"
MERGE: Final = "application/merge-patch+json"
PROTOCOLS: Final = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)


async def as_cert_manager(installation: Installation) -> None:
    """Create the Secrets that cert-manager would create from the applied objects."""
    await create(installation, secrets_of_cert_manager(installation.items))


async def by_cert_manager(folder: Path, installation: Installation) -> None:
    """Let the real cert-manager issue certificates for the applied objects."""
    async with issuing(folder, installation):
        pass


async def with_ones_own_ca(installation: Installation) -> None:
    """Install certificates of an organization's CA, as the guide requires them."""
    await create(installation, secrets_of_ones_own(ONES_OWN))


async def as_the_guide_says(folder: Path, installation: Installation) -> None:
    """Issue certificates with idlegpu's program, and create the Secrets by the guide's commands."""
    made = folder / "certs"
    assert await asyncio.to_thread(make_certificates, [f"--folder={made}"]) == 0
    guide = (ROOT / "docs" / "install.md").read_text()
    lines = [line.strip() for line in guide.splitlines() if "create secret generic" in line]
    assert len(lines) == len(SECRETS)
    for line in lines:
        program, *words = line.replace("DIR/", f"{made}/").split()
        assert program == "kubectl"
        await installation.plane.kubectl(*words)


async def test_old_ca_still_verifies_certificates_after_renewal(
    installation: Installation, tmp_path: Path
) -> None:
    await installation.add_kinds_of_others()
    await installation.apply(OVERLAYS / "cert-manager")
    try:
        async with issuing(tmp_path, installation):
            before = await issued(installation)
            for name in ("idlegpu-ca", "idlegpu-extender", "idlegpu-kube-scheduler"):
                await renew(installation, name)
            after = await issued(installation)
    finally:
        await remove_certificates(installation)

    extender, scheduler = SECRETS["extender"], SECRETS[SCHEDULER_SIDE]
    assert before[extender]["ca.crt"] != after[extender]["ca.crt"] == after[CA_SECRET]["tls.crt"]
    for one, other in ((before, after), (after, before), (after, after)):
        shake_hands(tmp_path, one[extender], other[scheduler])


async def renew(installation: Installation, name: str) -> None:
    """Renew a Certificate as `cmctl renew` does, and wait until it is issued."""
    path = f"{CERT_MANAGER_PATH}/certificates/{name}"

    async def settled() -> Object | None:
        """Return its status once the last issuance is over; the Secret exists before."""
        now: Object = (await installation.admin.request("GET", path))["status"]
        return None if "Issuing" in {each["type"] for each in now["conditions"]} else now

    status = await wait_for(settled, f"cert-manager is done with {name}")
    condition = {
        "type": "Issuing",
        "status": "True",
        "reason": "ManuallyTriggered",
        "message": "test",
    }
    conditions = {"status": {"conditions": [*status["conditions"], condition]}}
    await installation.admin.request("PATCH", f"{path}/status", conditions, content_type=MERGE)

    async def is_renewed() -> bool:
        now = (await installation.admin.request("GET", path))["status"]
        return bool(now["revision"] > status["revision"])

    await wait_for(is_renewed, f"cert-manager has renewed {name}")


def shake_hands(
    folder: Path, extender: Mapping[str, bytes], scheduler: Mapping[str, bytes]
) -> None:
    """Perform a TLS handshake of kube-scheduler with the extender, by the contents of two Secrets.

    Raises:
        ssl.SSLError: one side does not trust the other.
    """
    server, client = (ssl.SSLContext(protocol) for protocol in PROTOCOLS)
    server.verify_mode = ssl.CERT_REQUIRED
    for context, secret in ((server, extender), (client, scheduler)):
        for name, content in secret.items():
            (folder / name).write_bytes(content)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.load_verify_locations(cadata=secret["ca.crt"].decode())
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there, server_hostname=f"{EXTENDER_NAME}.idlegpu.svc")
    answering = server.wrap_bio(there, back, server_side=True)
    for step in (asking, answering, asking, answering):
        with contextlib.suppress(ssl.SSLWantReadError):
            step.do_handshake()
    assert asking.getpeercert()
    assert answering.getpeercert()


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
        patient = {"httpTimeout": HTTP_TIMEOUT}
        config = scheduler_config(running.webhooks, patient, certificates=certificates)
        await start_scheduler(config)
        await admin.create_all([node(name) for name in "ab"])
        await admin.create(pod("asked"))
        await admin.wait_bound(pod("asked"))

        answer = await running.server.get("/v1/decisions")

        assert {each["pod"] for each in answer["decisions"]} == {"default/asked"}
