"""The shipped extender and kube-scheduler with the Job's certificates: mutual TLS."""

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extender.server.certificates.issuing import Files
from extender.server.certificates.storing import CA_SECRET
from testkit.certificates import issue
from testkit.controlplane.deployed import scheduler_config
from testkit.controlplane.fixtures import StartScheduler
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.running import CA_PATH, RunningExtender, running_extender
from testkit.controlplane.services import HTTP_TIMEOUT
from testkit.controlplane.shipped import MANIFESTS, SCHEDULER_CONFIG
from testkit.controlplane.waiting import wait_for
from tests.manifests.scripts import run

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

SIDE = "kube-scheduler"
SERVICE_PATH: Final = "/api/v1/namespaces/idlegpu/services/idlegpu-extender"

RENEWALS: Final = 3
"""Smallest number of renewals while pods are placed."""


@pytest_asyncio.fixture
async def shipped(installation: Installation, tmp_path: Path) -> AsyncIterator[RunningExtender]:
    await installation.apply(MANIFESTS)
    async with running_extender(installation, tmp_path) as running:
        yield running


def asking(shipped: RunningExtender, certificates: Path) -> Object:
    """Return the shipped configuration, except for addresses, paths and the time limit of calls."""
    patient = {"httpTimeout": HTTP_TIMEOUT}
    return scheduler_config(shipped.webhooks, patient, certificates=certificates)


def insisting(shipped: RunningExtender) -> Object:
    """Return the same configuration, but with an extender that is not ignorable."""
    config = asking(shipped, shipped.mounted / SIDE)
    (extender,) = config["extenders"]
    extender["ignorable"] = False
    return config


async def place(shipped: RunningExtender, *names: str) -> None:
    """Place pods, one after another."""
    for each in map(pod, names):
        await shipped.installation.admin.create(each)
        await shipped.installation.admin.wait_bound(each)


async def took_over(shipped: RunningExtender, times: int) -> bool:
    """Return whether the extender has reloaded certificates at least `times` times."""
    return shipped.process.log.read_text().count("using new certificates") >= times


async def decided(shipped: RunningExtender) -> set[str]:
    """Return the names of pods for which it has decided."""
    answer = await shipped.server.get("/v1/decisions")
    return {each["pod"].partition("/")[2] for each in answer["decisions"]}


