"""API objects with the fields that idlegpu reads; tests replace any of them by any value."""

from typing import Final

from testkit.controlplane.objects import Object

POD_OBJECT: Final[Object] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "a",
        "namespace": "ml",
        "uid": "u-1",
        "resourceVersion": "7",
        "creationTimestamp": "2026-11-01T10:00:00Z",
        "deletionTimestamp": "2026-11-01T11:00:00Z",
        "labels": {"app": "dcgm-exporter"},
        "annotations": {
            "idlegpu.io/gpu-memory": "20Gi",
            "idlegpu.io/require-idle": "true",
            "idlegpu.io/prefer-models": "H100,A100",
            "idlegpu.io/max-utilization": "30",
        },
        "ownerReferences": [{"kind": "Job", "name": "j", "uid": "o-1", "controller": True}],
    },
    "spec": {
        "nodeName": "n",
        "schedulerName": "default-scheduler",
        "priority": 5,
        "overhead": {"cpu": "1m"},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists", "value": "", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}],
                            "matchFields": [
                                {"key": "metadata.name", "operator": "In", "values": ["n"]}
                            ],
                        }
                    ]
                }
            }
        },
        "schedulingGates": [{"name": "idlegpu.io/room"}],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "containers": [
            {
                "name": "main",
                "image": "i",
                "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}],
                "resources": {
                    "limits": {"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": 2},
                    "requests": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"},
                    "claims": [{"name": "gpu"}],
                },
            }
        ],
        "initContainers": [
            {"name": "i", "restartPolicy": "Always", "resources": {"limits": {"cpu": "1"}}}
        ],
    },
    "status": {
        "phase": "Running",
        "nominatedNodeName": "n",
        "startTime": "2026-11-01T10:00:01Z",
        "podIP": "10.0.0.1",
        "podIPs": [{"ip": "10.0.0.1"}],
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/3 nodes are available: 3 idlegpu: no idle GPU.",
                "lastTransitionTime": "2026-11-01T10:00:00Z",
            }
        ],
        "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "gpu"}],
        "extendedResourceClaimStatus": {
            "resourceClaimName": "c",
            "requestMappings": [
                {"containerName": "main", "resourceName": "nvidia.com/gpu", "requestName": "r"}
            ],
        },
        "containerStatuses": [
            {
                "name": "main",
                "restartCount": 1,
                "allocatedResources": {"nvidia.com/gpu": "1"},
                "state": {
                    "terminated": {
                        "exitCode": 1,
                        "reason": "Error",
                        "message": "CUDA error",
                        "startedAt": "2026-11-01T10:00:02Z",
                        "finishedAt": "2026-11-01T10:00:03Z",
                    }
                },
                "lastState": {"terminated": {"exitCode": 79}},
            }
        ],
    },
}
WAITING_OBJECT: Final[Object] = {
    "metadata": {**POD_OBJECT["metadata"], "deletionTimestamp": None, "ownerReferences": []},
    "spec": {**POD_OBJECT["spec"], "nodeName": ""},
    "status": {**POD_OBJECT["status"], "phase": "Pending"},
}
"""Waiting pod: node selections are only read from waiting pods."""


NODE_OBJECT: Final[Object] = {
    "metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": "H100", "zone": "a"}},
    "spec": {
        "unschedulable": True,
        "taints": [{"key": "a", "value": "b", "effect": "NoSchedule", "timeAdded": "x"}],
    },
    "status": {
        "addresses": [{"type": "InternalIP", "address": "10.0.0.2"}],
        "allocatable": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"},
        "capacity": {"nvidia.com/gpu": "8"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}
CLAIM_OBJECT: Final[Object] = {
    "metadata": {"uid": "c-1"},
    "status": {
        "allocation": {
            "devices": {
                "results": [
                    {
                        "driver": "gpu.nvidia.com",
                        "pool": "n",
                        "device": "gpu-0",
                        "adminAccess": False,
                    }
                ]
            }
        },
        "reservedFor": [{"resource": "pods", "uid": "u-1", "name": "a"}],
    },
}
SLICE_OBJECT: Final[Object] = {
    "metadata": {"uid": "s-1"},
    "spec": {
        "driver": "gpu.nvidia.com",
        "pool": {"name": "n", "generation": 1},
        "devices": [
            {
                "name": "gpu-0",
                "attributes": {"uuid": {"string": "GPU-1"}, "profile": {"string": ""}},
            }
        ],
    },
}
REVIEW_OBJECT: Final[Object] = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "r",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "namespace": "ml",
        "object": {
            **WAITING_OBJECT,
            "spec": {**WAITING_OBJECT["spec"], "affinity": {}, "tolerations": [{"key": "a"}]},
        },
    },
}
