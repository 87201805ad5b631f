"""Pods that failed early, possibly by their node's fault, and when."""

import pytest

from extender.sources.kubernetes.pod_failures import is_failed_early, parse_time
from testkit.kube_objects import Object, pod
from testkit.pod_records import EPOCH, T0, T30, T61, container, ended, reduced


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"containerStatuses": [container(terminated=ended())]}, id="an error"),
        pytest.param(
            {"initContainerStatuses": [container(terminated=ended())]}, id="in an init container"
        ),
        pytest.param(
            {
                "containerStatuses": [
                    {
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": ended()},
                    }
                ]
            },
            id="again and again",
        ),
        pytest.param(
            {"containerStatuses": [container(terminated=ended(137, reason="Error"))]}, id="killed"
        ),
        pytest.param(
            {
                "containerStatuses": [
                    container(terminated=ended(128, EPOCH, T0, reason="StartError"))
                ]
            },
            id="it could not be started",
        ),
        pytest.param(
            {"containerStatuses": [container(waiting={"reason": "RunContainerError"})]},
            id="the runtime cannot run it",
        ),
        pytest.param({"reason": "UnexpectedAdmissionError"}, id="the device plugin refused"),
        pytest.param({"reason": "TopologyAffinityError"}, id="the kubelet refused"),
        pytest.param(
            {
                "containerStatuses": [
                    container(
                        waiting={
                            "reason": "CreateContainerError",
                            "message": "CDI device injection failed: unresolvable CDI devices "
                            "nvidia.com/gpu=GPU-1",
                        }
                    )
                ]
            },
            id="the device is not known to the container runtime",
        ),
    ],
)
def test_a_possible_fault_of_the_node_is_an_early_failure(status: Object) -> None:
    assert is_failed_early(pod("p", node="n", **status), 60)
    assert reduced(pod("p", node="n", **status)).is_failed_early


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"containerStatuses": [container(terminated=ended(0))]}, id="success"),
        pytest.param({"containerStatuses": [container(terminated=ended(end=T61))]}, id="later"),
        pytest.param(
            {"containerStatuses": [container(terminated=ended(137, reason="OOMKilled"))]},
            id="its own memory limit",
        ),
        pytest.param(
            {
                "containerStatuses": [
                    container(terminated=ended(137, None, None, "ContainerStatusUnknown"))
                ]
            },
            id="the node was lost",
        ),
        pytest.param(
            {"reason": "Evicted", "containerStatuses": [container(terminated=ended())]},
            id="evicted",
        ),
        pytest.param(
            {
                "conditions": [{"type": "DisruptionTarget", "status": "True"}],
                "containerStatuses": [container(terminated=ended(143))],
            },
            id="preempted",
        ),
        pytest.param(
            {
                "containerStatuses": [
                    {"state": {"running": {"startedAt": T61}}, "lastState": {"terminated": ended()}}
                ]
            },
            id="recovered",
        ),
        pytest.param(
            {
                "initContainerStatuses": [
                    container(terminated=ended(0, T30, T61))
                    | container("lastState", terminated=ended())
                ]
            },
            id="done the second time",
        ),
        pytest.param(
            {"containerStatuses": [container(waiting={"reason": "ImagePullBackOff"})]},
            id="no image",
        ),
        pytest.param(
            {"containerStatuses": [container(waiting={"reason": "CreateContainerError"})]},
            id="not created",
        ),
        pytest.param({"reason": "OutOfnvidia.com/gpu"}, id="two schedulers raced"),
        pytest.param({"containerStatuses": [None, 7, {"state": "x"}]}, id="nonsense"),
    ],
)
def test_other_ends_are_not_early_failures(status: Object) -> None:
    assert not is_failed_early(pod("p", node="n", **status), 60)


@pytest.mark.parametrize(
    ("deletion", "grace_seconds", "is_failure"),
    [(T61, 32, False), (T61, 31, False), (T61, 30, True), (T0, 0, False)],
    ids=["before its end", "in the second of its end", "after its end", "at once"],
)
def test_an_end_after_deletion_is_not_a_failure(
    deletion: str, grace_seconds: int, is_failure: bool
) -> None:
    raw = pod("p", node="n", containerStatuses=[container(terminated=ended(143))])
    raw["metadata"] |= {"deletionTimestamp": deletion, "deletionGracePeriodSeconds": grace_seconds}

    assert is_failed_early(raw, 60) is is_failure


