"""Sizing by the command line and the client: manifests, owners, namespaces."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from extender.answers.holding import MeasuredUse, Size
from extender.cli.client import Client, ClientError
from extender.cli.manifests import propose_for
from extender.core.quantity import GIB
from extender.core.sizing import Certainty
from testkit.cli_serving import Run


def test_a_manifest_is_sized_by_the_pods_of_its_controller(run: Run, tmp_path: Path) -> None:
    container = {"name": "main", "image": "team/chat", "args": ["--tp", "2", "--model", "m-14b"]}
    file = tmp_path / "deployment.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "kind": "Deployment",
                "metadata": {"name": "chat", "namespace": "team"},
                "spec": {"template": {"spec": {"containers": [container]}}},
            }
        )
    )

    shown = run("size", "-f", str(file))

    assert shown.exit_code == 0, shown.output
    assert "the command spreads the model over 2 GPUs: --tp 2" in shown.stdout
    assert "idlegpu run --gpus 2 --memory" in shown.stdout
    as_json = json.loads(run("size", "-f", str(file), "-o", "json").stdout)
    assert as_json["gpus"] == 2


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "InferenceService", "spec": {"predictor": {"containers": [{"image": "i"}]}}},
        {
            "kind": "LeaderWorkerSet",
            "spec": {
                "leaderWorkerTemplate": {
                    "workerTemplate": {"spec": {"containers": [{"image": "i"}]}}
                }
            },
        },
        {
            "kind": "RayService",
            "spec": {
                "rayClusterConfig": {
                    "workerGroupSpecs": [{"template": {"spec": {"containers": [{"image": "i"}]}}}]
                }
            },
        },
    ],
)
def test_a_manifest_of_any_kind_is_sized_by_similar_pods(document: dict[str, Any]) -> None:
    requested: list[tuple[dict[str, Any], str | None]] = []

    def measure(pod: dict[str, Any], owner: str | None) -> Size:
        requested.append((pod, owner))
        return Size(
            measured=MeasuredUse(by="images", pods=2, memory_bytes=5 * GIB, least_bytes=GIB)
        )

    named = document | {"metadata": {"name": "chat"}}
    found = propose_for(measure, documents=[named], namespace="team")

    ((pod, owner),) = requested
    assert pod["spec"]["containers"] == [{"image": "i"}]
    assert (pod["metadata"], owner) == ({"namespace": "team"}, f"{document['kind']} chat")
    assert found.certainty is Certainty.MEASURED


def test_the_kind_of_an_owner_is_found_in_any_case() -> None:
    requested: list[str | None] = []

    def measure(_: dict[str, Any], owner: str | None) -> Size:
        requested.append(owner)
        return Size(measured=None)

    found = propose_for(measure, owner="statefulset/chat", text="serve a 7B model")

    assert requested == ["StatefulSet chat"]
    assert found.because[0] == "no similar pod was measured on a shared GPU"


@pytest.mark.parametrize(
    "document", [{"kind": "Pod", "metadata": "a"}, {"kind": "PodList", "items": 5}]
)
def test_a_malformed_manifest_is_sized_by_its_words(document: dict[str, Any]) -> None:
    pod = {"spec": {"containers": [{"args": ["--tp", "2"]}]}}

    assert propose_for(lambda *_: Size(measured=None), documents=[pod | document]).gpus == 2


def test_a_manifest_without_a_namespace_is_in_the_one_that_the_user_names() -> None:
    requested: list[str] = []

    def measure(pod: dict[str, Any], _: str | None) -> Size:
        requested.append(pod["metadata"]["namespace"])
        return Size(measured=None)

    for metadata in ({}, {"namespace": "own"}):
        job = {"kind": "Job", "metadata": metadata, "spec": {"template": {"spec": {}}}}
        propose_for(measure, documents=[job], namespace="team")

    assert requested == ["team", "own"]


def test_the_client_sizes_as_the_command_line_does(url: str) -> None:
    client = Client.at(url)

    assert client.size(text="fine-tune a 7 billion model").gpus == 2
    assert client.size(command="vllm serve m --tp 4", image="team/chat").gpus == 4
    with pytest.raises(ClientError, match="must be KIND/NAME"):
        client.size(owner="chat")
    with pytest.raises(ClientError, match="cannot reach"):
        Client.at("http://127.0.0.1:9").size(image="team/chat")


def test_a_task_is_sized_without_an_extender(run: Run) -> None:
    shown = run("size", "--text", "fine-tune a 7 billion model", IDLEGPU_URL="http://127.0.0.1:9")

    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[0] == (
        "2 GPUs, 59 GiB on each: an estimate from the size of the model"
    )
    requested = run("size", "--image", "team/chat", IDLEGPU_URL="http://127.0.0.1:9")
    assert requested.exit_code == 0, requested.output
    assert "similar pods are not known" in requested.stderr


def test_the_command_line_is_for_one_pod_of_several(run: Run) -> None:
    shown = run("size", "--text", "serve a 671B model", IDLEGPU_URL="http://127.0.0.1:9")

    assert "32 GPUs" in shown.stdout
    assert "idlegpu run --gpus 8 --memory 47Gi" in shown.stdout


def test_something_must_be_said(run: Run) -> None:
    assert run("size").exit_code == 2
    assert run("size", "--owner", "chat").exit_code == 2
