"""JSON of nodes and pods of a busy cluster, rendered from templates with little CPU.

The extender's work depends on the size and structure of real objects: managed fields, images,
projected volumes, probes. A template holds these; each pod fills in two dozen values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from simulation.nodes import SimulatedNode
from simulation.objects import JsonObject, child, node_object, timestamp

IMAGES_PER_NODE: Final = 30
"""Kubelets report up to 50 images, most of them with two names."""

_MARK: Final = re.compile(rb"@@([a-z]+)@@")


class Template:
    """JSON template whose placeholders `@@name@@` are replaced by `fill`.

    Args:
        value: the JSON value with placeholders.
    """

    def __init__(self, value: object) -> None:
        text = orjson.dumps(value)
        self._names = [match[1].decode() for match in _MARK.finditer(text)]
        self._format = _MARK.sub(b"%b", text.replace(b"%", b"%%"))

    def fill(self, words: Mapping[str, bytes]) -> bytes:
        """Return the JSON with its placeholders replaced."""
        return self._format % tuple(map(words.__getitem__, self._names))


@dataclass(slots=True, kw_only=True)
class BenchPod:
    """Simulated pod.

    Attributes:
        uid: `metadata.uid`.
        namespace: `metadata.namespace`.
        name: `metadata.name`.
        kind: its template: "gpu", "web", "batch" or "exporter".
        resource: requested GPU resource, "" for none.
        count: requested number of devices of that resource.
        created_at: time of creation in seconds since the epoch.
        node: name of its node, "" before it is bound.
        is_running: whether its containers have started.
        version: resource version of the last change.
        load: load that it puts on a device, 0 to 1000.
        wishes: names and values of its annotations under the prefix `idlegpu.io/`.
    """

    uid: str
    namespace: str
    name: str
    kind: str = "web"
    resource: str = ""
    count: int = 0
    created_at: float = 0.0
    node: str = ""
    is_running: bool = False
    version: int = 1
    load: int = 0
    devices: tuple[int, ...] = ()
    wishes: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """Namespace and name of the pod: `namespace/name`."""
        return f"{self.namespace}/{self.name}"


def _fields(*paths: str) -> JsonObject:
    """Return managed fields as API servers write them: a tree of `f:` keys."""
    tree: JsonObject = {}
    for path in paths:
        branch = tree
        for step in path.split("/"):
            branch = child(branch, step if step[:2] in {"k:", "v:"} else f"f:{step}")
    return tree


_CONTROLLER_FIELDS: Final = _fields(
    "metadata/generateName",
    "metadata/labels/app.kubernetes.io~1name",
    "metadata/labels/app.kubernetes.io~1instance",
    "metadata/labels/pod-template-hash",
    "metadata/annotations/prometheus.io~1scrape",
    'metadata/ownerReferences/k:{"uid":"@@owner@@"}',
    'spec/containers/k:{"name":"main"}/args',
    'spec/containers/k:{"name":"main"}/env/k:{"name":"POD_NAME"}/valueFrom/fieldRef',
    'spec/containers/k:{"name":"main"}/env/k:{"name":"LOG_LEVEL"}/value',
    'spec/containers/k:{"name":"main"}/image',
    'spec/containers/k:{"name":"main"}/imagePullPolicy',
    'spec/containers/k:{"name":"main"}/readinessProbe/httpGet/path',
    'spec/containers/k:{"name":"main"}/resources/limits/memory',
    'spec/containers/k:{"name":"main"}/resources/requests/cpu',
    'spec/containers/k:{"name":"main"}/terminationMessagePath',
    "spec/dnsPolicy",
    "spec/restartPolicy",
    "spec/schedulerName",
    "spec/securityContext",
    "spec/serviceAccountName",
    "spec/terminationGracePeriodSeconds",
)
_KUBELET_FIELDS: Final = _fields(
    'status/conditions/k:{"type":"ContainersReady"}/lastTransitionTime',
    'status/conditions/k:{"type":"Initialized"}/lastTransitionTime',
    'status/conditions/k:{"type":"Ready"}/lastTransitionTime',
    "status/containerStatuses",
    "status/hostIP",
    "status/hostIPs",
    "status/phase",
    "status/podIP",
    "status/podIPs",
    "status/startTime",
)


def _pod(kind: str) -> JsonObject:
    """Return a template of a running pod of a kind."""
    images = {
        "gpu": "registry.example.com/research/trainer:2026.11.3-cuda13",
        "web": "registry.example.com/shop/checkout-api:v4.18.2",
        "batch": "registry.example.com/data/spark-executor:3.5.4",
        "exporter": "nvcr.io/nvidia/k8s/dcgm-exporter:4.5.3-4.8.2-distroless",
    }
    limits = {"cpu": "4", "memory": "16Gi"}
    if kind == "gpu":
        limits["@@resource@@"] = "@@count@@"
    main: JsonObject = {
        "name": "main" if kind != "exporter" else "nvidia-dcgm-exporter",
        "image": images[kind],
        "args": ["--config=/etc/app/config.yaml", "--listen=:8080", "--workers=8"],
        "env": [
            {
                "name": "POD_NAME",
                "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}},
            },
            {"name": "LOG_LEVEL", "value": "info"},
            {"name": "DATABASE_URL", "value": "postgres://shop@db.shop.svc:5432/shop?sslmode=on"},
        ],
        "resources": {"limits": limits, "requests": limits},
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": 8080, "scheme": "HTTP"},
            "timeoutSeconds": 1,
            "periodSeconds": 10,
            "successThreshold": 1,
            "failureThreshold": 3,
        },
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/app"},
            {
                "name": "kube-api-access-x7k2p",
                "readOnly": True,
                "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
            },
        ],
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "IfNotPresent",
    }
    return {
        "metadata": {
            "name": "@@name@@",
            "generateName": "@@name@@-",
            "namespace": "@@namespace@@",
            "uid": "@@uid@@",
            "resourceVersion": "@@version@@",
            "creationTimestamp": "@@created@@",
            "labels": {
                "app.kubernetes.io/name": "dcgm-exporter" if kind == "exporter" else f"{kind}-app",
                "app.kubernetes.io/instance": "production",
                "pod-template-hash": "7f9c4d8b6c",
            },
            "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "8080@@wishes@@"},
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "ReplicaSet",
                    "name": "@@name@@",
                    "uid": "@@owner@@",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
            "managedFields": [
                {
                    "manager": "kube-controller-manager",
                    "operation": "Update",
                    "apiVersion": "v1",
                    "time": "@@created@@",
                    "fieldsType": "FieldsV1",
                    "fieldsV1": _CONTROLLER_FIELDS,
                },
                {
                    "manager": "kubelet",
                    "operation": "Update",
                    "apiVersion": "v1",
                    "time": "@@started@@",
                    "fieldsType": "FieldsV1",
                    "fieldsV1": _KUBELET_FIELDS,
                    "subresource": "status",
                },
            ],
        },
        "spec": {
            "volumes": [
                {"name": "config", "configMap": {"name": "app-config", "defaultMode": 420}},
                {
                    "name": "kube-api-access-x7k2p",
                    "projected": {
                        "sources": [
                            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                            {
                                "configMap": {
                                    "name": "kube-root-ca.crt",
                                    "items": [{"key": "ca.crt", "path": "ca.crt"}],
                                }
                            },
                        ],
                        "defaultMode": 420,
                    },
                },
            ],
            "containers": [main],
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "serviceAccountName": "default",
            "serviceAccount": "default",
            "nodeName": "@@node@@",
            "securityContext": {},
            "schedulerName": "default-scheduler",
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{key}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 300,
                }
                for key in ("not-ready", "unreachable")
            ],
            "priority": 0,
            "enableServiceLinks": True,
            "preemptionPolicy": "PreemptLowerPriority",
        },
        "status": {
            "phase": "Running",
            "conditions": [
                {
                    "type": condition,
                    "status": "True",
                    "lastProbeTime": None,
                    "lastTransitionTime": "@@started@@",
                }
                for condition in (
                    "PodReadyToStartContainers",
                    "Initialized",
                    "Ready",
                    "ContainersReady",
                    "PodScheduled",
                )
            ],
            "hostIP": "10.0.0.1",
            "hostIPs": [{"ip": "10.0.0.1"}],
            "podIP": "@@ip@@",
            "podIPs": [{"ip": "@@ip@@"}],
            "startTime": "@@started@@",
            "containerStatuses": [
                {
                    "name": main["name"],
                    "state": {"running": {"startedAt": "@@started@@"}},
                    "lastState": {},
                    "ready": True,
                    "restartCount": 0,
                    "image": images[kind],
                    "imageID": f"{images[kind]}@sha256:{'5eb63bbbe01eeed0' * 4}",
                    "containerID": "containerd://@@owner@@@@owner@@",
                    "started": True,
                }
            ],
            "qosClass": "Guaranteed",
        },
    }


def _waiting(kind: str) -> JsonObject:
    """Return a template of an unbound pod of a kind."""
    pod = _pod(kind)
    child(pod, "spec").pop("nodeName")
    pod["status"] = {"phase": "Pending", "qosClass": "Guaranteed"}
    return pod


def _bound(kind: str) -> JsonObject:
    """Return a template of a bound pod whose containers have not started."""
    pod = _pod(kind)
    pod["status"] = {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "@@started@@"}
        ],
        "qosClass": "Guaranteed",
    }
    return pod


KINDS: Final = ("gpu", "web", "batch", "exporter")
_RUNNING: Final = {kind: Template(_pod(kind)) for kind in KINDS}
_WAITING: Final = {kind: Template(_waiting(kind)) for kind in KINDS}
_BOUND: Final = {kind: Template(_bound(kind)) for kind in KINDS}


def render_pod(pod: BenchPod) -> bytes:
    """Render a pod as the API server sends it."""
    templates = _RUNNING if pod.is_running else _BOUND if pod.node else _WAITING
    started = timestamp(pod.created_at).encode()
    digits = pod.uid.replace("-", "")[:6]
    octets = (int(digits[at : at + 2], 16) for at in (0, 2, 4))
    words = {
        "name": pod.name.encode(),
        "namespace": pod.namespace.encode(),
        "uid": pod.uid.encode(),
        "version": b"%d" % pod.version,
        "created": started,
        "started": started,
        "owner": pod.uid[::-1].encode(),
        "node": pod.node.encode(),
        "resource": pod.resource.encode(),
        "count": b"%d" % pod.count,
        "ip": b"10.%d.%d.%d" % tuple(octets),
        # The endings start where a row's fixed beginning ends.
        "wishes": "".join(f'","{name}":"{value}' for name, value in pod.wishes).encode(),
    }
    return templates[pod.kind].fill(words)


def render_node(node: SimulatedNode, *, created_at: float) -> Template:
    """Return a template of a node with placeholders for version, heartbeat and GPUs."""
    raw = node_object(node, now=created_at)
    metadata, status = child(raw, "metadata"), child(raw, "status")
    metadata["resourceVersion"] = "@@version@@"
    metadata["annotations"] = {
        "node.alpha.kubernetes.io/ttl": "0",
        "volumes.kubernetes.io/controller-managed-attach-detach": "true",
        "bench.idlegpu.io/touched": "@@heartbeat@@",
    }
    metadata["managedFields"] = _managed(raw)
    for condition in _conditions(status):
        condition["lastHeartbeatTime"] = "@@heartbeat@@"
    child(status, "allocatable")[node.resources()[0]] = "@@offered@@"
    status["images"] = [
        {
            "names": [
                f"registry.example.com/team-{number}/image@sha256:{number:064x}",
                f"registry.example.com/team-{number}/image:v1.{number}.0",
            ],
            "sizeBytes": 100_000_000 + number,
        }
        for number in range(IMAGES_PER_NODE)
    ]
    return Template(raw)


def _conditions(status: JsonObject) -> Sequence[JsonObject]:
    """Return a node's conditions, including those that kubelets add to Ready."""
    conditions = status["conditions"]
    if not isinstance(conditions, list):
        raise TypeError("a node's conditions are a list")
    for kind in ("MemoryPressure", "DiskPressure", "PIDPressure"):
        conditions.insert(0, {**conditions[-1], "type": kind, "status": "False"})
    return conditions


def _managed(raw: JsonObject) -> list[JsonObject]:
    """Return managed fields of a node, with an entry for every label and resource."""
    names = [*child(child(raw, "metadata"), "labels"), *child(child(raw, "status"), "capacity")]
    tree: JsonObject = {f"f:{name}": {} for name in names}
    return [
        {
            "manager": "kubelet",
            "operation": "Update",
            "apiVersion": "v1",
            "time": "@@heartbeat@@",
            "fieldsType": "FieldsV1",
            "fieldsV1": tree,
        }
    ]
