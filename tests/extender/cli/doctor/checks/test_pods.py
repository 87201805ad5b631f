"""Checks that pods can use their assigned GPUs."""

from typing import Any

import pytest

from extender.cli.doctor.facts import Facts
from tests.extender.cli.doctor.things import NOW, claim, evidence, found, node, pod, severities


def at(*pods: dict[str, Any], **labels: str) -> Facts:
    reported = {
        f"nvidia.com/cuda.{name.replace('_', '.', 1)}": value for name, value in labels.items()
    }
    return Facts(at=NOW, nodes=(node(labels=reported),), pods=pods)


OLD = {"runtime-version_major": "12", "runtime-version_minor": "4"}


# --- IG301 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "image",
    [
        "nvidia/cuda:13.0.1-runtime-ubuntu24.04",
        "pytorch/pytorch:2.9.0-cuda13.0-cudnn9-runtime",
        "registry.example.com/team/model:1.2-cu130",
    ],
)
def test_a_pod_whose_cuda_is_newer_than_the_drivers_is_reported(image: str) -> None:
    facts = at(pod("new", 1, image=image, phase="Pending"), **OLD)

    assert severities("IG301", facts) == ["error"]
    assert f"{image} needs CUDA 13.0, driver 580.95.05 has 12.4" in evidence("IG301", facts)


def test_container_runtime_errors_are_reported() -> None:
    message = (
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update "
        "your driver to a newer version"
    )
    state = [
        {"ready": False, "state": {"waiting": {"reason": "RunContainerError", "message": message}}}
    ]

    assert "unsatisfied condition cuda>=12.8" in evidence(
        "IG301", at(pod("new", 1, phase="Pending", statuses=state), **OLD)
    )


def test_a_supported_cuda_version_is_no_finding() -> None:
    minor = pod("minor", 1, image="nvidia/cuda:12.8.0-base", phase="Pending")
    old = pod("old", 1, image="nvidia/cuda:11.8.0-base", phase="Pending")
    compatible = pod("runs", 1, image="nvidia/cuda:13.0.1-base")
    no_gpu = pod("none", 0, image="nvidia/cuda:13.0.1-base", phase="Pending")
    plain = pod("plain", 1, image="busybox:1.36", phase="Pending")

    assert found("IG301", at(minor, old, compatible, no_gpu, plain, **OLD)) == []


def test_a_driver_without_cuda_labels_is_known_by_its_version() -> None:
    labels = {
        "nvidia.com/cuda.runtime-version.major": None,
        "nvidia.com/cuda.driver-version.full": "535.104.05",
    }
    newer = pod("new", 1, image="nvidia/cuda:13.0.1-base", phase="Pending")

    facts = Facts(at=NOW, nodes=(node(labels=labels),), pods=(newer,))
    assert "driver 535.104.05 has 12.0" in evidence("IG301", facts)


# --- IG302 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "gpus", "expected"),
    [
        ("0,1", 2, ["warning"]),
        ("1,0", 2, ["warning"]),
        ("0", 2, ["error"]),
        ("3", 1, ["error"]),
        ("", 1, ["error"]),
        ("GPU-1", 1, ["error"]),
        ("0", 0, []),
    ],
)
def test_gpus_that_are_chosen_by_hand_are_reported(
    value: str, gpus: int, expected: list[str]
) -> None:
    facts = at(pod("mine", gpus, env={"CUDA_VISIBLE_DEVICES": value}))

    assert severities("IG302", facts) == expected


@pytest.mark.parametrize(
    ("script", "gpus", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES=3 python train.py", 1, ["error"]),
        ("cd /app && export CUDA_VISIBLE_DEVICES='1,2'; python train.py", 2, ["error"]),
        ('(CUDA_VISIBLE_DEVICES="GPU-1" python train.py)', 1, ["error"]),
        ("CUDA_VISIBLE_DEVICES=$CARD python train.py", 2, ["error"]),
        ("CUDA_VISIBLE_DEVICES=0 python train.py", 2, ["warning"]),
        ("CUDA_VISIBLE_DEVICES=0,1 python train.py", 2, ["warning"]),
        # Each process has its own GPUs.
        ("CUDA_VISIBLE_DEVICES=0 python a.py & CUDA_VISIBLE_DEVICES=1 python b.py", 2, []),
        ("CUDA_VISIBLE_DEVICES=$LOCAL_RANK python train.py", 2, []),
        ("CUDA_VISIBLE_DEVICES=$(cat /gpus) python train.py", 2, []),
        ("CUDA_VISIBLE_DEVICES=-1 python prepare.py; python train.py", 2, []),
        ("CUDA_VISIBLE_DEVICES= python prepare.py; python train.py", 2, []),
        ("# CUDA_VISIBLE_DEVICES=3 python train.py\npython train.py", 1, []),
        ('echo "CUDA_VISIBLE_DEVICES=3"', 1, []),
        ("unset CUDA_VISIBLE_DEVICES; python train.py", 1, []),
        ("CUDA_VISIBLE_DEVICES=3 python train.py", 0, []),
    ],
)
def test_gpus_that_a_command_chooses_are_reported(
    script: str, gpus: int, expected: list[str]
) -> None:
    facts = at(pod("mine", gpus, command=["sh", "-c", script], env={"CARD": "5"}))

    assert severities("IG302", facts) == expected


