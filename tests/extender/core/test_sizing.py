"""Proposals of GPUs from descriptions, commands and manifests."""

from typing import Any

import pytest

from extender.core.quantity import GIB
from extender.core.sizing import Certainty, Measured, propose, texts_in


@pytest.mark.parametrize(
    ("text", "command", "gpus", "gib", "is_share", "certainty"),
    [
        ("fine-tune a 7 billion model", "", 2, 59, False, "estimated"),
        ("fine-tune a 7B model with LoRA", "", 1, 19, False, "estimated"),
        ("qlora on 13b", "", 1, 13, False, "estimated"),
        ("qlora", "", 1, 7, False, "guessed"),
        ("peft", "", 1, 19, False, "guessed"),
        ("pretrain", "", 1, 17, False, "guessed"),
        ("rerank documents", "", 1, 2, True, "guessed"),
        ("an nf4 model", "", 1, 6, True, "guessed"),
        ("an 8-bit model", "", 1, 10, True, "guessed"),
        ("generate text", "", 1, 16, False, "guessed"),
        ("fine-tune a seven billion model", "", 2, 59, False, "estimated"),
        ("serve a Seventy-Two-billion-parameter model", "", 4, 41, False, "estimated"),
        ("serve one hundred and seventy-five billion parameters", "", 8, 49, False, "estimated"),
        ("train half a billion parameters", "", 1, 9, False, "estimated"),
        ("embeddings, a billion parameters", "", 1, 3, True, "estimated"),
        ("train a 350M model on a hundred billion tokens", "", 1, 6, False, "estimated"),
        ("render on sixteen GPUs", "", 16, None, False, "stated"),
        ("pretraining, 350 million parameters", "", 1, 6, False, "estimated"),
        ("train 1 bn parameters", "", 1, 17, False, "estimated"),
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
        ("int8 inference", "", 1, 10, True, "guessed"),
        ("serve 1.8 trillion parameters in 8bit", "", 64, 37, False, "estimated"),
        ("serve whisper-large-v3", "", 1, 16, False, "guessed"),
        ("embeddings with a large model", "", 1, 2, True, "guessed"),
        ("serve a pretrained 7B model", "", 1, 16, False, "estimated"),
        ("serve our fine-tuned llama-8b", "", 1, 18, False, "estimated"),
        ("inference with a pre-trained 13B model", "", 1, 30, False, "estimated"),
        ("fine-tune a pretrained 7B model", "", 2, 59, False, "estimated"),
        ("", "vllm serve Llama-3.1-405B-Instruct-NVFP4", 8, 38, False, "estimated"),
        ("", "text-generation-launcher --model-id m-70b --num-shard 4", 4, 40, False, "estimated"),
        ("", "vllm data_parallel_size: 16 data_parallel_size_local: 4", 4, 16, False, "guessed"),
        ("", f"image: vllm@sha256:{'a' * 61}78b args: serve", 1, 16, False, "guessed"),
        ("", "GPU-00000000-1111-2222-3a7b-444444444444 serve", 1, 16, False, "guessed"),
        ("", "generateName: a- generation: 2 python main.py", 1, None, False, "guessed"),
        ("", "serviceAccountName: a python main.py", 1, None, False, "guessed"),
        ("", "mountPath: /var/run/secrets/kubernetes.io/serviceaccount", 1, None, False, "guessed"),
    ],
)
def test_proposal_states_its_basis(
    text: str, command: str, gpus: int, gib: int | None, is_share: bool, certainty: str
) -> None:
    found = propose(text, command)

    assert (found.gpus, found.is_share_enough, found.certainty.value) == (gpus, is_share, certainty)
    assert found.memory_bytes == (None if gib is None else gib * GIB)
    assert found.because


@pytest.mark.parametrize(
    ("text", "size", "each"),
    [
        ("qlora", "7", "1"),
        ("adapter", "7", "2.8"),
        ("pretrain", "1", "18"),
        ("rerank", "0.6", "2.4"),
        ("awq", "7", "0.8"),
        ("fp8", "7", "1.4"),
        ("chat", "7", "2.4"),
        ("chat with a large model", "70", "2.4"),
    ],
)
def test_an_assumed_size_and_the_bytes_of_a_parameter_are_said(
    text: str, size: str, each: str
) -> None:
    found = propose(text).because[-1]

    assert f" of {size} billion parameters, assumed because no size such as 7B is" in found
    assert f": {each} bytes for each, " in found


