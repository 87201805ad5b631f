"""Healthy cluster, and clusters with one fault each."""

from dataclasses import dataclass
from typing import Any, Final

from extender.cli.doctor.facts import Certificate, Facts, Sample
from extender.core.decision.filtering import Rejection
from tests.extender.cli.doctor.described import bypassed, replica, right, second_scheduler, service
from tests.extender.cli.doctor.things import (
    GPU,
    NOW,
    claim,
    device,
    entry,
    kube_scheduler,
    node,
    pod,
    sample,
    scheduler,
)

DAY: Final = 86_400.0
MIG: Final = "nvidia.com/mig-1g.10gb"
FIELDS: Final = (
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_FB_FREE",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_ACTIVE",
)
EXPORTER: Final = pod(
    "dcgm-exporter-x", namespace="gpu-operator", env={"DCGM_EXPORTER_INTERVAL": "30000"}
)
TRAIN: Final = pod("train", 2, image="nvidia/cuda:12.8.0-base")
DEVICES: Final = tuple(device(index) for index in range(8))
AGE, ANSWERS = "idlegpu_telemetry_age_seconds", "idlegpu_request_duration_seconds_bucket"
METRICS: Final[dict[str, Sample]] = {
    "age": sample(AGE, 12.0, source="prometheus", stat="median"),
    "in time": sample(ANSWERS, 1000.0, verb="filter", outcome="ok", le="1.0"),
    "answers": sample(ANSWERS, 1000.0, verb="filter", outcome="ok", le="+Inf"),
    "agents": sample("idlegpu_agents", 1.0),
    "refused": sample("idlegpu_agent_refusals_total", 0.0, reason="wrong-account"),
    "unmatched": sample("idlegpu_unmatched_series", 0.0, source="prometheus"),
}


def exporting(*fields: str, count: int = 8) -> tuple[Sample, ...]:
    return tuple(
        sample(name, 0.0, UUID=f"GPU-{index}", Hostname="node-1")
        for name in fields
        for index in range(count)
    )


def certificate(days: float) -> Certificate:
    return Certificate(
        source="Secret idlegpu/idlegpu-extender-tls tls.crt",
        subject="CN=idlegpu-extender",
        ends_at=NOW + days * DAY,
    )


HEALTHY: Final = Facts(
    at=NOW,
    extender_at=NOW,
    nodes=(node(),),
    pods=(EXPORTER, TRAIN, replica("one")),
    daemon_sets=(),
    claims=(),
    config_maps=(),
    services=(service(),),
    version="v1.37.2",
    schedulers=(scheduler(entry()),),
    plugin_configs={},
    settings={"prometheus": {"exporter_interval_seconds": 30}},
    bypassed=bypassed(),
    degraded={},
    devices=DEVICES,
    sources={"prometheus": {"unmatched_series": 0}},
    metrics=tuple(METRICS.values()),
    exporter=exporting(*FIELDS),
    certificates=(certificate(200),),
    rights=(right(is_allowed=True),),
)


def metrics(**changed: Sample) -> tuple[Sample, ...]:
    named = {name.replace("_", " "): one for name, one in changed.items()}
    return tuple({**METRICS, **named}.values())