def test_variables_set_by_a_command_are_reported_with_the_pod() -> None:
    facts = at(pod("mine", 1, command=["env", "CUDA_VISIBLE_DEVICES=3", "python", "train.py"]))

    assert evidence("IG302", facts) == (
        "team/mine: CUDA_VISIBLE_DEVICES='3' in its command, 1 GPUs requested"
    )


def test_pods_that_leave_it_alone_are_well() -> None:
    assert found("IG302", at(pod("a", 2), pod("b", 1, env={"CUDA_CACHE_PATH": "/tmp"}))) == []


# --- IG303 --------------------------------------------------------------------------------------


VLLM = ["vllm", "serve", "model"]
SGLANG = ["python", "-m", "sglang.launch_server"]


@pytest.mark.parametrize(
    ("command", "gpus", "expected"),
    [
        ([*VLLM, "--tensor-parallel-size", "4"], 2, ["error"]),
        ([*VLLM, "--tensor-parallel-size=2"], 4, ["warning"]),
        ([*VLLM, "-tp", "2", "-pp", "2"], 2, ["error"]),
        ([*VLLM], 4, ["warning"]),
        (["sh", "-c", "exec vllm serve model --tensor-parallel-size 8 | tee log"], 4, ["error"]),
        (["text-generation-launcher", "--num-shard", "2"], 1, ["error"]),
        (["python", "-m", "sglang.launch_server", "--tp", "8"], 4, ["error"]),
        # Equal to the pod's GPUs.
        ([*VLLM, "--tensor-parallel-size", "4"], 4, []),
        ([*VLLM, "-tp", "2", "-pp", "2"], 4, []),
        ([*VLLM], 1, []),
        (["text-generation-launcher"], 4, []),
        (["python", "train.py"], 4, []),
        # Spread over several pods.
        ([*VLLM, "-tp", "8", "-pp", "2", "--distributed-executor-backend", "ray"], 8, []),
        (["python", "-m", "sglang.launch_server", "--tp", "16", "--nnodes", "2"], 8, []),
        ([*SGLANG, "--tp-size", "2", "--dp-size", "2"], 2, ["error"]),
        ([*SGLANG, "--tp-size", "8", "--dp-size", "8", "--enable-dp-attention"], 4, ["error"]),
        # The data parallel ranks share the GPUs of the tensor parallel ones.
        ([*SGLANG, "--tp-size", "8", "--dp-size", "8", "--enable-dp-attention"], 8, []),
        # Without a number, without GPUs.
        ([*VLLM, "--tensor-parallel-size", "$(TP)"], 4, []),
        ([*VLLM, "--tensor-parallel-size", "4"], 0, []),
    ],
)
def test_parallelism_that_differs_from_the_request_is_reported(
    command: list[str], gpus: int, expected: list[str]
) -> None:
    assert severities("IG303", at(pod("server", gpus, command=command))) == expected


