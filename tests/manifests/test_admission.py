"""The shipped admission webhook: a real API server calls it over TLS for real pods."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from extender.server.certificates.storing import SECRETS
from extender.settings.config import load_settings
from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.installing import Installation, may, rights, wait_authorized
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.process import free_port
from testkit.controlplane.running import Certify, RunningExtender, running_extender
from testkit.controlplane.shipped import (
    EXTENDER_NAMESPACE,
    MANIFESTS,
    OVERLAYS,
    SECOND_SCHEDULER,
    built,
    find,
)
from testkit.controlplane.waiting import wait_for
from tests.manifests.issuing import issued, issuing

OVERLAY: Final = OVERLAYS / "admission"
MANAGED, OTHER = "managed", "unmanaged"
SCHEDULER: Final = "idlegpu-scheduler"
DEFAULT: Final = "default-scheduler"
WEBHOOK: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
LEASES: Final = f"/apis/coordination.k8s.io/v1/namespaces/{EXTENDER_NAMESPACE}/leases"
LEASE_SECONDS: Final = 15
"""kube-scheduler's default. The extender reads the Lease every two seconds."""
MERGE: Final = "application/merge-patch+json"


@dataclass
class SecondScheduler:
    """Stand-in for the second scheduler that renews its Lease while it is alive."""

    admin: ApiClient
    is_alive: bool = True
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        spec = {"holderIdentity": "a", "leaseDurationSeconds": LEASE_SECONDS}
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": SCHEDULER},
            "spec": spec,
        }
        await self.admin.request("POST", LEASES, lease)
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(self._renew(), name="renewals")
            try:
                yield
            finally:
                renewing.cancel()
        await self.admin.request("DELETE", f"{LEASES}/{SCHEDULER}")

    async def die(self) -> None:
        """Renew the Lease no more; the last renewal is short, so that it soon expires."""
        self.is_alive = False
        await self._write(1)

    async def _renew(self) -> None:
        while True:
            if self.is_alive:
                await self._write(LEASE_SECONDS)
            await asyncio.sleep(0.3)

    async def _write(self, seconds: int) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"renewTime": now, "leaseDurationSeconds": seconds}
        await self.admin.request(
            "PATCH", f"{LEASES}/{SCHEDULER}", {"spec": spec}, content_type=MERGE
        )


