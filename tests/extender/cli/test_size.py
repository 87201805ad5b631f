"""Proposals of GPUs for a task, and their evidence."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from extender.answers.holding import MeasuredUse, Size
from extender.cli.client import Client, ClientError
from extender.cli.manifests import propose_for
from extender.core.quantity import GIB
from extender.core.sizing import Certainty, Measured, propose, texts_in
from testkit.cli_serving import Run


@pytest.mark.parametrize(
    ("text", "command", "gpus", "gib", "is_share", "certainty"),
    [
        ("fine-tune a 7 billion model", "", 2, 59, False, "estimated"),
        ("fine-tune a 7B model with LoRA", "", 1, 19, False, "estimated"),
        ("qlora on 13b", "", 1, 13, False, "estimated"),
        ("pretraining, 350 million parameters", "", 1, 6, False, "estimated"),
        ("train a large model", "", 32, 37, False, "guessed"),
        ("inference with an 8B model", "", 1, 18, False, "estimated"),
        ("serve a 70b model in fp8", "", 2, 46, False, "estimated"),
        ("embeddings for search", "", 1, 2, True, "guessed"),
        ("something else", "", 1, None, False, "guessed"),
        ("", "vllm serve meta/Llama-3.1-70B --tensor-parallel-size 4", 4, 40, False, "estimated"),
        ("", "python -m sglang.launch_server --tp=2 --model m-8b", 2, 9, False, "estimated"),
        ("", "tensor_parallel_size: 8", 8, None, False, "stated"),
        ("", "trtllm-serve x --tp_size 2", 2, 8, False, "guessed"),
        ("", "run --http 80 --attp 9 --setup 3", 1, None, False, "guessed"),
        ("serve mixtral 8x7B", "", 2, 63, False, "estimated"),
        ("train a 350M model on 5B tokens", "", 1, 6, False, "estimated"),
        ("fine-tune 1,5 billion parameters", "", 1, 26, False, "estimated"),
        ("train 1,300 million parameters", "", 1, 22, False, "estimated"),
        ("fine-tune a 7B model on 4 GPUs", "", 4, 30, False, "estimated"),
        ("train a 7B model, two H100s", "", 2, 59, False, "estimated"),
        ("something on 8x NVIDIA A100", "", 8, None, False, "stated"),
        ("render on one RTX 4090", "", 1, None, False, "stated"),
        ("0 GPUs", "", 1, None, False, "guessed"),
        ("", "torchrun --nproc-per-node=8 run.py --model 70b", 8, None, False, "stated"),
        ("", "deepspeed --num_gpus=4 sft.py", 4, 5, False, "guessed"),
        ("", "accelerate launch --num_processes 2 x.py", 2, None, False, "stated"),
        ("", "vllm serve m-70b -tp 2 --pipeline-parallel-size 2", 4, 40, False, "estimated"),
        ("", "vllm serve m-70b -tp 8 --pipeline-parallel-size 2", 8, 10, False, "estimated"),
        ("", "vllm serve m-8b --data-parallel-size 4", 4, 18, False, "estimated"),
        ("", "vllm serve m-70b -tp 2 -dp 2", 4, 79, False, "estimated"),
        ("", "vllm serve m-8b -dp 16 --data-parallel-size-local 4", 4, 18, False, "estimated"),
        ("", "vllm serve m-8b -tp 4 --data-parallel-size 4", 4, 5, False, "estimated"),
        ("", "sglang.launch_server --tp 4 --dp-size 2", 8, 4, False, "guessed"),
        ("", "sglang.launch_server --tp 8 --dp 8 --enable-dp-attention", 8, 2, False, "guessed"),
        ("", "dp_size: 2", 2, None, False, "stated"),
        ("serve mixtral 8x7b --tp 4", "", 4, 32, False, "estimated"),
        ("serve a 70B model, TP=4", "", 4, 40, False, "estimated"),
        ("train a 7B model on five 4-GPU nodes", "", 4, 30, False, "estimated"),
        ("", "cpu: 500m memory: 512M image: vllm --model m-13b", 1, 30, False, "estimated"),
        ("", "python3 -m vllm.api_server --model m-13b", 1, 30, False, "estimated"),
        ("", "vllm serve SmolLM2-135M", 1, 1, True, "estimated"),
        ("", "vllm serve m-8b --kv-cache-dtype fp8", 1, 18, False, "estimated"),
        ("", "vllm serve m-8b --enable-lora --max-lora-rank 16", 1, 18, False, "estimated"),
        (
            "",
            "vllm tensor_parallel_size: 2 pipeline_parallel_size: 2 m-70b",
            4,
            40,
            False,
            "estimated",
        ),
        ("4bit inference of a 13B model", "", 1, 10, True, "estimated"),
        ("serve 1.8 trillion parameters in 8bit", "", 64, 37, False, "estimated"),
        ("serve whisper-large-v3", "", 1, 16, False, "guessed"),
        ("embeddings with a large model", "", 1, 2, True, "guessed"),
    ],
)
def test_proposal_states_its_basis(
    text: str, command: str, gpus: int, gib: int | None, is_share: bool, certainty: str
) -> None:
    found = propose(text, command)

    assert (found.gpus, found.is_share_enough, found.certainty.value) == (gpus, is_share, certainty)
    assert found.memory_bytes == (None if gib is None else gib * GIB)
    assert found.because


def test_a_task_that_no_card_holds_is_said_so() -> None:
    found = propose("fine-tune a 70B model on 4 GPUs")

    assert (found.memory_bytes, found.models) == (294 * GIB, ())
    assert "no usual card has 294 GiB: spread the task over more GPUs" in found.because
    assert propose("train a 4B model on 1 GPU").models == ("A100 80GB", "H100", "H200")
    assert propose("train a 7B model on 1 GPU").models == ("H200", "B200", "B300")
    assert propose("train a 14B model on 1 GPU").models == ("B300",)


def test_use_of_similar_pods_counts_before_the_description() -> None:
    measured = Measured(by="owner", pods=3, memory_bytes=9 * GIB)

    found = propose("train a 7B model", "", measured)

    assert (found.gpus, found.memory_bytes, found.models) == (1, 11 * GIB, ())
    assert found.certainty is Certainty.MEASURED
    assert found.because == (
        "3 pods with the same owner used up to 9.0 GiB of a GPU; a fifth more is proposed",
    )


@pytest.mark.parametrize(
    "document",
    [
        {
            "kind": "InferenceService",
            "spec": {"predictor": {"model": {"args": ["--tensor-parallel-size", "4"]}}},
        },
        {
            "kind": "LeaderWorkerSet",
            "spec": {
                "leaderWorkerTemplate": {
                    "workerTemplate": {
                        "spec": {"containers": [{"command": ["sh", "-c", "vllm serve m -tp 4"]}]}
                    }
                }
            },
        },
        {
            "kind": "RayService",
            "spec": {"serveConfigV2": "engine_kwargs:\n  tensor_parallel_size: 4\n"},
        },
        {"kind": "RayService", "spec": {"args": {"tp-size": 4}}},
        {"kind": "RayService", "spec": {"engine": {"tensor-parallel-size": "4"}}},
        {"kind": "LLMInferenceService", "spec": {"parallelism": {"tensor": 4, "data": 2}}},
        {
            "kind": "InferenceService",
            "spec": {"predictor": {"model": {"env": [{"name": "TP_SIZE", "value": "4"}]}}},
        },
        {
            "kind": "InferenceService",
            "spec": {"predictor": {"model": {"args": ["--tensor_parallel_size=4"]}}},
        },
        {
            "kind": "LeaderWorkerSet",
            "spec": {
                "leaderWorkerTemplate": {
                    "leaderTemplate": {"spec": {"containers": [{"args": ["--tp-size", "4"]}]}}
                }
            },
        },
    ],
)
def test_the_size_in_any_kind_of_manifest_is_found(document: dict[str, Any]) -> None:
    assert propose("", " ".join(texts_in(document))).gpus == 4


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