def test_the_shards_of_tgi_may_stand_in_the_environment() -> None:
    server = pod("server", 1, command=["text-generation-launcher"], env={"NUM_SHARD": "2"})

    assert "NUM_SHARD 2, so 2 GPUs; it requests 1" in evidence("IG303", at(server))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*VLLM, "--tensor-parallel-size", "$(TP)"], id="the-kubelets"),
        pytest.param([*VLLM, "--tensor-parallel-size=$(TP)"], id="the-kubelets-joined"),
        pytest.param(["sh", "-c", "vllm serve model -tp $TP"], id="a-shells"),
        pytest.param(["sh", "-c", "vllm serve model -tp ${TP}"], id="a-shells-braced"),
        pytest.param(["sh", "-c", "vllm serve model -tp ${SIZE:-4}"], id="a-shells-default"),
    ],
)
@pytest.mark.parametrize(("gpus", "expected"), [(4, []), (2, ["error"]), (8, ["warning"])])
def test_a_size_may_stand_in_a_variable(command: list[str], gpus: int, expected: list[str]) -> None:
    server = pod("server", gpus, command=command, env={"TP": "4"})

    assert severities("IG303", at(server)) == expected


# --- IG304 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "placed", "expected"),
    [
        ("gone::0; away", "", ["warning"]),
        ("gone; node-1::2", "", []),
        ("gone; Node-1", "", []),
        ("gone", "node-1", []),
        (" ; ", "", []),
    ],
)
def test_a_waiting_pod_whose_targets_do_not_exist_is_reported(
    target: str, placed: str, expected: list[str]
) -> None:
    waiting = pod("new", 1, node=placed, annotations={"idlegpu.io/target": target})

    assert severities("IG304", at(waiting)) == expected
    if expected:
        assert "team/new names gone, away" in evidence("IG304", at(waiting))


def test_a_pod_that_only_prefers_its_target_does_not_wait_for_it() -> None:
    wishes = {"idlegpu.io/target": "gone", "idlegpu.io/target-policy": "prefer"}

    assert severities("IG304", at(pod("new", 1, annotations=wishes))) == []


# --- IG306 --------------------------------------------------------------------------------------


def test_pod_with_a_claim_only_is_reported_as_info() -> None:
    facts = Facts(at=NOW, pods=(), claims=(claim("solo"),))

    assert severities("IG306", facts) == ["info"]
    assert evidence("IG306", facts) == "team/solo: claim solo-gpu with 1 GPU"


def test_claims_of_gpu_pods_or_other_drivers_are_ignored() -> None:
    asking = pod("served", 1)
    asking["metadata"]["uid"] = "uid-served"
    network = claim("net", driver="dra.net")
    facts = Facts(at=NOW, pods=(asking,), claims=(claim("served"), network))

    assert found("IG306", facts) == []


def test_claim_of_a_pod_group_is_reported_unless_its_pods_request_gpus() -> None:
    reserved = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "train"}
    shared = claim("train")
    shared["status"]["reservedFor"] = [{**reserved, "uid": "uid-group"}]
    rank = pod("rank", 1)
    rank["spec"]["schedulingGroup"] = {"podGroupName": "train"}

    alone = Facts(at=NOW, pods=(), claims=(shared,))

    assert evidence("IG306", alone) == "team/train (PodGroup): claim train-gpu with 1 GPU"
    assert found("IG306", Facts(at=NOW, pods=(rank,), claims=(shared,))) == []


# --- odd containers, drivers and commands ---------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("580.65", "13.0"), ("579.9", "12.0"), ("525.60", "12.0"), ("524.1", "11.0"),
        ("450.36", "11.0"), ("449.1", "10.0"),
    ],
)  # fmt: skip
def test_the_driver_says_its_newest_cuda(driver: str, cuda: str) -> None:
    labels = {
        "nvidia.com/cuda.runtime-version.major": None,
        "nvidia.com/cuda.driver-version.full": driver,
    }
    newer = pod("new", 1, image="nvidia/cuda:14.0-base", phase="Pending")

    facts = Facts(at=NOW, nodes=(node(labels=labels),), pods=(newer,))
    assert f"driver {driver} has {cuda}" in evidence("IG301", facts)


def test_older_labels_name_cuda_and_driver_too() -> None:
    labels = {
        "nvidia.com/cuda.runtime-version.major": None,
        "nvidia.com/cuda.driver-version.full": None,
        "nvidia.com/cuda.runtime.major": "12",
        "nvidia.com/cuda.runtime.minor": "2",
        "nvidia.com/cuda.driver.major": "535",
    }
    newer = pod("new", 1, image="nvidia/cuda:13.0-base", phase="Pending")

    facts = Facts(at=NOW, nodes=(node(labels=labels),), pods=(newer,))
    assert "driver 535 has 12.2" in evidence("IG301", facts)
    unknown = {
        **labels,
        "nvidia.com/cuda.runtime.major": None,
        "nvidia.com/cuda.driver.major": None,
    }
    assert found("IG301", Facts(at=NOW, nodes=(node(labels=unknown),), pods=(newer,))) == []