def beside(*pods: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return (EXPORTER, TRAIN, *pods)


def hungry(cpu: str) -> dict[str, Any]:
    """Return a pod without GPUs that requests CPU."""
    item = pod("web")
    item["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu, "memory": "1Gi"}
    return item


def called_with(**changes: object) -> tuple[Any, ...]:
    return (scheduler(entry(**changes)),)


def labelled(capacity: dict[str, str] | None = None, **labels: str) -> tuple[Any, ...]:
    reported = {f"nvidia.com/{name.replace('__', '.')}": value for name, value in labels.items()}
    return (node(labels=reported, capacity=capacity or {GPU: "8"}),)


def waiting(reason: str) -> dict[str, Any]:
    message = f"0/1 nodes are available: 1 {reason}."
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    return pod("waits", 1, node="", phase="Pending", conditions=[condition])


@dataclass(frozen=True)
class Fault:
    """Fault of a cluster, and the doctor's expected finding.

    Attributes:
        code: code of the finding.
        remedy: text in the finding's remedy.
        changes: facts that differ from a healthy cluster.
    """

    code: str
    remedy: str
    changes: dict[str, Any]


MPS_NODE: Final = labelled({GPU: "32"}, **{"gpu__replicas": "4", "gpu__sharing-strategy": "mps"})
SLICED: Final = {"gpu__replicas": "4", "gpu__sharing-strategy": "time-slicing"}
CUT: Final = {"gpu__count": "1", "gpu__replicas": "0", "mig-1g__10gb__replicas": "1"}
INSTANCES: Final = tuple(
    device(0, resource=MIG, gpu_instance_id=str(number), mig_profile="1g.10gb")
    for number in range(7)
)
WITH_MIG: Final = called_with(managedResources=[{"name": GPU}, {"name": MIG}])
WITH_MIG_ALONE: Final = {
    "schedulers": WITH_MIG,
    "devices": INSTANCES,
    "exporter": None,
    "pods": (EXPORTER,),
}
FAULTS: Final[dict[str, Fault]] = {
    "kube-scheduler does not ask us": Fault(
        "IG001", "the entry under extenders", {"schedulers": (scheduler(),)}
    ),
    "pods are bound without idlegpu's answer": Fault(
        "IG001", "restart", {"bypassed": bypassed("no-extender")}
    ),
    "it asks and gets no answer in time": Fault(
        "IG002",
        "httpTimeout: 2s",
        {"metrics": metrics(in_time=sample(ANSWERS, 900.0, verb="filter", outcome="ok", le="1.0"))},
    ),
    "nodeCacheCapable off": Fault(
        "IG003", "nodeCacheCapable: true", {"schedulers": called_with(nodeCacheCapable=False)}
    ),
    "the scheduler of all pods without batching": Fault(
        "IG012", "a second scheduler", {"pods": beside(kube_scheduler("v1.37.2"))}
    ),
    "weights that drown us": Fault("IG004", "weight: 1", {"schedulers": called_with(weight=10)}),
    "a verb that is not called": Fault(
        "IG005", "prioritizeVerb: prioritize", {"schedulers": called_with(prioritizeVerb=None)}
    ),
    "a MIG profile missing in managedResources": Fault(
        "IG006",
        f"- {{name: {MIG}, ignoredByScheduler: false}}",
        {"nodes": labelled({GPU: "8", MIG: "7"}, gpu__replicas="1")},
    ),
    "two schedulers over the same nodes": Fault(
        "IG007", "kubectl taint node node-1", {"pods": beside(pod("other", 1, scheduler="second"))}
    ),
    "an autoscaler that will not add nodes for what we refuse": Fault(
        "IG008",
        "add a node by hand",
        {"pods": beside(pod("cluster-autoscaler-x"), waiting(Rejection.NOT_IDLE))},
    ),
    "another extender that sees our shortlist alone": Fault(
        "IG009",
        "wire.shortlist: 0",
        {"schedulers": (scheduler(entry(), {"urlPrefix": "http://b", "filterVerb": "filter"}),)},
    ),
    "an address that was not filled in": Fault(
        "IG010",
        "scheduler-config/control-plane.sh",
        {"schedulers": called_with(urlPrefix="https://FIXED_ADDRESS:8888")},
    ),
    "a second scheduler newer than the API server": Fault(
        "IG011",
        'images.scheduler.tag: ""',
        {"pods": beside(second_scheduler("v1.38.0"), replica("one"))},
    ),
    "DCGM fields that are not exported": Fault(
        "IG101",
        '"DCGM_FI_PROF_GR_ENGINE_ACTIVE, gauge, ',
        {"exporter": exporting(*(name for name in FIELDS if "PROF" not in name))},
    ),
    "node names that match nothing": Fault(
        "IG102",
        "prometheus: {node_labels: [LABEL]}",
        {"sources": {"prometheus": {"unmatched_series": 8, "unmatched_example": "{a='b'}"}}},
    ),
    "a scrape or query interval that makes readings stale": Fault(
        "IG103",
        "scrape dcgm-exporter at least every 30 s",
        {"metrics": metrics(age=sample(AGE, 150.0, source="prometheus", stat="median"))},
    ),
    "an exporter that collects too rarely": Fault(
        "IG103",
        "DCGM_EXPORTER_INTERVAL, value: '10000'",
        {"pods": (pod("dcgm-exporter-x", env={"DCGM_EXPORTER_INTERVAL": "180000"}), TRAIN)},
    ),
    "an exporter whose interval the settings do not know": Fault(
        "IG103",
        "exporter_interval_seconds: 10}",
        {"pods": (pod("dcgm-exporter-x", env={"DCGM_EXPORTER_INTERVAL": "10000"}), TRAIN)},
    ),
    "clock skew of a node": Fault(
        "IG104", "timedatectl set-ntp true", {"nodes": (node(beat="2027-01-15T07:58:00Z"),)}
    ),
    "clock skew of the extender": Fault(
        "IG104", "timedatectl set-ntp true", {"extender_at": NOW - 90}
    ),
    "exporter pods missing on GPU nodes": Fault(
        "IG105", "install dcgm-exporter", {"pods": (TRAIN,), "devices": ()}
    ),
    "an exporter that Prometheus does not scrape": Fault(
        "IG105",
        "have Prometheus scrape dcgm-exporter-x",
        {"devices": tuple(device(index, uuid="", freshness="missing") for index in range(8))},
    ),
    "a source that does not answer": Fault(
        "IG106", 'prometheus.url, "" for none', {"degraded": {"prometheus": "refused"}}
    ),
    "capacity unlike telemetry": Fault(
        "IG107",
        "idlegpu smoke node-1",
        {"devices": DEVICES[:7], "exporter": exporting(*FIELDS, count=7)},
    ),
    "device plugin missing": Fault(
        "IG201", "helm upgrade -i nvdp", {"nodes": (node(capacity={}),), "pods": (EXPORTER,)}
    ),
    "its sharing settings unlike the labels": Fault(
        "IG202", "rollout restart", {"nodes": labelled({GPU: "8"}, **SLICED), "pods": (EXPORTER,)}
    ),
    "capacity unlike allocatable": Fault(
        "IG203", "restart that pod", {"nodes": (node(allocatable={GPU: "7"}),)}
    ),
    "a dead MPS daemon": Fault("IG204", "nvidia.com/mps.capable=true", {"nodes": MPS_NODE}),
    "MIG layouts unlike allocatable": Fault(
        "IG205",
        "it counts instances when it starts",
        {"nodes": labelled({MIG: "4"}, **CUT, **{"mig-1g__10gb__count": "7"}), **WITH_MIG_ALONE},
    ),
    "a MIG layout that failed": Fault(
        "IG205",
        "nvidia.com/mig.config=all-balanced",
        {
            "nodes": labelled(
                {MIG: "7"}, **CUT, **{"mig-1g__10gb__count": "7", "mig__config__state": "failed"}
            ),
            **WITH_MIG_ALONE,
        },
    ),
    "a Topology Manager that no label names": Fault(
        "IG208",
        "idlegpu.io/topology-policy=single-numa-node",
        {"nodes": (node(labels={"idlegpu.io/topology-policy": "single"}),)},
    ),
    "time-slicing without memory limits": Fault(
        "IG206",
        'annotations: {idlegpu.io/gpu-memory: "8Gi"}',
        {"nodes": labelled({GPU: "32"}, **SLICED)},
    ),
    "CPU that pods without GPUs have": Fault(
        "IG207",
        "kubectl taint node",
        {"nodes": labelled({GPU: "8", "cpu": "8", "memory": "64Gi"}), "pods": beside(hungry("7"))},
    ),
    "a driver too old for a pod's CUDA": Fault(
        "IG301",
        "a newer driver there",
        {"pods": beside(pod("new", 1, image="nvidia/cuda:14.1.0-base", phase="Pending"))},
    ),
    "CUDA_VISIBLE_DEVICES set by hand": Fault(
        "IG302",
        "take CUDA_VISIBLE_DEVICES out of env",
        {"pods": beside(pod("mine", 1, env={"CUDA_VISIBLE_DEVICES": "3"}))},
    ),
    "a tensor-parallel size that differs from the requested GPUs": Fault(
        "IG303",
        "--tensor-parallel-size N",
        {"pods": beside(pod("vllm", 2, command=["vllm", "serve", "m", "-tp", "4"]))},
    ),
    "a target that does not exist": Fault(
        "IG304",
        "correct the names",
        {"pods": beside(pod("lost", 1, annotations={"idlegpu.io/target": "gone"}, node=""))},
    ),
    "topology that no node has": Fault(
        "IG305",
        "correct group_topology",
        {"settings": {**(HEALTHY.settings or {}), "group_topology": ["example.com/rack"]}},
    ),
    "a pod that holds GPUs by a claim alone": Fault(
        "IG306", "nvidia.com/gpu", {"claims": (claim("solo"),)}
    ),
    "agents refused": Fault(
        "IG401",
        "service_accounts",
        {
            "metrics": metrics(
                refused=sample("idlegpu_agent_refusals_total", 3.0, reason="wrong-account"),
                agents=sample("idlegpu_agents", 0.0),
            )
        },
    ),
    "certificates about to end": Fault(
        "IG402", "create job --from=cronjob/idlegpu-certs", {"certificates": (certificate(5),)}
    ),
    "rights that are missing": Fault(
        "IG403", "kubectl apply -k manifests/rbac", {"rights": (right(is_allowed=False),)}
    ),
    "too little time to take leave": Fault(
        "IG404",
        "terminationGracePeriodSeconds of the Deployment",
        {"pods": beside(replica(grace_seconds=30))},
    ),
    "replicas that do not know of each other": Fault(
        "IG405",
        "peers: {service: idlegpu-peers.idlegpu.svc:8888}",
        {"pods": beside(replica("x"), replica("y"))},
    ),
    "an agent where the GPU operator upgrades the driver": Fault(
        "IG406",
        "docs/gpu-operator.md",
        {
            "nodes": (
                node(labels={"nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade"}),
                *(HEALTHY.nodes or ())[1:],
            ),
            "pods": beside(pod("idlegpu-agent-x")),
        },
    ),
}
"""A fault for every possible finding, by description."""
