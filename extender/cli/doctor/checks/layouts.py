"""Check that nodes offer the MIG instances that they have."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from extender.cli.doctor.checks.nodes import (
    COUNT,
    PRODUCT,
    REPLICAS,
    restart_discovery,
    restart_plugin,
)
from extender.cli.doctor.facts import Facts, Object
from extender.cli.doctor.findings import Problem, Severity, check
from extender.cli.doctor.objects import (
    EXPORTER_WORDS,
    GPU,
    MIG,
    SHARED,
    capacity,
    labels_of,
    name_of,
    number,
)
from extender.cli.doctor.remedies import WorkloadPart, logs, named
from extender.core.untyped import text_of

_MIG_STATE: Final = "nvidia.com/mig.config.state"
MANAGER_WORDS: Final = ("nvidia-mig-manager",)
_MANAGER: Final = WorkloadPart(MANAGER_WORDS)
_EXPORTER: Final = WorkloadPart(EXPORTER_WORDS)


@check("IG205", "nodes offer the MIG instances that they have", needs=("nodes",))
def _unlike_layout(facts: Facts) -> Iterator[Problem]:
    """Find nodes with a failed MIG layout, or with MIG instances other than those they offer.

    Labels and telemetry are compared with the offered resources, also under strategy `single`.
    Layouts that are being changed are skipped.

    Remedy: restart the plugin; `mig.config`.
    """
    failed: dict[str, str] = {}
    unlike: list[str] = []
    seen = _seen(facts)
    for node in facts.nodes or ():
        labels, name = labels_of(node), name_of(node)
        if labels.get(_MIG_STATE) == "failed" or labels.get(PRODUCT, "").endswith("MIG-INVALID"):
            failed[name] = (
                f"{name}: {_MIG_STATE}={labels.get(_MIG_STATE, 'not set')}, nvidia.com/mig.config="
                f"{labels.get('nvidia.com/mig.config', 'not set')}, {PRODUCT}={labels.get(PRODUCT)}"
            )
            continue
        if labels.get(_MIG_STATE) in {"pending", "rebooting"}:
            continue
        unlike += [f"{name}: {line}" for line in _unlike_instances(node, seen[name])]
    if failed:
        read_logs = logs(
            _MANAGER.pods_on(facts, failed),
            "kubectl -n gpu-operator logs of nvidia-mig-manager's pod there",
        )
        yield Problem(
            severity=Severity.ERROR,
            what="a MIG layout could not be applied",
            evidence=tuple(failed.values()),
            remedy=f"{read_logs}; then kubectl label node {named(failed)} "
            "nvidia.com/mig.config=all-balanced --overwrite (GPUs must be unused)",
        )
    if unlike:
        restart_exporter = _EXPORTER.restart(facts, "dcgm-exporter's")
        yield Problem(
            severity=Severity.ERROR,
            what="nodes offer other MIG instances than they have",
            evidence=tuple(unlike),
            remedy=f"{restart_plugin(facts)} (it counts instances when it starts), then "
            f"{restart_discovery(facts)} and {restart_exporter}",
        )


@dataclass(slots=True)
class _Seen:
    """GPUs and MIG instances of a node, according to telemetry.

    Attributes:
        instances: number of MIG instances by profile.
        cut_up: UUIDs of the cards that have instances.
        whole: UUIDs of the other cards.
    """

    instances: Counter[str] = field(default_factory=Counter)
    cut_up: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)


def _seen(facts: Facts) -> Mapping[str, _Seen]:
    """Group the GPUs and MIG instances of telemetry by node."""
    devices = {
        tuple(
            text_of(device.get(name)) for name in ("node", "mig_profile", "uuid", "gpu_instance_id")
        )
        for device in facts.devices or ()
        if device.get("uuid") and device.get("freshness") == "fresh"
    }
    found: defaultdict[str, _Seen] = defaultdict(_Seen)
    for node, profile, uuid, _ in devices:
        seen = found[node]
        if profile:
            seen.instances[profile] += 1
            seen.cut_up.add(uuid)
        else:
            seen.whole.add(uuid)
    return found


def _unlike_instances(node: Object, seen: _Seen) -> Iterator[str]:
    """Yield each profile whose offered instances differ from labels or telemetry."""
    labels, offered = labels_of(node), capacity(node)
    if "-MIG-" in labels.get(PRODUCT, "") and COUNT in labels:
        yield from _unlike_single(labels, offered, seen)
        return
    if COUNT not in labels:
        yield from _unlike_unlabelled(offered, seen)
    for label, count in labels.items():
        if not label.startswith(MIG) or not label.endswith(".count"):
            continue
        resource = label.removesuffix(".count")
        replicas = max(number(labels.get(f"{resource}.replicas")), 1)
        here = offered.get(resource, 0) + offered.get(f"{resource}.shared", 0)
        if here != number(count) * replicas:
            yield (
                f"{label}={count} with {replicas} replicas, capacity {resource}: "
                f"{offered.get(resource, 'none')}"
            )
            continue
        shown = seen.instances[resource.removeprefix(MIG)]
        if shown and shown != number(count):
            yield f"{label}={count}, telemetry shows {shown} instances"


def _unlike_single(
    labels: Mapping[str, str], offered: Mapping[str, int], seen: _Seen
) -> Iterator[str]:
    """Yield differences under MIG strategy `single`, where a GPU resource means an instance."""
    count, replicas = number(labels.get(COUNT)), max(number(labels.get(REPLICAS)), 1)
    here, shown = _called_gpus(offered), seen.instances.total()
    product = labels.get(PRODUCT)
    if here != count * replicas:
        yield (
            f"{PRODUCT}={product}, {COUNT}={count} instances with {replicas} replicas, capacity "
            f"{GPU}: {here or 'none'}"
        )
    elif shown and shown != count:
        yield f"{PRODUCT}={product}, {COUNT}={count}, telemetry shows {shown} instances"


def _unlike_unlabelled(offered: Mapping[str, int], seen: _Seen) -> Iterator[str]:
    """Yield differences on nodes without the label that counts their GPUs.

    The GPU resource then means instances or replicas of them or, with MIG strategy `none`, cards.
    """
    here, shown = _called_gpus(offered), seen.instances.total()
    is_single = shown and not seen.whole and not any(name.startswith(MIG) for name in offered)
    if is_single and here and here % shown and here != len(seen.cut_up):
        yield f"capacity {GPU}: {here}, telemetry shows {shown} instances, no label counts them"


def _called_gpus(offered: Mapping[str, int]) -> int:
    return offered.get(GPU, 0) + offered.get(SHARED, 0)