@dataclass(frozen=True, kw_only=True)
class Admitting:
    """Cluster with the webhook in force."""

    admin: ApiClient
    extender: RunningExtender
    scheduler: SecondScheduler

    async def made(self, item: Object) -> Object:
        """Return a pod as the API server would create it, by a dry run."""
        namespace = item["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{namespace}/pods"
        return await self.admin.request("POST", path, item, parameters={"dryRun": "All"})

    async def scheduler_of(self, item: Object) -> str:
        return str((await self.made(item))["spec"]["schedulerName"])

    async def until(self, scheduler: str) -> None:
        """Wait until new GPU pods get this scheduler."""

        async def is_so() -> bool:
            return await self.scheduler_of(gpu_pod()) == scheduler

        await wait_for(is_so, f"new pods get {scheduler}", deadline_seconds=30)

    async def webhook(self) -> Object:
        return await webhook_of(self.admin)

    async def trust(self, bundle: str) -> None:
        """Set the CA by which the API server verifies the webhook, in base64."""
        webhook = await self.webhook()
        webhook["clientConfig"]["caBundle"] = bundle
        body = {"webhooks": [webhook]}
        path = f"{WEBHOOK}/idlegpu-scheduler-name"
        await self.admin.request("PATCH", path, body, content_type=MERGE)


async def webhook_of(admin: ApiClient) -> Object:
    """Return the only webhook from the API server."""
    (found,) = (await admin.request("GET", f"{WEBHOOK}/idlegpu-scheduler-name"))["webhooks"]
    return dict(found)


def gpu_pod(name: str = "probe", namespace: str = MANAGED, gpus: int = 1, **rest: Any) -> Object:
    return pod(name, gpus, namespace=namespace, **rest)


async def ensure_namespace(admin: ApiClient, name: str, labels: dict[str, str]) -> None:
    item = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    try:
        await admin.create(item)
        await admin.create_default_account(name)
    except ApiError as error:
        if error.status != 409:
            raise


@pytest_asyncio.fixture
async def admitting(installation: Installation, tmp_path: Path) -> AsyncIterator[Admitting]:
    await installation.apply(OVERLAY)
    async with await installation.client(EXTENDER_NAMESPACE, "idlegpu-certs") as client:
        await wait_authorized(
            client,
            "patch",
            "mutatingwebhookconfigurations",
            group="admissionregistration.k8s.io",
            name="idlegpu-scheduler-name",
        )
    async with in_force(installation, tmp_path) as found:
        yield found


@asynccontextmanager
async def in_force(
    installation: Installation, folder: Path, certify: Certify | None = None
) -> AsyncIterator[Admitting]:
    """Run extender and second scheduler; yield once new pods get that scheduler.

    Args:
        installation: installation of one of the overlays.
        folder: empty folder.
        certify: creates the Secrets and sets the CA in the webhook; by default as the Job does.
    """
    admin = installation.admin
    await ensure_namespace(admin, MANAGED, {"idlegpu.io/managed": "true"})
    await ensure_namespace(admin, OTHER, {"idlegpu.io/managed": "false"})
    port = free_port()
    variables = {
        "IDLEGPU_ADMISSION_LISTEN": f"127.0.0.1:{port}",
        "IDLEGPU_ADMISSION_PROPOSALS": "true",
    }
    scheduler = SecondScheduler(admin)
    async with (
        scheduler.running(),
        running_extender(installation, folder, variables, certify) as extender,
    ):
        found = Admitting(admin=admin, extender=extender, scheduler=scheduler)
        # The test's API server has no Service network to reach the extender.
        shipped = await found.webhook()
        shipped["clientConfig"] = {
            "url": f"https://localhost:{port}/admit",
            "caBundle": shipped["clientConfig"]["caBundle"],
        }
        await admin.request(
            "PATCH",
            f"{WEBHOOK}/idlegpu-scheduler-name",
            {"webhooks": [shipped]},
            content_type=MERGE,
        )
        await found.until(SCHEDULER)
        yield found


@pytest.mark.neighbours
@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_gpu_pods_of_managed_namespaces_get_the_second_scheduler_and_annotations(
    admitting: Admitting,
) -> None:
    await admitting.admin.create(gpu_pod("made"))

    made = await admitting.admin.get(gpu_pod("made"))
    assert made["spec"]["schedulerName"] == SCHEDULER
    assert {
        "key": "idlegpu.io/scheduler",
        "operator": "Equal",
        "value": SCHEDULER,
        "effect": "NoSchedule",
    } in made["spec"]["tolerations"]
    initial = {"name": "first", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    by_init = gpu_pod(gpus=0, initContainers=[initial])
    assert await admitting.scheduler_of(by_init) == SCHEDULER
    for untouched, scheduler in (
        (gpu_pod(namespace=OTHER), DEFAULT),
        (gpu_pod(namespace="default"), DEFAULT),
        (gpu_pod(gpus=0), DEFAULT),
        (gpu_pod(schedulerName="volcano"), "volcano"),
        (gpu_pod(annotations={"idlegpu.io/enabled": "false"}), DEFAULT),
        (gpu_pod(annotations={"idlegpu.io/enabled": "False"}), DEFAULT),
    ):
        assert await admitting.scheduler_of(untouched) == scheduler, untouched

    item = gpu_pod(annotations={"team": "a"})
    item["spec"]["containers"][0]["args"] = ["vllm", "serve", "meta/Llama-3.1-70B", "--tp", "1"]
    own = gpu_pod(annotations={"idlegpu.io/prefer-models": "L4"})
    own["spec"]["containers"][0]["args"] = ["vllm", "serve", "meta/Llama-3.1-70B"]

    annotations = (await admitting.made(item))["metadata"]["annotations"]

    assert annotations["idlegpu.io/prefer-models"] == "B200,B300"
    assert annotations["idlegpu.io/proposal"].startswith("estimated: inference of 70 billion")
    assert annotations["team"] == "a"
    kept = (await admitting.made(own))["metadata"]["annotations"]
    assert kept == {"idlegpu.io/prefer-models": "L4"}
    assert not (await admitting.made(gpu_pod()))["metadata"].get("annotations")


@pytest.mark.neighbours
@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_pods_keep_their_scheduler_while_a_part_fails(admitting: Admitting) -> None:
    await admitting.scheduler.die()
    await admitting.until(DEFAULT)
    await admitting.admin.create(gpu_pod("while-stale"))
    stale = await admitting.admin.get(gpu_pod("while-stale"))

    admitting.scheduler.is_alive = True
    await admitting.until(SCHEDULER)
    assert stale["spec"]["schedulerName"] == DEFAULT

    own = (await admitting.webhook())["clientConfig"]["caBundle"]
    untrusted = base64.b64encode(admitting.extender.installation.plane.ca_file.read_bytes())
    await admitting.trust(untrusted.decode())
    await admitting.until(DEFAULT)
    await admitting.trust(own)
    await admitting.until(SCHEDULER)

    await admitting.extender.process.stop()
    await admitting.admin.create(gpu_pod("while-down"))
    made = await admitting.admin.get(gpu_pod("while-down"))
    assert made["spec"]["schedulerName"] == DEFAULT


@pytest.mark.neighbours
@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_a_new_ca_is_in_the_webhook_before_a_certificate_of_it_is_shown(
    admitting: Admitting,
) -> None:
    ca_file = admitting.extender.mounted / "extender" / "ca.crt"

    async def took_over(times: int) -> bool:
        # The webhooks' port and the admission port each log it.
        log = admitting.extender.process.log.read_text()
        return log.count("using new certificates") >= 2 * times

    for times, step in enumerate(("--next-ca", "--switch-ca", "--drop-ca"), start=1):
        before = ca_file.read_bytes()
        await admitting.extender.make_certificates(step)
        config = (await admitting.webhook())["clientConfig"]
        assert config["url"].endswith("/admit")  # the other fields are unchanged
        assert base64.b64decode(config["caBundle"]) == ca_file.read_bytes()
        if step == "--switch-ca":
            await wait_for(lambda: took_over(1), "the extender shows the new CA's certificate")
        assert before != ca_file.read_bytes() or step == "--switch-ca", times
        await admitting.until(SCHEDULER)


@pytest.mark.neighbours
@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_api_server_trusts_the_webhook_by_cert_managers_cainjector(
    installation: Installation, tmp_path: Path
) -> None:
    await installation.add_kinds_of_others()
    await installation.apply(OVERLAYS / "admission-cert-manager")

    async def certify(installation: Installation) -> None:
        async def is_set() -> bool:
            webhook = await webhook_of(installation.admin)
            made = (await issued(installation))[SECRETS["extender"]]
            return base64.b64decode(webhook["clientConfig"].get("caBundle", "")) == made["ca.crt"]

        async with issuing(tmp_path, installation):
            await wait_for(is_set, "the webhook has the CA")

    async with in_force(installation, tmp_path, certify) as admitting:
        assert await admitting.scheduler_of(gpu_pod()) == SCHEDULER
        assert await admitting.scheduler_of(gpu_pod(namespace=OTHER)) == DEFAULT


@pytest.mark.neighbours
@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_the_webhook_adds_the_right_to_look_at_one_lease_and_no_other(
    installation: Installation,
) -> None:
    await installation.apply(MANIFESTS)
    account = (EXTENDER_NAMESPACE, "idlegpu-extender")
    where = {"group": "coordination.k8s.io", "namespace": EXTENDER_NAMESPACE}
    async with await installation.client(*account) as client:
        await wait_authorized(client, "create", "leases", **where)
        before = await rights(client, EXTENDER_NAMESPACE)
        assert not await may(client, "get", "leases", name=SCHEDULER, **where)
        # As the guide says: recent Jobs cannot be changed.
        await installation.admin.request(
            "DELETE",
            f"/apis/batch/v1/namespaces/{EXTENDER_NAMESPACE}/jobs/idlegpu-certs",
            parameters={"propagationPolicy": "Background"},
        )
        await installation.apply(OVERLAY)
        await wait_authorized(client, "get", "leases", name=SCHEDULER, **where)

        added = await rights(client, EXTENDER_NAMESPACE) - before

        assert added == {("coordination.k8s.io", "leases", "get", SCHEDULER)}
        assert not await may(client, "update", "leases", name=SCHEDULER, **where)
        assert not await may(client, "get", "leases", name="another", **where)


@pytest.mark.parametrize("name", ["admission", "admission-cert-manager"])
@pytest.mark.neighbours
@pytest.mark.e2e
def test_the_webhooks_address_is_served_and_its_name_is_certified(name: str) -> None:
    items = built(OVERLAYS / name)
    (webhook,) = find(items, "MutatingWebhookConfiguration", "idlegpu-scheduler-name")["webhooks"]
    service = find(items, "Service", "idlegpu-extender")
    deployment = find(items, "Deployment", "idlegpu-extender")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    content = find(items, "ConfigMap", "idlegpu-extender")["data"]["settings.yaml"].encode()
    environ = {entry["name"]: str(entry.get("value", "")) for entry in container["env"]}
    settings = load_settings(Path("settings.yaml"), environ, content)

    named = webhook["clientConfig"]["service"]
    assert (named["namespace"], named["name"]) == (EXTENDER_NAMESPACE, service["metadata"]["name"])
    (port,) = [each for each in service["spec"]["ports"] if each["port"] == named["port"]]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert settings.admission.address[1] == ports[port["targetPort"]]
    assert settings.admission.files(settings.tls)[0] == Path("/etc/idlegpu-tls/tls.crt")
    certified = f"{named['name']}.{named['namespace']}.svc"
    if name == "admission":
        job = find(items, "Job", "idlegpu-certs")
        (maker,) = job["spec"]["template"]["spec"]["containers"]
        assert "--webhook=idlegpu-scheduler-name" in maker["args"]
        assert SECRETS["extender"] == "idlegpu-extender-tls"
    else:
        certificate = find(items, "Certificate", "idlegpu-extender")["spec"]
        assert certified in certificate["dnsNames"]
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["timeoutSeconds"] <= 3


@pytest.mark.neighbours
@pytest.mark.e2e
def test_admission_gives_pods_the_shipped_scheduler_and_toleration() -> None:
    settings = load_settings(None, {}).admission
    items = built(SECOND_SCHEDULER)
    (config,) = [
        text
        for item in items
        if item["kind"] == "ConfigMap"
        for text in item["data"].values()
        if "KubeSchedulerConfiguration" in text
    ]

    assert f"schedulerName: {settings.scheduler_name}\n" in config
    assert f"resourceName: {settings.lease_name}\n" in config
    assert f"key: {settings.taint_key}\n" in config
