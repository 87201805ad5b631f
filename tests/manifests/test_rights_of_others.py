"""Rights of the second scheduler and of the certificates' Jobs: only those that they need."""

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Final

import pytest
import pytest_asyncio

from extender.server.certificates.storing import CA_CONFIG_MAP, CA_SECRET, LEASE_NAME, SECRETS
from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.installing import Installation, may, rights, wait_authorized
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.plane import SCHEDULER as KUBE_SCHEDULER
from testkit.controlplane.shipped import (
    AGENT_NAMESPACE,
    EXTENDER_NAMESPACE,
    MANIFESTS,
    OVERLAYS,
    SECOND_SCHEDULER,
)
from tests.manifests.rights import everybody, lease, patch, refused

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

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


async def test_second_scheduler_can_place_pods_and_renew_its_lease(
    installation: Installation, scheduler: ApiClient
) -> None:
    await installation.admin.create(node("a"))
    await installation.admin.create(pod("a", schedulerName="idlegpu-scheduler"))
    await gone(installation, [f"{LEASES}/{SCHEDULER[1]}"])

    held = await scheduler.request("POST", LEASES, lease(SCHEDULER[1]))
    held["spec"]["renewTime"] = "2030-01-01T00:00:00.000000Z"
    await scheduler.request("PUT", f"{LEASES}/{SCHEDULER[1]}", held)
    for kind in ("nodes", "pods", "persistentvolumes", "persistentvolumeclaims"):
        await scheduler.request("GET", f"/api/v1/{kind}")
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "a"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "a"},
    }
    await scheduler.request("POST", "/api/v1/namespaces/default/pods/a/binding", binding)


async def test_second_scheduler_has_no_other_rights(
    installation: Installation, scheduler: ApiClient
) -> None:
    await installation.admin.create(node("a"))
    await installation.admin.request("POST", LEASES, lease("another"))
    own = f"/api/v1/namespaces/{EXTENDER_NAMESPACE}"

    assert await refused(scheduler, "PATCH", f"{LEASES}/another", CHANGE)
    assert await refused(scheduler, "PATCH", "/api/v1/nodes/a", CHANGE)
    assert await refused(scheduler, "DELETE", "/api/v1/nodes/a")
    assert await refused(scheduler, "POST", "/api/v1/namespaces/default/pods", pod("b"))
    assert await refused(scheduler, "GET", f"{own}/secrets")
    assert await refused(scheduler, "GET", f"{own}/secrets/{SECRETS['kube-scheduler']}")
    assert await refused(scheduler, "GET", f"{own}/configmaps")
    assert not await may(scheduler, "create", "serviceaccounts/token", namespace=SCHEDULER[0])
    assert not await may(scheduler, "impersonate", "users")


async def test_its_manifests_pass_a_dry_run(installation: Installation) -> None:
    await installation.apply(MANIFESTS / "rbac")

    await installation.dry_run(SECOND_SCHEDULER)


# --- certificates ---------------------------------------------------------------------------------


async def test_certificate_job_can_write_only_its_secrets(
    installation: Installation,
) -> None:
    await installation.apply(MANIFESTS)
    secrets = f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/secrets"
    maps = f"/api/v1/namespaces/{AGENT_NAMESPACE}/configmaps"
    own = [f"{secrets}/{name}" for name in (CA_SECRET, *SECRETS.values())]
    own += [f"{maps}/{CA_CONFIG_MAP}", f"{LEASES}/{LEASE_NAME}"]
    made_by = {secrets: secret, maps: config_map, LEASES: lease}
    others = [f"{collection}/another" for collection in made_by]
    await gone(installation, (*own, *others))
    for collection, make in made_by.items():
        await installation.admin.request("POST", collection, make("another"))
    try:
        async with await installation.client(*CERTS) as client:
            for resource, namespace, group in (
                ("secrets", EXTENDER_NAMESPACE, ""),
                ("configmaps", AGENT_NAMESPACE, ""),
                ("leases", EXTENDER_NAMESPACE, COORDINATION),
            ):
                await wait_authorized(client, "create", resource, namespace=namespace, group=group)
            for path in own:
                collection, _, name = path.rpartition("/")
                await client.request("POST", collection, made_by[collection](name))
                await patch(client, path, CHANGE)
                await client.request("GET", path)

                assert await refused(client, "DELETE", path)
                assert await refused(client, "GET", collection)
            for path in others:
                assert await refused(client, "GET", path)
                assert await refused(client, "PATCH", path, CHANGE)
            elsewhere = f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/configmaps"
            assert await refused(client, "POST", elsewhere, config_map("another"))
            assert await refused(client, "POST", "/api/v1/namespaces/default/secrets", secret("a"))
            assert await refused(client, "GET", WEBHOOKS)
    finally:
        await gone(installation, (*own, *others))


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


async def test_with_admission_the_extender_sees_one_lease_and_renews_none(
    installation: Installation,
) -> None:
    await installation.apply(OVERLAYS / "admission")
    for name in (SCHEDULER[1], "another"):
        await gone(installation, [f"{LEASES}/{name}"])
        await installation.admin.request("POST", LEASES, lease(name))
    try:
        async with await installation.client(EXTENDER_NAMESPACE, "idlegpu-extender") as client:
            where = {"group": COORDINATION, "namespace": EXTENDER_NAMESPACE}
            await wait_authorized(client, "get", "leases", name=SCHEDULER[1], **where)

            await client.request("GET", f"{LEASES}/{SCHEDULER[1]}")

            assert await refused(client, "PATCH", f"{LEASES}/{SCHEDULER[1]}", CHANGE)
            assert await refused(client, "GET", f"{LEASES}/another")
            assert await refused(client, "GET", LEASES)
            assert await refused(client, "GET", WEBHOOKS)
    finally:
        await gone(installation, [f"{LEASES}/{name}" for name in (SCHEDULER[1], "another")])