async def counted(shipped: RunningExtender, name: str) -> list[tuple[Mapping[str, str], float]]:
    """Return labels and values of one of its counters."""
    async with shipped.server.session() as session, session.get("/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
        samples = [sample for family in families for sample in family.samples]
    return [(sample.labels, sample.value) for sample in samples if sample.name == name]


async def test_kube_scheduler_runs_with_the_scripts_configuration(
    shipped: RunningExtender, start_scheduler: StartScheduler, tmp_path: Path
) -> None:
    plane, folder = shipped.installation.plane, tmp_path / "idlegpu"
    script = SCHEDULER_CONFIG / "control-plane.sh"
    done = await asyncio.to_thread(run, script, str(folder), kubeconfig=plane.kubeconfig())
    assert done.returncode == 0, done.stderr
    service = await shipped.installation.admin.request("GET", SERVICE_PATH)
    address = f"https://{service['spec']['clusterIP']}:8888"
    written = (folder / "kube-scheduler.yaml").read_text()
    assert f"urlPrefix: {address}\n" in written

    # No kube-proxy serves the Service here; besides, only the time limit of calls is changed.
    config = yaml.safe_load(written.replace(address, shipped.webhooks))
    config["extenders"][0]["httpTimeout"] = HTTP_TIMEOUT
    await start_scheduler(config)
    await shipped.installation.admin.create_all([node(name) for name in "ab"])
    await place(shipped, "asked")

    assert await decided(shipped) == {"asked"}


async def test_agents_find_the_cas_in_their_namespace(shipped: RunningExtender) -> None:
    admin = shipped.installation.admin
    published = [(await admin.request("GET", CA_PATH))["data"]]

    await shipped.make_certificates("--next-ca")

    published.append((await admin.request("GET", CA_PATH))["data"])
    served = (shipped.mounted / "extender" / "ca.crt").read_text()
    assert [one["ca.crt"].count("BEGIN CERTIFICATE") for one in published] == [1, 2]
    assert published[1] == {"ca.crt": served}


async def authority(shipped: RunningExtender) -> Files:
    """Return the CA that the Job created."""
    path = f"/api/v1/namespaces/idlegpu/secrets/{CA_SECRET}"
    held = await shipped.installation.admin.request("GET", path)
    return {name: b64decode(held["data"][name]) for name in ("ca.crt", "ca.key")}


async def misconfigured(how: str, shipped: RunningExtender, folder: Path) -> Object:
    """Return a configuration with which the extender refuses kube-scheduler."""
    if how == "another side's":
        return asking(shipped, shipped.mounted / "extender")
    issue(folder, days_ago=366, files=await authority(shipped))
    shown = folder / SIDE
    (shown / "ca.crt").write_bytes((shipped.mounted / SIDE / "ca.crt").read_bytes())
    return asking(shipped, shown)


@pytest.mark.parametrize("how", ["expired-certificate", "another side's"])
async def test_a_scheduler_that_is_not_let_in_places_without_us(
    shipped: RunningExtender, start_scheduler: StartScheduler, tmp_path: Path, how: str
) -> None:
    await start_scheduler(await misconfigured(how, shipped, tmp_path / "wrong"))
    await shipped.installation.admin.create_all([node(name) for name in "ab"])

    await place(shipped, "bypassed")

    assert await decided(shipped) == set()
    failures = await counted(shipped, "idlegpu_tls_handshake_failures_total")
    refused = {
        labels["reason"] for labels, count in failures if labels["port"] == "webhooks" and count > 0
    }
    # The last one passes the handshake, and is then refused for its name.
    assert refused == (set() if how == "another side's" else {how})


async def test_no_pod_is_left_waiting_while_certificates_are_renewed_under_load(
    shipped: RunningExtender, start_scheduler: StartScheduler
) -> None:
    await shipped.installation.admin.create_all([node(name) for name in "abcde"])
    scheduler = await start_scheduler(insisting(shipped))
    logged = len(scheduler.log.read_text())  # through other instances of the counter
    pods = [f"pod-{number}" for number in range(40)]

    placing = asyncio.create_task(place(shipped, *pods))
    renewed = 0
    while not placing.done() or renewed < RENEWALS:
        renewed += 1
        await shipped.make_certificates("--renew-days=365")
        await wait_for(partial(took_over, shipped, renewed), "it shows the new certificate")
    await placing

    assert await decided(shipped) == set(pods)
    answered = await counted(shipped, "idlegpu_requests_total")
    assert {labels["outcome"] for labels, count in answered if count > 0} == {"answered"}
    # Failed requests or answers: Go's error contains the verb and the address.
    assert "/filter" not in scheduler.log.read_text()[logged:]


async def test_both_sides_continue_during_a_ca_change_by_bundle_and_restart(
    shipped: RunningExtender, start_scheduler: StartScheduler
) -> None:
    await shipped.installation.admin.create_all([node(name) for name in "ab"])
    scheduler = await start_scheduler(insisting(shipped))

    await place(shipped, "before")
    await shipped.make_certificates("--next-ca")
    await wait_for(partial(took_over, shipped, 1), "the extender trusts both")
    await place(shipped, "with-a-bundle")
    await scheduler.stop()
    await scheduler.start()  # it reads its CA once: now it trusts both
    await shipped.make_certificates("--switch-ca")
    await wait_for(partial(took_over, shipped, 2), "the extender shows the new CA's certificate")
    await place(shipped, "switched")
    assert await decided(shipped) == {"before", "with-a-bundle", "switched"}
    await shipped.make_certificates("--drop-ca")
    await wait_for(partial(took_over, shipped, 3), "the extender trusts the new CA alone")
    # All connections are new: kube-scheduler reloads its certificate, unlike its CA, by itself.
    await shipped.process.stop()
    await shipped.process.start()
    await place(shipped, "dropped")

    assert await decided(shipped) == {"dropped"}
