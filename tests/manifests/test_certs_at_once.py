"""Several Jobs that issue certificates concurrently at the real API server create one CA."""

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from cryptography import x509

from extender.kube.client import KubeClient, KubeError
from extender.server.certificates.__main__ import changed, main
from extender.server.certificates.issuing import Wanted, expires_at
from extender.server.certificates.storing import CA_SECRET, SECRETS, Secrets
from testkit.controlplane.installing import Installation
from testkit.controlplane.running import (
    CA_PATH,
    COORDINATION,
    LEASE_PATH,
    SECRETS_PATH,
    remove_certificates,
    wait_account,
)
from testkit.controlplane.shipped import AGENT_NAMESPACE, EXTENDER_NAMESPACE, MANIFESTS

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

AT_ONCE: Final = 4
WANTED: Final = Wanted(names=("idlegpu-extender",))

Held = dict[str, dict[str, bytes]]
"""Content of each Secret."""


@dataclass(frozen=True)
class Jobs:
    """Runner of the Job's program with the rights of its account."""

    installation: Installation
    kubeconfig: Path

    async def run(self, *arguments: str, times: int = AT_ONCE) -> None:
        """Run several Jobs concurrently; all of them succeed."""
        given = [
            "--secrets",
            f"--namespace={EXTENDER_NAMESPACE}",
            f"--kubeconfig={self.kubeconfig}",
        ]
        given += [f"--ca-namespace={AGENT_NAMESPACE}", *arguments]
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(asyncio.to_thread(main, given)) for _ in range(times)]
        assert [one.result() for one in runs] == [0] * times

    async def held(self) -> Held:
        """Return the content of the Secrets."""
        found: Held = {}
        for name in (CA_SECRET, *SECRETS.values()):
            secret = await self.installation.admin.request("GET", f"{SECRETS_PATH}/{name}")
            found[name] = {key: base64.b64decode(text) for key, text in secret["data"].items()}
        return found

    async def names(self) -> set[str]:
        """Return the names of the existing Secrets."""
        listed = (await self.installation.admin.request("GET", SECRETS_PATH))["items"]
        return {item["metadata"]["name"] for item in listed} & {CA_SECRET, *SECRETS.values()}

    async def agree(self) -> Held:
        """Check that the Secrets fit together, and return their content."""
        held = await self.held()
        authority = held[CA_SECRET]
        names = [name for name in ("ca.crt", "next.crt", "previous.crt") if name in authority]
        bundle = b"".join(authority[name] for name in names)
        issuer = x509.load_pem_x509_certificate(authority["ca.crt"])
        for name in SECRETS.values():
            certificate = x509.load_pem_x509_certificate(held[name]["tls.crt"])
            certificate.verify_directly_issued_by(issuer)
            assert held[name]["ca.crt"] == bundle
        published = await self.installation.admin.request("GET", CA_PATH)
        assert published["data"]["ca.crt"].encode() == bundle
        return held


@pytest_asyncio.fixture
async def jobs(installation: Installation) -> AsyncIterator[Jobs]:
    await installation.apply(MANIFESTS)
    here = {"namespace": EXTENDER_NAMESPACE}
    await wait_account(installation, "certs", "create", "secrets", **here)
    await wait_account(installation, "certs", "patch", "secrets", **here, name=CA_SECRET)
    await wait_account(installation, "certs", "create", "leases", **here, group=COORDINATION)
    await wait_account(installation, "certs", "create", "configmaps", namespace=AGENT_NAMESPACE)
    kubeconfig = await installation.kubeconfig(EXTENDER_NAMESPACE, "idlegpu-certs")
    yield Jobs(installation, kubeconfig)
    await remove_certificates(installation)


async def test_several_at_once_make_one_ca_and_bring_in_another(jobs: Jobs) -> None:
    await jobs.run()
    seen = [await jobs.agree()]
    for step in ("--next-ca", "--drop-ca", "--renew-days=365"):
        await jobs.run(step)
        seen.append(await jobs.agree())
    await jobs.run("--switch-ca", times=1)
    seen.append(await jobs.agree())

    made, following, *_, last = (held[CA_SECRET] for held in seen)
    assert following["ca.crt"] == made["ca.crt"]
    assert (last["ca.crt"], last["previous.crt"]) == (following["next.crt"], made["ca.crt"])
    renewed = SECRETS["extender"]
    assert expires_at(seen[3][renewed]["tls.crt"]) > datetime.now(UTC)
    assert all(
        before[renewed]["tls.crt"] != after[renewed]["tls.crt"]
        for before, after in pairwise(seen[2:])
    )


@pytest.mark.parametrize("is_there", [False, True], ids=["there is none yet", "it is there"])
async def test_the_slower_run_overwrites_nothing(jobs: Jobs, *, is_there: bool) -> None:
    if is_there:
        await jobs.run(times=1)
    client = await KubeClient.connect(jobs.kubeconfig)
    try:
        slower = Secrets(client, EXTENDER_NAMESPACE)
        outdated = changed(await slower.read(), WANTED, "next")
        await jobs.run("--next-ca", times=1)
        before = await jobs.agree()

        with pytest.raises(KubeError) as refused:
            await slower.write_authority(outdated)
        with pytest.raises(KubeError) as refused_too:
            await slower.write_sides(outdated)

        assert (refused.value.status, refused_too.value.status) == (409, 409)
        assert await jobs.agree() == before
        assert not await slower.is_current()
    finally:
        await client.close()


async def test_the_next_run_completes_the_work_of_a_dead_one(jobs: Jobs) -> None:
    await jobs.run(times=1)
    client = await KubeClient.connect(jobs.kubeconfig)
    try:
        dying = Secrets(client, EXTENDER_NAMESPACE)
        await dying.write_authority(changed(await dying.read(), WANTED, "next"))
    finally:
        await client.close()
    held = await jobs.held()
    assert held[SECRETS["extender"]]["ca.crt"].count(b"BEGIN") == 1

    await jobs.run(times=1)

    held = await jobs.agree()
    assert held[SECRETS["extender"]]["ca.crt"].count(b"BEGIN") == 2


async def test_a_second_run_writes_nothing_until_the_first_releases_the_lease(jobs: Jobs) -> None:
    collection, _, name = LEASE_PATH.rpartition("/")
    spec = {"holderIdentity": "the-first", "leaseDurationSeconds": 3600}
    lease = {
        "apiVersion": f"{COORDINATION}/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": spec,
    }
    await jobs.installation.admin.request("POST", collection, lease)
    second = asyncio.create_task(jobs.run(times=1), name="second")
    try:
        done, _ = await asyncio.wait([second], timeout=2.0)  # an undisturbed run takes half of it
        assert not done
        assert await jobs.names() == set()
    finally:
        await jobs.installation.admin.request(
            "PATCH",
            LEASE_PATH,
            {"spec": {"holderIdentity": None}},
            content_type="application/merge-patch+json",
        )
        await second

    await jobs.agree()
    left = await jobs.installation.admin.request("GET", LEASE_PATH)
    assert "holderIdentity" not in left["spec"]
