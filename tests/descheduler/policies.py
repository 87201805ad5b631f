"""Policies of the descheduler: the shipped examples, with changes of the test."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from testkit.controlplane.objects import Object

EXAMPLES: Final = Path(__file__).parents[2] / "manifests" / "examples" / "descheduler"
KEEPS: Final = {"descheduler.alpha.kubernetes.io/prefer-no-eviction": "true"}
"""Annotation of a pod that prefers not to be evicted."""
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def example(name: str) -> Object:
    """Read an example policy from manifests/examples/descheduler."""
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
    """Build a policy with one plugin and no restrictions.

    Args:
        plugin: name of the plugin.
        arguments: arguments of the plugin.
        evictor: arguments of DefaultEvictor, which every plugin consults.
        point: extension point of the plugin.
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
    """Build a policy that evicts pods from nodes which their required affinity excludes."""
    return policy(
        "RemovePodsViolatingNodeAffinity",
        {"nodeAffinityType": [REQUIRED]},
        evictor=evictor,
        point="deschedule",
    )


def affinity(label: str, value: str) -> Object:
    """Build a required affinity to nodes with a label."""
    term = {"matchExpressions": [{"key": label, "operator": "In", "values": [value]}]}
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}
