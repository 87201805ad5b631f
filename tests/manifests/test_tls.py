"""The shipped extender and kube-scheduler: certificates made as the Job does, TLS both ways."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extender.certs.storing import SECRETS
from tests.controlplane.deployed import scheduler_config
from tests.controlplane.fixtures import StartScheduler
from tests.controlplane.objects import Object, node, pod
from tests.controlplane.waiting import wait_for
from tests.extender.certificates import issue
from tests.manifests.installing import Installation
from tests.manifests.running import CA_PATH, RunningExtender, running_extender
from tests.manifests.shipped import MANIFESTS, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SIDE = "kube-scheduler"


@pytest_asyncio.fixture
async def shipped(installation: Installation, tmp_path: Path) -> AsyncIterator[RunningExtender]:
    await installation.apply(MANIFESTS)
    async with running_extender(installation, tmp_path) as running:
        yield running


def asking(shipped: RunningExtender, certificates: Path) -> Object:
    """Return the shipped configuration, but for addresses and where certificates are."""
    return scheduler_config(shipped.webhooks, certificates=certificates)


async def decided(shipped: RunningExtender) -> set[str]:
    """Return the names of pods that it has decided about."""
    answer = await shipped.server.get("/v1/decisions")
    return {each["pod"].partition("/")[2] for each in answer["decisions"]}


async def test_kube_scheduler_asks_over_tls_with_the_certificates_of_the_job(
    shipped: RunningExtender, start_scheduler: StartScheduler
) -> None:
    admin = shipped.installation.admin
    await start_scheduler(asking(shipped, shipped.mounted / SIDE))
    await admin.create_all([node(name) for name in "ab"])
    await admin.create(pod("asked"))
    await admin.wait_bound(pod("asked"))

    assert await decided(shipped) == {"asked"}


async def test_agents_find_the_cas_in_their_namespace(shipped: RunningExtender) -> None:
    admin = shipped.installation.admin
    told = [(await admin.request("GET", CA_PATH))["data"]]

    await shipped.make_certificates("--next-ca")

    told.append((await admin.request("GET", CA_PATH))["data"])
    served = (shipped.mounted / "extender" / "ca.crt").read_text()
    assert [one["ca.crt"].count("BEGIN CERTIFICATE") for one in told] == [1, 2]
    assert told[1] == {"ca.crt": served}


async def test_the_guides_command_writes_what_kube_scheduler_reads(
    shipped: RunningExtender,
) -> None:
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
    shipped: RunningExtender, start_scheduler: StartScheduler, tmp_path: Path
) -> None:
    admin = shipped.installation.admin
    issue(tmp_path / "another")
    folder = tmp_path / "another" / SIDE
    (folder / "ca.crt").write_bytes((shipped.mounted / SIDE / "ca.crt").read_bytes())
    await start_scheduler(asking(shipped, folder))
    await admin.create_all([node(name) for name in "ab"])
    await admin.create(pod("unasked"))

    await admin.wait_bound(pod("unasked"))

    assert await decided(shipped) == set()


async def test_both_sides_go_on_when_a_new_ca_is_brought_in_by_a_bundle_and_a_restart(
    shipped: RunningExtender, start_scheduler: StartScheduler
) -> None:
    admin = shipped.installation.admin
    await admin.create_all([node(name) for name in "ab"])
    config = asking(shipped, shipped.mounted / SIDE)
    (extender,) = config["extenders"]
    extender["ignorable"] = False  # an unanswered question leaves the pod waiting
    scheduler = await start_scheduler(config)

    async def place(name: str) -> None:
        await admin.create(pod(name))
        await admin.wait_bound(pod(name))

    async def took_over(times: int) -> bool:
        return shipped.process.log.read_text().count("using new certificates") >= times

    await place("before")
    await shipped.make_certificates("--next-ca")
    await wait_for(lambda: took_over(1), "the extender trusts both")
    await place("with-a-bundle")
    await scheduler.stop()
    await scheduler.start()  # it reads its CA once: now it knows both
    await shipped.make_certificates("--switch-ca")
    await wait_for(lambda: took_over(2), "the extender shows the new CA's certificate")
    await place("switched")
    assert await decided(shipped) == {"before", "with-a-bundle", "switched"}
    await shipped.make_certificates("--drop-ca")
    await wait_for(lambda: took_over(3), "the extender trusts the new CA alone")
    # All connections anew: kube-scheduler has read its certificate, unlike its CA, by itself.
    await shipped.process.stop()
    await shipped.process.start()
    await place("dropped")

    assert await decided(shipped) == {"dropped"}
