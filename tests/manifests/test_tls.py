"""The shipped extender and kube-scheduler: certificates made as the Job does, TLS both ways."""

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extender.certs.__main__ import main as make_certificates
from extender.certs.storing import CA_CONFIG_MAP, CA_SECRET, SECRETS
from tests.controlplane.fixtures import StartScheduler
from tests.controlplane.objects import Object, node, pod
from tests.controlplane.process import ServerProcess, free_port
from tests.controlplane.waiting import wait_for
from tests.extender.certificates import issue
from tests.manifests.installing import Installation, wait_authorized
from tests.manifests.shipped import (
    AGENT_NAMESPACE,
    EXTENDER_NAMESPACE,
    MANIFESTS,
    ROOT,
    SCHEDULER_CONFIG,
    find,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SECRETS_PATH = f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/secrets"
CA_PATH = f"/api/v1/namespaces/{AGENT_NAMESPACE}/configmaps/{CA_CONFIG_MAP}"
SIDE = "kube-scheduler"


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """An extender that runs as its manifest says.

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

    async def decided(self) -> set[str]:
        """Return the names of pods that it has decided about."""
        # The account may list all pods, so all of them are named.
        token = await self.installation.token(EXTENDER_NAMESPACE, "idlegpu-extender", "idlegpu-api")
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession(self.status, headers=headers) as session,
            session.get("/v1/decisions") as response,
        ):
            return {each["pod"].partition("/")[2] for each in (await response.json())["decisions"]}

    async def renew(self, *arguments: str) -> None:
        """Do what the Job does, with its arguments and the rights of its service account."""
        kubeconfig = await self.installation.kubeconfig(EXTENDER_NAMESPACE, "idlegpu-certs")
        job = find(self.installation.items, "Job", "idlegpu-certs")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["python", "-m", "extender.certs"]
        given = [*container["args"], f"--kubeconfig={kubeconfig}", *arguments]
        assert await asyncio.to_thread(make_certificates, given) == 0
        for side, name in SECRETS.items():
            secret = await self.installation.admin.request("GET", f"{SECRETS_PATH}/{name}")
            (self.mounted / side).mkdir(parents=True, exist_ok=True)
            for key, text in secret["data"].items():
                (self.mounted / side / key).write_bytes(base64.b64decode(text))

    def scheduler_config(self, certificates: Path) -> Object:
        """Return the shipped configuration, but for addresses and where certificates are."""
        config: Object = yaml.safe_load((SCHEDULER_CONFIG / "kube-scheduler.yaml").read_text())
        (extender,) = config["extenders"]
        extender["urlPrefix"] = self.webhooks
        for name in ("caFile", "certFile", "keyFile"):
            extender["tlsConfig"][name] = str(certificates / Path(extender["tlsConfig"][name]).name)
        return config


@pytest_asyncio.fixture
async def shipped(installation: Installation, tmp_path: Path) -> AsyncIterator[Shipped]:
    await installation.apply(MANIFESTS)
    for account, verb, resource in (("certs", "create", "secrets"), ("extender", "list", "pods")):
        async with await installation.client(EXTENDER_NAMESPACE, f"idlegpu-{account}") as client:
            await wait_authorized(client, verb, resource, namespace=EXTENDER_NAMESPACE)
    async with await installation.client(EXTENDER_NAMESPACE, "idlegpu-certs") as client:
        await wait_authorized(client, "create", "configmaps", namespace=AGENT_NAMESPACE)
    listen, status = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config = tmp_path / "settings.yaml"
    mounted = tmp_path / "mounted"
    found = Shipped(
        installation=installation,
        process=ServerProcess(
            name="shipped-extender",
            command=[sys.executable, "-m", "extender", "--config", str(config)],
            folder=tmp_path,
            ready_url=f"http://{status}/readyz",
            environment={
                **{name: "" for name in os.environ if name.startswith("IDLEGPU_")},
                "PYTHONPATH": str(ROOT),
            },
        ),
        webhooks=f"https://{listen}",
        status=f"http://{status}",
        mounted=mounted,
    )
    await found.renew()
    settings = yaml.safe_load(
        find(installation.items, "ConfigMap", "idlegpu-extender")["data"]["settings.yaml"]
    )
    kubeconfig = await installation.kubeconfig(EXTENDER_NAMESPACE, "idlegpu-extender")
    # What a pod has by its network and its volumes.
    settings |= {"listen": listen, "status_listen": status, "kubeconfig": str(kubeconfig)}
    settings["tls"] = {
        name: str(mounted / "extender" / Path(path).name) for name, path in settings["tls"].items()
    }
    del settings["peers"]
    settings.pop("agents", None)
    config.write_text(yaml.safe_dump(settings))
    try:
        await found.process.start()
        yield found
    finally:
        await found.process.stop()
        for name in (CA_SECRET, *SECRETS.values()):
            await installation.admin.request("DELETE", f"{SECRETS_PATH}/{name}")
        await installation.admin.request("DELETE", CA_PATH)


async def test_kube_scheduler_asks_over_tls_with_the_certificates_of_the_job(
    shipped: Shipped, start_scheduler: StartScheduler
) -> None:
    admin = shipped.installation.admin
    await start_scheduler(shipped.scheduler_config(shipped.mounted / SIDE))
    await admin.create_all([node(name) for name in "ab"])
    await admin.create(pod("asked"))
    await admin.wait_bound(pod("asked"))

    assert await shipped.decided() == {"asked"}


async def test_agents_find_the_cas_in_their_namespace(shipped: Shipped) -> None:
    admin = shipped.installation.admin
    told = [(await admin.request("GET", CA_PATH))["data"]]

    await shipped.renew("--next-ca")

    told.append((await admin.request("GET", CA_PATH))["data"])
    served = (shipped.mounted / "extender" / "ca.crt").read_text()
    assert [one["ca.crt"].count("BEGIN CERTIFICATE") for one in told] == [1, 2]
    assert told[1] == {"ca.crt": served}


async def test_the_guides_command_writes_what_kube_scheduler_reads(shipped: Shipped) -> None:
    guide = (ROOT / "docs" / "kube-scheduler.md").read_text()
    command = 'go-template="{{index .data \\"$file\\" | base64decode}}"'
    assert command in guide
    for file in ("ca.crt", "tls.crt", "tls.key"):
        template = command.replace("$file", file).replace('\\"', "'").replace('"', "")
        written = await shipped.installation.plane.kubectl(
            "-n", "idlegpu", "get", "secret", SECRETS[SIDE], "-o", template.replace("'", '"')
        )

        assert written.encode() == (shipped.mounted / SIDE / file).read_bytes()


async def test_whoever_shows_a_certificate_of_another_ca_places_without_us(
    shipped: Shipped, start_scheduler: StartScheduler, tmp_path: Path
) -> None:
    admin = shipped.installation.admin
    issue(tmp_path / "another")
    folder = tmp_path / "another" / SIDE
    (folder / "ca.crt").write_bytes((shipped.mounted / SIDE / "ca.crt").read_bytes())
    await start_scheduler(shipped.scheduler_config(folder))
    await admin.create_all([node(name) for name in "ab"])
    await admin.create(pod("unasked"))

    await admin.wait_bound(pod("unasked"))

    assert await shipped.decided() == set()


async def test_both_sides_go_on_when_a_new_ca_is_brought_in_by_a_bundle_and_a_restart(
    shipped: Shipped, start_scheduler: StartScheduler
) -> None:
    admin = shipped.installation.admin
    await admin.create_all([node(name) for name in "ab"])
    config = shipped.scheduler_config(shipped.mounted / SIDE)
    (extender,) = config["extenders"]
    extender["ignorable"] = False  # an unanswered question leaves the pod waiting
    scheduler = await start_scheduler(config)

    async def place(name: str) -> None:
        await admin.create(pod(name))
        await admin.wait_bound(pod(name))

    async def took_over(times: int) -> bool:
        return shipped.process.log.read_text().count("using new certificates") >= times

    await place("before")
    await shipped.renew("--next-ca")
    await wait_for(lambda: took_over(1), "the extender trusts both")
    await place("with-a-bundle")
    await scheduler.stop()
    await scheduler.start()  # it reads its CA once: now it knows both
    await shipped.renew("--switch-ca")
    await wait_for(lambda: took_over(2), "the extender shows the new CA's certificate")
    await place("switched")
    assert await shipped.decided() == {"before", "with-a-bundle", "switched"}
    await shipped.renew("--drop-ca")
    await wait_for(lambda: took_over(3), "the extender trusts the new CA alone")
    # All connections anew: kube-scheduler has read its certificate, unlike its CA, by itself.
    await shipped.process.stop()
    await shipped.process.start()
    await place("dropped")

    assert await shipped.decided() == {"dropped"}
