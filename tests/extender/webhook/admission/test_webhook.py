"""Test which pods get a scheduler, and that no pod is ever refused."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import aiohttp
import pytest

from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.kube.client import KubeClient
from extender.runtime.metrics import Metrics
from extender.settings.api import Admission
from extender.webhook.admission import (
    _MAX_BODY_BYTES,
    _MAX_READING,
    _MAX_READING_EACH,
    PATH,
    AdmissionWebhook,
    Proposals,
    SchedulerLease,
    build_webhook,
)
from testkit.fake_kube import eventually
from testkit.webhook_requests import Client, MakeClient, pod
from tests.extender.webhook.admission.reviews import review

GPU_CONTAINER = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
LABEL = "idlegpu.io/scheduler"
MADE = {"schedulerName": "default-scheduler"}


@dataclass
class Scheduler:
    """Stand-in for the check whether the scheduler is present."""

    is_fresh: bool = True

    async def run(self) -> None:
        """Do nothing."""


@dataclass
class Served:
    client: Client
    scheduler: Scheduler
    metrics: Metrics
    webhook: AdmissionWebhook

    async def admit(self, body: object) -> dict[str, Any]:
        """Send a body and return the `response` of the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.client.post(PATH, data=BytesIO(data))
        assert answer.status == 200
        review = await answer.json()
        assert (review["apiVersion"], review["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response: dict[str, Any] = review["response"]
        assert response["allowed"] is True
        return response

    async def scheduler_of(self, item: dict[str, Any]) -> str:
        """Return the scheduler that a new pod gets, "" if it keeps its own."""
        response = await self.admit(review(object=item))
        if "patch" not in response:
            return ""
        change, toleration = json.loads(base64.b64decode(response["patch"]))
        assert toleration["value"][0]["key"] == "idlegpu.io/scheduler"
        assert change["path"] == "/spec/schedulerName"
        return str(change["value"])

    def count(self, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "idlegpu_admissions_total", {"outcome": outcome}
        )
        return value or 0.0


@pytest.fixture
async def served(aiohttp_client: MakeClient) -> Served:
    scheduler, metrics = Scheduler(), Metrics()
    webhook = AdmissionWebhook(
        "idlegpu-scheduler",
        taint_key="idlegpu.io/scheduler",
        resources=lambda: ResourceNames(("nvidia.com/gpu", "nvidia.com/mig-*")),
        policy=Policy,
        lease=cast("SchedulerLease", scheduler),
        admissions=metrics.admissions,
    )
    return Served(await aiohttp_client(webhook.build_app()), scheduler, metrics, webhook)


def expression(operator: str, *values: str) -> dict[str, Any]:
    """Return a term of affinity to the label of a scheduler's nodes."""
    return {"matchExpressions": [{"key": LABEL, "operator": operator, "values": list(values)}]}


def named(operator: str, *nodes: str) -> dict[str, Any]:
    """Return a term of affinity to nodes by name."""
    field = {"key": "metadata.name", "operator": operator, "values": list(nodes)}
    return {"matchFields": [field]}


def choosing(*terms: dict[str, Any]) -> dict[str, Any]:
    """Return a GPU pod with required node affinity."""
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return made(pod(), affinity={"nodeAffinity": required})


def owned(kind: str) -> dict[str, Any]:
    """Return a GPU pod with an owner of this kind."""
    item: dict[str, Any] = made(pod())
    owner = {"apiVersion": "apps/v1", "kind": kind, "name": "it", "controller": True}
    return {**item, "metadata": {**item["metadata"], "ownerReferences": [owner]}}


def made(item: dict[str, Any], **spec: object) -> dict[str, Any]:
    """Return a pod as the API server shows it: with its defaults."""
    return {**item, "spec": {**item["spec"], **MADE, **spec}}


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(made(pod()), id="whole-gpu"),
        pytest.param(made(pod(resource="nvidia.com/mig-1g.5gb")), id="mig"),
        pytest.param(made(pod(), schedulerName=""), id="no-scheduler-yet"),
        pytest.param(made(pod(enabled="true")), id="enabled"),
        pytest.param(made(pod(enabled="maybe")), id="bad-annotation"),
        pytest.param(owned("ReplicaSet"), id="a-replica-set's"),
        pytest.param(made(pod(), nodeSelector={"disk": "ssd"}), id="another-label"),
        pytest.param(made(pod(), nodeSelector={LABEL: "idlegpu-scheduler"}), id="its-nodes"),
        pytest.param(choosing(expression("In", "another", "idlegpu-scheduler")), id="its-too"),
        pytest.param(choosing(expression("DoesNotExist"), expression("Exists")), id="or-its"),
        pytest.param(choosing(named("NotIn", "gpu-7")), id="not-one-node"),
    ],
)
async def test_gpu_pod_gets_the_scheduler_name(served: Served, item: dict[str, Any]) -> None:
    assert await served.scheduler_of(item) == "idlegpu-scheduler"
    assert served.count("set") == 1


async def test_gpus_of_an_init_container_count_too(served: Served) -> None:
    item = made(pod(gpus=None))
    item["spec"]["initContainers"] = [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]

    assert await served.scheduler_of(item) == "idlegpu-scheduler"


