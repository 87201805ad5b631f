"""Real kube-scheduler with a configuration from the test."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from testkit.controlplane.objects import GPU, Object
from testkit.controlplane.plane import SCHEDULER, ControlPlane, gates
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary

VERBS: Final = ("filter", "prioritize", "preempt")
DEFAULT_PROFILE: Final = "default-scheduler"


def extender(
    url: str,
    *,
    verbs: Sequence[str] = VERBS,
    node_cache_capable: bool = True,
    ignorable: bool = False,
    weight: int = 1,
    managed_resources: Sequence[str] = (GPU,),
) -> Object:
    """Build an extender's entry of KubeSchedulerConfiguration; change other fields in the result.

    Args:
        url: base URL of the webhooks.
        verbs: verbs that kube-scheduler calls, each at the path of the same name.
        node_cache_capable: whether requests have names of nodes instead of whole objects.
        ignorable: whether kube-scheduler ignores its failures.
        weight: multiplier of its scores.
        managed_resources: resources of the pods for which the extender is called; () for all pods.
    """
    return {
        "urlPrefix": url,
        **{f"{verb}Verb": verb for verb in verbs},
        "nodeCacheCapable": node_cache_capable,
        "ignorable": ignorable,
        "weight": weight,
        "httpTimeout": "5s",
        "managedResources": [
            {"name": name, "ignoredByScheduler": False} for name in managed_resources
        ],
    }


def scheduler_config(extenders: Sequence[Object] = ()) -> Object:
    """Build a KubeSchedulerConfiguration that scores every node."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "percentageOfNodesToScore": 100,
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 10,
        "profiles": [{"schedulerName": DEFAULT_PROFILE}],
        "extenders": list(extenders),
    }


def kube_scheduler(
    plane: ControlPlane, config: Object, *, name: str = "kube-scheduler", own: Object | None = None
) -> ServerProcess:
    """Describe a kube-scheduler of a control plane; `start` it.

    Args:
        plane: running control plane.
        config: complete KubeSchedulerConfiguration.
        name: base name of its files.
        own: fields of the configuration to change: client connection and leader election.
    """
    port = free_port()
    path = plane.folder / f"{name}.config"
    own = own or _usual(plane.kubeconfig(SCHEDULER))
    path.write_text(json.dumps({**config, **own}, indent=2))  # JSON is YAML too
    command = [
        str(binary(f"{plane.release}kube-scheduler")),
        f"--config={path}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={plane.folder / 'certificates' / name}",
        "--authentication-skip-lookup",
        "--authorization-always-allow-paths=/*",
        "--v=2",
        *gates(plane.features),
    ]
    return ServerProcess(
        name=name,
        command=command,
        folder=plane.folder,
        ready_url=f"https://127.0.0.1:{port}/readyz",
    )


def _usual(kubeconfig: Path) -> Object:
    return {
        "leaderElection": {"leaderElect": False},
        # With the default of 50 requests a second, a burst of pods would measure this limit.
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 2000, "burst": 4000},
    }
