"""Rights of the second scheduler and of the certificates' Jobs: only those that they need."""

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Final

import pytest
import pytest_asyncio

from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.installing import Installation, rights, wait_authorized
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import SCHEDULER as KUBE_SCHEDULER
from testkit.controlplane.shipped import EXTENDER_NAMESPACE, MANIFESTS, OVERLAYS, SECOND_SCHEDULER
from tests.manifests.rights import everybody, patch, refused

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

SCHEDULER: Final = (EXTENDER_NAMESPACE, "idlegpu-scheduler")
CERTS: Final = (EXTENDER_NAMESPACE, "idlegpu-certs")
COORDINATION: Final = "coordination.k8s.io"
ADMISSION: Final = "admissionregistration.k8s.io"
LEASES: Final = f"/apis/{COORDINATION}/v1/namespaces/{EXTENDER_NAMESPACE}/leases"
WEBHOOKS: Final = f"/apis/{ADMISSION}/v1/mutatingwebhookconfigurations"
CHANGE: Final[Object] = {"metadata": {"annotations": {"a": "b"}}}


def secret(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}


def config_map(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}


async def gone(installation: Installation, paths: Iterable[str]) -> None:
    """Delete objects of this or an earlier test."""
    for path in paths:
        with contextlib.suppress(ApiError):  # it does not exist
            await installation.admin.request("DELETE", path)


# --- the second scheduler -------------------------------------------------------------------------


@pytest_asyncio.fixture
async def scheduler(installation: Installation) -> AsyncIterator[ApiClient]:
    """Yield a client of the second scheduler's account, once its rights are in force."""
    await installation.apply(MANIFESTS)
    await installation.apply(SECOND_SCHEDULER)
    where = {"group": COORDINATION, "namespace": EXTENDER_NAMESPACE}
    async with await installation.client(*SCHEDULER) as client:
        await wait_authorized(client, "update", "leases", name=SCHEDULER[1], **where)
        await wait_authorized(client, "create", "pods/binding", namespace="default")
        await wait_authorized(client, "list", "csinodes", group="storage.k8s.io")
        yield client
    await gone(installation, [f"{LEASES}/{SCHEDULER[1]}", f"{LEASES}/another"])


async def test_second_scheduler_has_the_rights_of_a_kube_scheduler(
    installation: Installation, scheduler: ApiClient
) -> None:
    plane = installation.plane
    user = plane.users[KUBE_SCHEDULER]
    async with ApiClient(plane.server, plane.ca_file, user) as builtin:
        for namespace, own in (
            ("default", set()),
            (
                EXTENDER_NAMESPACE,
                {(COORDINATION, "leases", verb, SCHEDULER[1]) for verb in ("get", "update")},
            ),
        ):
            of_all = await everybody(installation, namespace)

            found = await rights(scheduler, namespace) - of_all

            assert found == (await rights(builtin, namespace) - of_all) | own


# --- certificates ---------------------------------------------------------------------------------


async def test_with_admission_it_may_also_set_the_ca_of_one_webhook(
    installation: Installation,
) -> None:
    items = await installation.apply(OVERLAYS / "admission")
    (webhook,) = (item for item in items if item["kind"] == "MutatingWebhookConfiguration")
    name = webhook["metadata"]["name"]
    other: Object = {**webhook, "metadata": {"name": "another"}}
    await gone(installation, [f"{WEBHOOKS}/another"])
    await installation.admin.request("POST", WEBHOOKS, other)
    try:
        async with await installation.client(*CERTS) as client:
            await wait_authorized(
                client, "patch", "mutatingwebhookconfigurations", group=ADMISSION, name=name
            )

            found = await rights(client, "default") - await everybody(installation, "default")
            await client.request("GET", f"{WEBHOOKS}/{name}")
            await patch(client, f"{WEBHOOKS}/{name}", CHANGE)

            assert found == {
                (ADMISSION, "mutatingwebhookconfigurations", verb, name)
                for verb in ("get", "patch")
            }
            assert await refused(client, "GET", f"{WEBHOOKS}/another")
            assert await refused(client, "PATCH", f"{WEBHOOKS}/another", CHANGE)
            assert await refused(client, "DELETE", f"{WEBHOOKS}/{name}")
            assert await refused(client, "POST", WEBHOOKS, other)
    finally:
        await gone(installation, [f"{WEBHOOKS}/another"])