@pytest.mark.parametrize(
    ("item", "outcome"),
    [
        pytest.param(made(pod(gpus=None)), "no-gpu", id="no-gpu"),
        pytest.param(made(pod(resource="example.com/gpu")), "no-gpu", id="another-resource"),
        pytest.param(made(pod(gpus=0)), "no-gpu", id="zero"),
        pytest.param(made(pod(enabled="false")), "disabled", id="disabled"),
        pytest.param(made(pod(enabled="False")), "disabled", id="disabled-in-capitals"),
        pytest.param(made(pod(), schedulerName="volcano"), "other-scheduler", id="other-scheduler"),
        pytest.param(made(pod(), nodeName="gpu-7"), "bound", id="bound"),
        pytest.param(owned("DaemonSet"), "pinned", id="a-daemon-set's"),
        pytest.param(choosing(named("In", "gpu-7")), "pinned", id="node-by-name"),
        pytest.param(
            made(pod(), nodeSelector={LABEL: "another"}), "other-nodes", id="others-nodes"
        ),
        pytest.param(
            choosing(expression("NotIn", "idlegpu-scheduler")), "other-nodes", id="not-its-nodes"
        ),
        pytest.param(choosing(expression("DoesNotExist")), "other-nodes", id="no-schedulers-nodes"),
    ],
)
async def test_other_pods_stay_as_they_are(
    served: Served, item: dict[str, Any], outcome: str
) -> None:
    assert await served.scheduler_of(item) == ""
    assert served.count(outcome) == 1


async def test_no_pod_is_assigned_to_an_absent_scheduler(served: Served) -> None:
    served.scheduler.is_fresh = False

    assert await served.scheduler_of(made(pod())) == ""
    assert served.count("scheduler-absent") == 1

    served.scheduler.is_fresh = True
    assert await served.scheduler_of(made(pod())) == "idlegpu-scheduler"


async def test_the_creator_of_a_pod_is_warned_of_invalid_annotations(served: Served) -> None:
    response = await served.admit(review(object=made(pod(gpu_memory="lots"))))

    (warning,) = response["warnings"]
    assert "idlegpu.io/gpu-memory" in warning


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"no json",
        {"kind": "Pod"},
        review(operation="UPDATE"),
        review(object="a pod"),
        b'{"request":{"uid":' + b"[" * 2000,
        b" " * (_MAX_BODY_BYTES + 1),
        review(object={"spec": {"containers": [GPU_CONTAINER] * 1001}}),
    ],
    ids=["empty", "null", "text", "pod", "update", "no-object", "deep", "large", "crowded"],
)
async def test_an_unreadable_review_allows_the_pod_and_is_counted_and_logged(
    served: Served, body: object
) -> None:
    response = await served.admit(body)

    assert "patch" not in response
    assert response["warnings"] == ["idlegpu could not read this pod; it is created unchanged"]
    assert served.count("unreadable") == 1


async def test_slow_or_too_many_reviews_allow_the_pod(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.webhook.admission._READ_SECONDS", 0.05)
    never = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await never.wait()

    async with served.client.post(PATH, data=slowly()) as answer:
        response = (await answer.json())["response"]

    assert (response["allowed"], "patch" in response) == (True, False)
    monkeypatch.setattr("extender.webhook.admission._MAX_READING", 0)
    assert await served.scheduler_of(made(pod())) == ""
    assert served.count("unreadable") == 2


@pytest.mark.parametrize("spec", [None, [], "x", {"containers": "x"}, {"containers": [None, 7]}])
async def test_a_pod_of_any_shape_is_allowed(served: Served, spec: object) -> None:
    item = {"metadata": {"annotations": 7}, "spec": spec}

    assert await served.scheduler_of(item) == ""


async def test_a_fault_of_the_webhook_allows_the_pod(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr("extender.webhook.admission.parse_request", fail)

    response = await served.admit(review(object=made(pod())))

    assert (response["uid"], "patch" in response) == ("705ab4f5", False)
    assert served.count("fault") == 1
    assert "internal error" in caplog.messages


async def test_endless_reviews_from_one_address_do_not_block_another(served: Served) -> None:
    never = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await never.wait()

    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0), limit=0)
    async with aiohttp.ClientSession(connector=connector) as greedy:
        url = served.client.make_url(PATH)
        slow = [
            asyncio.create_task(greedy.post(url, data=slowly())) for _ in range(_MAX_READING + 10)
        ]
        await eventually(
            lambda: served.count("unreadable") == _MAX_READING + 10 - _MAX_READING_EACH
        )

        assert await served.scheduler_of(made(pod())) == "idlegpu-scheduler"
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
    await eventually(lambda: not served.webhook._reading)


async def test_the_log_stays_short_for_any_input(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("made up")

    for number in range(50):
        await served.admit(b"{" * (number + 1))
    monkeypatch.setattr("extender.webhook.admission.parse_request", fail)
    for _ in range(50):
        await served.admit(review(object=made(pod())))

    assert (served.count("unreadable"), served.count("fault")) == (50, 50)
    assert caplog.messages == ["unreadable admission review", "internal error"]


def test_settings_enable_the_webhook_and_its_proposals() -> None:
    def built(settings: Admission) -> AdmissionWebhook | None:
        return build_webhook(
            cast("KubeClient", None),
            settings,
            own_namespace="gpu",
            resources=ResourceNames,
            policy=Policy,
            admissions=Metrics().admissions,
            proposals=proposals,
        )

    proposals = Proposals(lambda _: None, lambda: 0)
    plain = built(Admission(listen="[::]:8890"))
    proposing = built(Admission(listen="[::]:8890", proposals=True, lease_namespace="other"))

    assert built(Admission()) is None
    assert plain is not None
    assert proposing is not None
    assert (plain._lease._name, plain._proposals) == ("gpu/idlegpu-scheduler", None)
    assert (proposing._lease._name, proposing._proposals) == ("other/idlegpu-scheduler", proposals)