def test_a_variable_may_state_the_cuda_that_a_container_needs() -> None:
    env = {"NVIDIA_REQUIRE_CUDA": "cuda>=13.1 brand=tesla"}
    needy = pod("new", 1, image="nvidia/cuda:12.0-base", env=env, phase="Pending")

    assert "needs CUDA 13.1, driver 580.95.05 has 12.4" in evidence("IG301", at(needy, **OLD))


def test_a_pod_on_an_unknown_node_and_a_container_without_gpus_are_not_judged() -> None:
    newer: dict[str, Any] = {"image": "nvidia/cuda:13.0-base", "phase": "Pending"}
    aside = pod("aside", 1, image="busybox", phase="Pending")
    aside["spec"]["containers"].append({"name": "aside", "image": newer["image"]})

    assert found("IG301", at(pod("new", 1, node="gone", **newer), aside, **OLD)) == []


def test_the_refusal_of_an_earlier_start_is_reported() -> None:
    message = "unsatisfied condition: driver>=550, please update"
    last = [{"ready": False, "lastState": {"terminated": {"message": message}}}]

    assert evidence("IG301", at(pod("new", 1, statuses=last), **OLD)) == (
        "team/new on node-1: the container runtime says: unsatisfied condition driver>=550"
    )


@pytest.mark.parametrize(
    ("values", "count", "what"),
    [
        ("CUDA_VISIBLE_DEVICES=0 a", 2, "a command sees some of the pod's GPUs"),
        ("CUDA_VISIBLE_DEVICES=0,1 a", 2, "it has no effect now"),
        ("CUDA_VISIBLE_DEVICES=0,1 a; CUDA_VISIBLE_DEVICES=3 b", 2, "it names other GPUs"),
    ],
)
def test_the_finding_says_what_the_setting_does(values: str, count: int, what: str) -> None:
    (finding,) = found("IG302", at(pod("mine", count, command=["sh", "-c", values])))

    assert what in finding.what


def test_values_that_only_a_shell_knows_are_skipped() -> None:
    script = "CUDA_VISIBLE_DEVICES=`pick` python train.py"

    assert found("IG302", at(pod("mine", 2, command=["sh", "-c", script]))) == []


@pytest.mark.parametrize(
    "option",
    [
        *("--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--tp_size", "--num-shard"),
        *("--pipeline-parallel-size", "-pp", "--pp-size", "--pp_size"),
        *("--data-parallel-size", "-dp", "--dp-size"),
    ],
)
def test_each_server_has_its_own_option(option: str) -> None:
    assert severities("IG303", at(pod("server", 1, command=["serve", option, "2"]))) == ["error"]


@pytest.mark.parametrize(
    "word",
    [
        *("--nnodes", "--node-rank", "--dist-init-addr", "--headless"),
        *("--data-parallel-size-local", "ray"),
    ],
)
def test_a_server_over_several_pods_is_not_judged(word: str) -> None:
    command = ["serve", "--tp", "16", word, "2"]

    assert found("IG303", at(pod("server", 8, command=command))) == []


def test_each_variable_for_shards_counts() -> None:
    for name in ("NUM_SHARD", "TENSOR_PARALLEL_SIZE"):
        assert severities("IG303", at(pod("server", 1, command=["serve"], env={name: "2"})))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*VLLM, "-tp"], id="an option without a value"),
        pytest.param(["/opt/bin/vllm", "serve", "model"], id="with its folder"),
        pytest.param(["python", "-m", "vllm.entrypoints.openai.api_server"], id="as a module"),
    ],
)
def test_vllm_without_a_size_uses_one_gpu(command: list[str]) -> None:
    assert "vllm without --tensor-parallel-size, so 1 GPUs; it requests 2" in evidence(
        "IG303", at(pod("server", 2, command=command))
    )
    assert found("IG303", at(pod("server", 1, command=command))) == []


def test_only_claims_of_gpus_for_work_count() -> None:
    several = claim("several")
    devices = several["status"]["allocation"]["devices"]
    devices["results"] += [{"driver": "gpu.nvidia.com"}, {"driver": "dra.net"}]
    admin = claim("admin")
    admin["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True

    assert evidence("IG306", Facts(at=NOW, pods=(), claims=(several, admin))) == (
        "team/several: claim several-gpu with 2 GPUs"
    )
