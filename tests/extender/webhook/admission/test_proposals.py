"""Annotations that the admission webhook proposes for pods without annotations."""

import base64
import json
import time
from typing import Any, cast

import pytest

from extender.core.nodes.pod_groups import Kin
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.runtime.metrics import Metrics
from extender.webhook.admission import (
    AdmissionOutcome,
    AdmissionWebhook,
    Proposals,
    Review,
    SchedulerLease,
)

GIB = 1 << 30
CHAT: Any = {"ownerReferences": [{"controller": True, "kind": "StatefulSet", "name": "chat"}]}


class Always:
    """Scheduler that is always present."""

    is_fresh = True

    async def run(self) -> None:
        """Do nothing."""


def measured_like(kin: Kin) -> tuple[str, list[int]] | None:
    """Return the measured use of the StatefulSet chat of a team."""
    return ("team/StatefulSet chat", [9 * GIB, 5 * GIB]) if "team/StatefulSet chat" in kin else None


def admitted(
    item: dict[str, Any], proposals: Proposals, policy: Policy | None = None
) -> dict[str, str]:
    """Return the annotations of a pod after its admission."""
    webhook = AdmissionWebhook(
        "idlegpu-scheduler",
        taint_key="",
        resources=ResourceNames,
        policy=lambda: policy or Policy(),
        lease=cast("SchedulerLease", Always()),
        admissions=Metrics().admissions,
        proposals=proposals,
    )
    outcome, answer = webhook.decide(Review(uid="u", namespace="team", pod=item))
    assert outcome is AdmissionOutcome.SET
    annotations: dict[str, str] = dict(item["metadata"].get("annotations") or {})
    for change in json.loads(base64.b64decode(json.loads(answer)["response"]["patch"])):
        _, _, name = change["path"].partition("/metadata/annotations")
        if name:
            annotations[name[1:].replace("~1", "/")] = change["value"]
        elif change["path"] == "/metadata/annotations":
            annotations |= change["value"]
    return annotations


def pod(*args: str, gpus: int = 1, **metadata: Any) -> dict[str, Any]:
    container = {"args": list(args), "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {"metadata": metadata, "spec": {"containers": [container]}}


@pytest.fixture
def proposals() -> Proposals:
    return Proposals(measured_like, lambda: 80 * GIB)


def test_memory_is_proposed_as_similar_pods_were_measured(proposals: Proposals) -> None:
    assert admitted(pod(**CHAT), proposals) == {
        "idlegpu.io/gpu-memory": f"{11 * 1024}Mi",
        "idlegpu.io/proposal": "measured: 2 pods with the same owner used up to 9.0 GiB of a GPU; "
        "a fifth more is proposed",
    }


def test_use_by_pods_with_equal_images_is_proposed_but_not_by_equal_requests() -> None:
    def with_equal(kind: str) -> dict[str, str]:
        def measured(kin: Kin) -> tuple[str, list[int]] | None:
            key = next((key for key in kin if f" {kind} " in key), "")
            return (key, [9 * GIB]) if key else None

        item = pod("--tensor-parallel-size=2", "llama-7b", gpus=2)
        item["spec"]["containers"][0]["image"] = "registry.example.com/chat:1"
        return admitted(item, Proposals(measured, lambda: 80 * GIB))

    assert "idlegpu.io/gpu-memory" in with_equal("images")
    assert "idlegpu.io/gpu-memory" not in with_equal("requests")


def test_no_more_is_proposed_than_the_largest_card_can_give() -> None:
    found = admitted(pod(**CHAT), Proposals(measured_like, lambda: 11 * GIB))
    unknown = admitted(pod(**CHAT), Proposals(measured_like, lambda: 0))

    assert found["idlegpu.io/gpu-memory"] == f"{int(11 * GIB * 0.9) >> 20}Mi"
    assert unknown["idlegpu.io/gpu-memory"] == f"{9 * 1024 + 1}Mi"


def test_models_are_proposed_by_the_size_of_the_model_for_the_pods_own_gpus(
    proposals: Proposals,
) -> None:
    serves = ("vllm", "serve", "meta/Llama-3.1-70B")

    found = admitted(pod(*serves, gpus=4, annotations={"team": "a"}), proposals)

    assert found["idlegpu.io/prefer-models"] == "L40S,A40,A100 80GB,H100"
    assert "idlegpu.io/gpu-memory" not in found
    assert found["idlegpu.io/proposal"].startswith("estimated: inference of 70 billion")
    assert found["team"] == "a"


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(pod("vllm", "serve", "chat"), id="a-guess"),
        pytest.param(pod("sleep", "1"), id="nothing-known"),
        pytest.param(
            pod("vllm", "m-70b", annotations={"idlegpu.io/require-models": "H100"}),
            id="requires-models",
        ),
        pytest.param(
            pod(
                annotations={"idlegpu.io/gpu-memory": "1Gi", "idlegpu.io/prefer-models": "L4"},
                **CHAT,
            ),
            id="says-it-all",
        ),
        pytest.param(pod(annotations={"idlegpu.io/gpu-memory": "bad"}, **CHAT), id="invalid"),
    ],
)
def test_a_pods_own_annotations_and_mere_guesses_change_nothing(
    item: dict[str, Any], proposals: Proposals
) -> None:
    assert admitted(item, proposals) == item["metadata"].get("annotations", {})


def test_a_limit_of_the_framework_counts_before_a_proposal(proposals: Proposals) -> None:
    item = pod("--gpu-memory-utilization", "0.4", **CHAT)

    assert admitted(item, proposals, Policy(reads_memory_limits=True)) == {}


def test_a_fault_leaves_a_pod_its_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Kin) -> None:
        raise RuntimeError("broken")

    assert admitted(pod(**CHAT), Proposals(fail, lambda: 0)) == {}
    assert "cannot propose annotations" in caplog.text


@pytest.mark.parametrize(
    "text", ["1" * 200_000, "1." * 50_000, "7" + " " * 100_000, "--tp " * 9000]
)
def test_no_command_takes_long(text: str, proposals: Proposals) -> None:
    begun = time.process_time()

    admitted(pod(text), proposals)

    assert time.process_time() - begun < 0.5  # a few milliseconds
