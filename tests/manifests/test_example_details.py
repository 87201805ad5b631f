"""Details of the examples, by the names that Kubernetes and the frameworks use."""

import ast
from typing import Final

import pytest
import yaml

from extender.core.prices import _SPOT_LABELS
from simulation.models import A100_40GB, A100_80GB, V100
from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import EXAMPLES

GIB: Final = 1 << 30
MIB: Final = 1 << 20
WORKERS: Final = ("model-server", "function-runtime")


def objects(name: str) -> list[Object]:
    text = (EXAMPLES / f"{name}.yaml").read_text()
    return [item for item in yaml.safe_load_all(text) if item]


def workload(name: str) -> Object:
    return objects(name)[-1]


def pod_of(name: str) -> Object:
    item = workload(name)
    spec: Object = item["spec"] if item["kind"] == "Pod" else item["spec"]["template"]["spec"]
    return spec


def container_of(name: str) -> Object:
    (container,) = pod_of(name)["containers"]
    return dict(container)


def script_of(name: str) -> str:
    """Return the Python program that an example runs, "" if it runs none."""
    interpreter, option, script = container_of(name)["command"]
    assert (interpreter, option) == ("python", "-c")
    ast.parse(script)
    return str(script)


def numbers_in(script: str) -> set[float]:
    """Return the values of all sums and products of numbers in a program."""
    found = set()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.BinOp | ast.Constant):
            try:
                value = eval(ast.unparse(node), {"__builtins__": {}})  # noqa: S307 - our own file
            except NameError:
                continue
            if isinstance(value, int | float):
                found.add(float(value))
    return found


def terms_of(name: str) -> list[Object]:
    """Return the terms of an example's node selector."""
    required = pod_of(name)["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    return [
        expression
        for term in required["nodeSelectorTerms"]
        for expression in term["matchExpressions"]
    ]


JOBS: Final = sorted(
    path.stem
    for path in EXAMPLES.glob("*.yaml")
    if list(yaml.safe_load_all(path.read_text()))[-1]["kind"] == "Job"
)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_tries_three_times_more_and_is_gone_an_hour_after_its_end(name: str) -> None:
    spec = workload(name)["spec"]

    # Spot nodes may vanish at any time, so that example retries more often.
    assert spec["backoffLimit"] == (10 if name == "gpu-spot" else 3)
    assert spec["ttlSecondsAfterFinished"] == 3600
    assert pod_of(name)["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("name", "gpus", "memory"),
    [("gpus-4-a100", 4, "64Gi"), ("gpu-a100", 1, "32Gi"), ("gpu-v100", 1, "16Gi")],
)
def test_cpu_and_memory_match_the_card(name: str, gpus: int, memory: str) -> None:
    resources = container_of(name)["resources"]

    assert resources["limits"] == {"nvidia.com/gpu": gpus, "memory": memory}
    assert resources["requests"]["memory"] == memory
    assert int(resources["requests"]["cpu"]) >= 8 * gpus


@pytest.mark.parametrize(("name", "gpus"), [("gpus-2", 2), ("gpus-4-a100", 4), ("gpus-8", 8)])
def test_several_gpus_are_of_one_pod_and_used_by_a_process_each(name: str, gpus: int) -> None:
    container = container_of(name)

    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert f"--nproc-per-node={gpus}" in container["command"]


def test_models_are_selected_by_gfd_labels() -> None:
    products = {model.name.replace(" ", "-") for model in (V100, A100_40GB, A100_80GB)}

    for name in ("gpu-by-label", "gpu-a100", "gpu-v100", "gpus-4-a100"):
        (expression,) = terms_of(name)
        assert (expression["key"], expression["operator"]) == ("nvidia.com/gpu.product", "In")
        assert products & set(expression["values"])


def test_instance_types_are_selected_by_the_cloud_label() -> None:
    assert {each["key"] for each in terms_of("gpu-by-instance-type")} == {
        "node.kubernetes.io/instance-type"
    }


def test_a_preference_has_weights_and_the_first_model_weighs_more() -> None:
    preferred = pod_of("gpu-by-preference")["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]

    weights = [each["weight"] for each in preferred]
    first, second = ("".join(str(each["preference"])) for each in preferred)
    assert weights == sorted(weights, reverse=True)
    assert all(1 <= weight <= 100 for weight in weights)
    assert ("A100" in first, "V100" in second) == (True, True)


def test_a_preferred_model_is_named_in_idlegpus_own_annotation() -> None:
    annotations = workload("gpu-by-model")["spec"]["template"]["metadata"]["annotations"]

    assert annotations["idlegpu.io/prefer-models"].split(",")[0].strip().startswith("A100")


@pytest.mark.parametrize("name", ["gpu-tainted", "gpu-spot", "smoke"])
def test_taints_of_gpu_nodes_are_tolerated(name: str) -> None:
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}

    assert toleration in pod_of(name)["tolerations"]


