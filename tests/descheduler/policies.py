"""What the descheduler is told: the shipped examples, with what a case has otherwise."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from testkit.controlplane.objects import Object

EXAMPLES: Final = Path(__file__).parents[2] / "manifests" / "examples" / "descheduler"
KEEPS: Final = {"descheduler.alpha.kubernetes.io/prefer-no-eviction": "true"}
"""A pod's annotation: whoever has it would rather not be evicted."""
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def example(name: str) -> Object:
    """Read a policy of manifests/examples/descheduler."""
    item = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    policy: Object = yaml.safe_load(item["data"]["policy.yaml"])
    return policy


def policy(
    plugin: str,
    arguments: Mapping[str, object],
    *,
    evictor: Mapping[str, object] | None = None,
    point: str = "balance",
) -> Object:
    """Describe a policy with one plugin, and no care for anything else.

    Args:
        plugin: its name.
        arguments: what it is told.
        evictor: what DefaultEvictor, which every plugin asks, is told.
        point: where the plugin has its say.
    """
    return {
        "apiVersion": "descheduler/v1alpha2",
        "kind": "DeschedulerPolicy",
        "profiles": [
            {
                "name": "test",
                "pluginConfig": [
                    {"name": "DefaultEvictor", "args": dict(evictor or {})},
                    {"name": plugin, "args": dict(arguments)},
                ],
                "plugins": {point: {"enabled": [plugin]}},
            }
        ],
    }


def by_affinity(**evictor: object) -> Object:
    """Describe a policy that evicts pods from nodes which their required affinity excludes."""
    return policy(
        "RemovePodsViolatingNodeAffinity",
        {"nodeAffinityType": [REQUIRED]},
        evictor=evictor,
        point="deschedule",
    )


def affinity(label: str, value: str) -> Object:
    """Describe the affinity of a pod that must be on a node with a label."""
    term = {"matchExpressions": [{"key": label, "operator": "In", "values": [value]}]}
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}