@pytest.mark.parametrize(
    ("spec", "gpus", "because"),
    [
        (
            {"predictor": {"workerSpec": {"pipelineParallelSize": 2, "tensorParallelSize": 4}}},
            4,
            "4 GPUs in each of 2 pods: tensorParallelSize: 4 pipelineParallelSize: 2",
        ),
        (
            {"predictor": {"workerSpec": {"pipelineParallelSize": 3}}},
            1,
            "1 GPU in each of 3 pods: pipelineParallelSize: 3",
        ),
        (
            {"parallelism": {"pipeline": 2, "tensor": 8}},
            8,
            "8 GPUs in each of 2 pods: tensor: 8 pipeline: 2",
        ),
        (
            {"parallelism": {"data": 8, "dataLocal": 4, "expert": True, "tensor": 2}},
            8,
            "8 GPUs: tensor: 2 dataLocal: 4",
        ),
        (
            {"env": [{"name": "PP_SIZE", "value": "2"}, {"name": "TP_SIZE", "value": "2"}]},
            4,
            "4 GPUs: TP_SIZE value: 2 PP_SIZE value: 2",
        ),
        ({"env": [{"name": "TP_SIZE", "value": "2"}]}, 2, "2 GPUs: TP_SIZE value: 2"),
        ({"parallelism": 4, "completions": 4, "tensor": 2}, 1, ""),
    ],
)
def test_stages_of_a_model_are_pods_in_kserve(
    spec: dict[str, Any], gpus: int, because: str
) -> None:
    found = propose("", " ".join(texts_in({"spec": spec})))

    assert found.gpus == gpus
    assert found.because[0].endswith(because)


def test_memory_counts_all_gpus_that_hold_the_model_also_beyond_one_pod() -> None:
    stages = "vllm serve m-405b --tensor-parallel-size 8 --pipeline-parallel-size 2"
    workers = {"workerSpec": {"pipelineParallelSize": 2, "tensorParallelSize": 8}}

    found = propose("serve a 405b model", " ".join(texts_in(workers)))

    assert found.memory_bytes == 57 * GIB
    assert propose("", stages, gpus=8).memory_bytes == 57 * GIB


@pytest.mark.parametrize(
    ("gib", "models"),
    [
        (15, ()),
        (16, ("L4", "A10", "L40S", "A100", "H100")),
        (22, ("L4", "A10", "L40S", "A100", "H100")),
        (23, ("L40S", "A40", "A100 80GB", "H100")),
        (44, ("L40S", "A40", "A100 80GB", "H100")),
        (45, ("A100 80GB", "H100", "H200")),
        (79, ("A100 80GB", "H100", "H200")),
        (80, ("H200", "B200", "B300")),
        (140, ("H200", "B200", "B300")),
        (141, ("B200", "B300")),
        (178, ("B200", "B300")),
        (179, ("B300",)),
        (268, ("B300",)),
    ],
)
def test_models_with_the_memory_of_a_task_are_proposed(gib: int, models: tuple[str, ...]) -> None:
    found = propose("", "", Measured(by="owner", pods=1, memory_bytes=int(gib / 1.2 * GIB)))

    assert (found.memory_bytes, found.models) == (gib * GIB, models)


def test_a_task_that_no_card_holds_is_said_so() -> None:
    found = propose("fine-tune a 70B model on 4 GPUs")

    assert (found.memory_bytes, found.models) == (294 * GIB, ())
    assert "no usual card has 294 GiB: spread the task over more GPUs" in found.because


@pytest.mark.parametrize(("gib", "is_share"), [(12, True), (13, False)])
def test_a_share_of_a_gpu_is_enough_for_pods_that_used_little(gib: int, is_share: bool) -> None:
    measured = Measured(by="owner", pods=1, memory_bytes=int(gib / 1.2 * GIB))

    assert propose("", "", measured).is_share_enough is is_share


def test_more_gpus_than_a_node_has_are_several_pods() -> None:
    words = "more than 8 GPUs: several pods, one for each node"

    assert words in propose("render on nine GPUs").because
    assert words not in propose("render on eight GPUs").because


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
