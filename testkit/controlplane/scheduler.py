"""The real kube-scheduler, with a configuration made for a test."""

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
    """Describe one extender, as KubeSchedulerConfiguration lists it; change what else differs.

    Args:
        url: base URL of the webhooks.
        verbs: the verbs that kube-scheduler asks for, each at the path of the same name.
        node_cache_capable: whether nodes are sent by name, not whole.
        ignorable: whether pods are placed without it where it fails.
        weight: multiplier of its scores.
        managed_resources: the extender is asked for pods that ask for one of these alone.
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


def scheduler_config(
    extenders: Sequence[Object] = (),
    *,
    profiles: Sequence[str] = (DEFAULT_PROFILE,),
    max_backoff_seconds: int = 10,
) -> Object:
    """Describe a KubeSchedulerConfiguration that looks at every node.

    Args:
        extenders: see `extender`.
        profiles: names that pods may give as their `schedulerName`.
        max_backoff_seconds: how long a refused pod waits at most before it is tried again.
    """
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "percentageOfNodesToScore": 100,
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": max_backoff_seconds,
        "profiles": [{"schedulerName": name} for name in profiles],
        "extenders": list(extenders),
    }


def kube_scheduler(
    plane: ControlPlane, config: Object, *, name: str = "kube-scheduler", own: Object | None = None
) -> ServerProcess:
    """Describe a kube-scheduler of a control plane; `start` it to have it run.

    Args:
        plane: a control plane that runs.
        config: a whole KubeSchedulerConfiguration.
        name: what its files are called.
        own: fields of it to change: who to talk to, how often, and whether to elect a leader.
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
        # The default of 50 requests a second is what a burst of pods would measure otherwise.
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 2000, "burst": 4000},
    }