def test_spot_pods_select_tolerate_and_survive_spot_nodes() -> None:
    labels = {each["key"] for each in terms_of("gpu-spot")}
    tolerated = {each["key"] for each in pod_of("gpu-spot")["tolerations"]}
    (rule,) = workload("gpu-spot")["spec"]["podFailurePolicy"]["rules"]

    # All labels by which prices know spot nodes, but that of nodes that GKE no longer makes.
    assert labels == {label for label, _ in _SPOT_LABELS} - {"cloud.google.com/gke-preemptible"}
    assert tolerated - {"nvidia.com/gpu", "spot"} <= labels
    assert rule["action"] == "Ignore"


def test_shared_memory_volume_counts_to_the_pods_limit() -> None:
    mounts = {each["name"]: each["mountPath"] for each in container_of("gpus-8")["volumeMounts"]}
    (volume,) = (each for each in pod_of("gpus-8")["volumes"] if "emptyDir" in each)

    assert mounts[volume["name"]] == "/dev/shm"
    assert volume["emptyDir"]["medium"] == "Memory"
    shared = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    assert shared < int(container_of("gpus-8")["resources"]["limits"]["memory"].removesuffix("Gi"))


def test_a_cache_is_a_claim_that_outlives_the_job_and_time_is_limited() -> None:
    claim, job = objects("gpu-with-cache")
    (volume,) = pod_of("gpu-with-cache")["volumes"]
    container = container_of("gpu-with-cache")
    (mount,) = container["volumeMounts"]

    assert claim["kind"] == "PersistentVolumeClaim"
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert all(each["value"].startswith(mount["mountPath"]) for each in container["env"])
    assert job["spec"]["activeDeadlineSeconds"] == 3600


@pytest.mark.parametrize(
    ("name", "names", "cap_bytes"),
    [
        pytest.param(
            "share-onnx", ("CUDAExecutionProvider", "gpu_mem_limit"), 3 * GIB, id="onnxruntime"
        ),
        pytest.param(
            "share-tensorflow",
            ("LogicalDeviceConfiguration", "set_logical_device_configuration"),
            3584 * MIB,
            id="tensorflow",
        ),
        pytest.param(
            "share-pytorch", ("set_per_process_memory_fraction",), 3.5 * GIB, id="pytorch"
        ),
    ],
)
def test_framework_limits_its_memory_below_the_annotation(
    name: str, names: tuple[str, ...], cap_bytes: float
) -> None:
    annotations = workload(name)["spec"]["template"]["metadata"]["annotations"]
    script = script_of(name)

    said = int(annotations["idlegpu.io/gpu-memory"].removesuffix("Gi")) * GIB
    assert all(word in script for word in names)
    # TensorFlow counts in MiB.
    assert numbers_in(script) & {cap_bytes, cap_bytes / MIB}
    assert cap_bytes < said, "what CUDA itself takes comes on top"


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("share-mps", "nvidia.com/gpu.shared"),
        ("share-onnx", "nvidia.com/gpu.shared"),
        ("share-by-plain-name", "nvidia.com/gpu"),
        ("deployment-over-shares", "nvidia.com/gpu.shared"),
    ],
)
def test_share_is_requested_with_its_memory(name: str, resource: str) -> None:
    annotations = workload(name)["spec"]["template"]["metadata"]["annotations"]

    assert container_of(name)["resources"]["limits"][resource] == 1
    assert annotations["idlegpu.io/gpu-memory"].endswith("Gi")


def test_mig_is_requested_by_profile_or_by_product() -> None:
    (mixed,) = set(container_of("mig-mixed")["resources"]["limits"]) - {"memory"}
    product = pod_of("mig-single")["nodeSelector"]["nvidia.com/gpu.product"]

    assert mixed.startswith("nvidia.com/mig-")
    assert "-MIG-" in product
    assert container_of("mig-single")["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize("name", WORKERS)
def test_workers_choose_devices_with_worker_device(name: str) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text()
    (copying,) = pod_of(name)["initContainers"]
    container = container_of(name)
    environ = {each["name"]: each.get("value") for each in container["env"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}

    assert "worker_device" in text
    assert copying["image"].startswith("idlegpu-agent:")
    assert environ["PYTHONPATH"] == mounts["idlegpu"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_the_smoke_pod_runs_nvidia_smi() -> None:
    assert container_of("smoke")["command"] == ["nvidia-smi"]