@pytest.mark.parametrize(
    ("status", "failed_at"),
    [
        pytest.param({"containerStatuses": [container(terminated=ended())]}, T30, id="ended"),
        pytest.param(
            {
                "containerStatuses": [
                    {
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": ended()},
                    }
                ]
            },
            T30,
            id="again and again",
        ),
        pytest.param(
            {"reason": "UnexpectedAdmissionError", "phase": "Failed", "startTime": T0},
            T0,
            id="never started",
        ),
        pytest.param(
            {"containerStatuses": [container(waiting={"reason": "RunContainerError"})]},
            None,
            id="it fails now",
        ),
        pytest.param({"containerStatuses": [container(terminated=ended(0))]}, None, id="success"),
    ],
)
def test_an_early_failure_has_a_time(status: Object, failed_at: str | None) -> None:
    assert reduced(pod("p", node="n", **status)).failed_at == parse_time(failed_at)


def test_a_failure_is_early_up_to_and_including_the_limit() -> None:
    raw = pod("p", node="n", containerStatuses=[container(terminated=ended(1, T0, T30))])

    assert [is_failed_early(raw, within) for within in (29, 30, 31)] == [False, True, True]


def test_an_unbound_pod_cannot_fail_early() -> None:
    assert not reduced(pod("p", reason="UnexpectedAdmissionError")).is_failed_early


NO_DRIVER = "Failed to initialize NVML: Driver/library version mismatch"


def of_message(message: str) -> Object:
    """Return the status of a container that ended early, with a message."""
    return {"containerStatuses": [container(terminated={**ended(), "message": message})]}


@pytest.mark.parametrize(
    "status",
    [
        {"reason": "UnexpectedAdmissionError"},
        {"reason": "TopologyAffinityError"},
        {
            "containerStatuses": [
                container(waiting={"reason": "CrashLoopBackOff"})
                | {"lastState": {"terminated": {**ended(), "message": NO_DRIVER}}}
            ]
        },
        *map(
            of_message,
            (
                "failed to create containerd task: OCI runtime create failed: nvidia-container-cli:"
                " device error: GPU-0: unknown device: unknown",
                "nvidia-container-cli: initialization error: driver rpc error: timed out: unknown",
                NO_DRIVER,
                "RuntimeError: No CUDA-capable device is detected",
                "CUDA error: all CUDA-capable device(s) is/are busy or unavailable",
                "CUDA error: uncorrectable ECC error encountered",
            ),
        ),
    ],
)
def test_an_end_caused_by_a_device_is_recognized(status: Object) -> None:
    assert reduced(pod("p", node="n", **status)).is_device_fault


@pytest.mark.parametrize(
    "message",
    [
        "",
        "RuntimeError: CUDA out of memory",
        "CUDA error: an illegal memory access was encountered",
        'exec: "train": executable file not found in $PATH',
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.6",
    ],
)
def test_an_end_caused_by_the_program_or_its_image_is_not_a_device_fault(message: str) -> None:
    record = reduced(pod("p", node="n", **of_message(message)))

    assert record.is_failed_early
    assert not record.is_device_fault


def not_admitted(why: str) -> Object:
    """Return the status of a pod that the kubelet did not admit, with the kubelet's text."""
    message = f"Allocate failed due to {why}, which is unexpected"
    return {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}


@pytest.mark.parametrize(
    "why",
    [
        "requested number of devices unavailable for {}. Requested: 1, Available: 0",
        "cannot allocate unregistered device {}",
        "no healthy devices present; cannot allocate unhealthy devices {}",
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {}",
        'pod "u" container "main" changed request for resource "{}" from 1 to 2',
    ],
)
@pytest.mark.parametrize(
    ("resource", "is_gpu"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/gpu.shared", True),
        ("nvidia.com/mig-1g.10gb", True),
        ("rdma/hca_shared_devices_a", False),
        ("smarter-devices/fuse", False),
        ("openshift.io/mlnx_port0", False),
    ],
)
def test_a_missing_device_of_another_plugin_is_not_a_gpu_fault(
    why: str, resource: str, is_gpu: bool
) -> None:
    record = reduced(pod("p", node="n", **not_admitted(why.format(resource))))

    assert record.is_failed_early
    assert record.is_device_fault is is_gpu


@pytest.mark.parametrize(
    "why",
    [
        "",
        "rpc error: code = Unknown desc = no such device: GPU-0",
        "device plugin GetPreferredAllocation rpc failed with err: rpc error: code = Unavailable "
        "desc = dial unix /var/lib/kubelet/device-plugins/nvidia-gpu.sock: connection refused",
        "cannot allocate unregistered device",
    ],
)
def test_an_error_without_a_resource_may_be_a_gpu_fault(why: str) -> None:
    assert reduced(pod("p", node="n", **not_admitted(why))).is_device_fault


def test_a_recovered_pod_has_no_device_fault() -> None:
    status = of_message("NVML error: GPU is lost")
    status["containerStatuses"][0] = {
        "lastState": status["containerStatuses"][0]["state"],
        "state": {"running": {"startedAt": T61}},
    }

    assert not reduced(pod("p", node="n", **status)).is_device_fault
