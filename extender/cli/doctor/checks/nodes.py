"""Check that nodes offer the GPUs and MIG instances that their labels describe."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from extender.cli.doctor.facts import (
    EXPORTER_WORDS,
    GPU,
    MIG,
    SHARED,
    Facts,
    Object,
    allocatable,
    annotations_of,
    capacity,
    gpu_pods,
    is_called,
    is_labelled,
    is_running,
    key_of,
    labels_of,
    name_of,
    node_of,
    number,
    requested_gpus,
    some,
)
from extender.cli.doctor.findings import Problem, Severity, WorkloadPart, check, delete, logs, named
from extender.core.untyped import mapping_of, objects_of, text_of

PLUGIN_WORDS: Final = ("nvidia-device-plugin", "nvidia-gpu-device-plugin", "gpu-feature-discovery")
DRA_WORDS: Final = ("dra-driver-nvidia-gpu", "nvidia-dra-driver")
MPS_WORDS: Final = ("mps-control-daemon",)
_DISCOVERY: Final = WorkloadPart(PLUGIN_WORDS[2:])
# The plugin's Helm chart gives all three components the same name prefix.
PLUGIN: Final = WorkloadPart(PLUGIN_WORDS[:2], others=(*_DISCOVERY.words, *MPS_WORDS))

REPLICAS: Final = "nvidia.com/gpu.replicas"
STRATEGY: Final = "nvidia.com/gpu.sharing-strategy"
_COUNT: Final = "nvidia.com/gpu.count"
PRODUCT: Final = "nvidia.com/gpu.product"
_PLUGIN_CONFIG: Final = "nvidia.com/device-plugin.config"
_MEMORY: Final = "idlegpu.io/gpu-memory"


def _restart_plugin(facts: Facts) -> str:
    """Return the command that restarts the device plugin."""
    return PLUGIN.restart(
        facts, "kubectl -n NAMESPACE rollout restart daemonset NVIDIA-DEVICE-PLUGIN"
    )


def _restart_discovery(facts: Facts) -> str:
    """Return the command that restarts gpu-feature-discovery."""
    return _DISCOVERY.restart(facts, "gpu-feature-discovery's")


@check("IG201", "nodes offer their GPUs", needs=("nodes",))
def _no_plugin(facts: Facts) -> Iterator[Problem]:
    """Find GPU nodes that offer no GPUs.

    Their labels show GPUs, or they offered some before (a capacity of 0), and they have no DRA
    driver: the device plugin is missing or broken.

    Remedy: install the plugin, or read its log.
    """
    names = [name_of(node) for node in facts.nodes or ()]
    plugins = {
        node_of(pod): pod for part in (_DISCOVERY, PLUGIN) for pod in part.pods_on(facts, names)
    }
    broken: list[Object] = []
    served = {node_of(pod) for pod in facts.pods or () if is_called(pod, DRA_WORDS)}
    evidence = []
    for node in facts.nodes or ():
        name = name_of(node)
        # A capacity of 0 means that a device plugin ran before: the kubelet keeps the resource.
        has_gpus = is_labelled(node) or bool(capacity(node))
        if not has_gpus or name in served or any(capacity(node).values()):
            continue
        if _is_excluded(node):
            continue
        pod = plugins.get(name)
        state = "no pod of the device plugin"
        if pod is not None:
            state = f"{key_of(pod)} is {mapping_of(pod.get('status')).get('phase')}"
            broken.append(pod)
        evidence.append(f"{name}: capacity {GPU}: {capacity(node).get(GPU, 'none')}, {state}")
    if evidence:
        yield Problem(
            severity=Severity.ERROR,
            what="nodes with GPUs offer none: their device plugin is missing or does not work",
            evidence=tuple(evidence),
            remedy="helm upgrade -i nvdp nvdp/nvidia-device-plugin -n nvidia-device-plugin "
            "--create-namespace --set gfd.enabled=true"
            if not broken
            else f"{logs(broken, '')} shows the cause (often the driver, or runtimeClassName: "
            "nvidia); nodes without its pod need a toleration or another nodeSelector",
        )


def _is_excluded(node: Object) -> bool:
    """Check whether labels exclude a node from the device plugin, for example to serve VMs."""
    labels = labels_of(node)
    workload = labels.get("nvidia.com/gpu.workload.config", "container")
    return workload != "container" or labels.get("nvidia.com/gpu.deploy.device-plugin") == "false"


@check("IG202", "GPU sharing matches the labels", needs=("nodes",))
def _unlike_sharing(facts: Facts) -> Iterator[Problem]:
    """Find nodes whose GPU sharing differs from their labels or from the plugin's configuration.

    `gpu.count` x `gpu.replicas` is not the capacity, or the labels differ from the plugin's
    configuration for the node (`nvidia.com/device-plugin.config`).

    Remedy: restart the plugin and gpu-feature-discovery.
    """
    evidence = []
    for node in facts.nodes or ():
        labels = labels_of(node)
        name, configured = name_of(node), _configured(facts, labels)
        labelled = (labels.get(STRATEGY, ""), labels.get(REPLICAS, ""))
        if all(labelled) and configured is not None:
            strategy, replicas = configured
            # Without sharing, and with MIG, the label may be 0 or 1.
            is_same = labelled[0] == strategy and max(number(labelled[1]), 1) == replicas
            if not is_same:
                evidence.append(
                    f"{name}: labels show {labelled[0]} with {labelled[1]} replicas, the plugin's "
                    f"configuration says {strategy} with {replicas}"
                )
                continue
        cards, here = number(labels.get(_COUNT)), _called_gpus(capacity(node))
        if cards and here and not _has_mig(node):
            expected = cards * max(number(labelled[1]), 1)
            if here != expected:
                evidence.append(
                    f"{name}: {_COUNT}={cards}, {REPLICAS}={labelled[1] or 'not set'}, so "
                    f"{expected} expected; capacity is {here}"
                )
    if evidence:
        yield Problem(
            severity=Severity.ERROR,
            what="GPU sharing differs from the node's labels: the extender counts the wrong number "
            "of replicas",
            evidence=tuple(evidence),
            remedy=f"{_restart_plugin(facts)} and, after it, {_restart_discovery(facts)}: both "
            "read the configuration only at start",
        )


def _has_mig(node: Object) -> bool:
    return any(name.startswith(MIG) for name in capacity(node)) or "-MIG-" in labels_of(node).get(
        PRODUCT, ""
    )


def _configured(facts: Facts, labels: dict[str, str] | object) -> tuple[str, int] | None:
    """Return sharing strategy and replicas from the plugin's configuration, None if unknown."""
    configs = facts.plugin_configs or {}
    key = text_of(mapping_of(labels).get(_PLUGIN_CONFIG))
    if key not in configs:
        return None
    sharing = mapping_of(configs[key].get("sharing"))
    for section, strategy in (("timeSlicing", "time-slicing"), ("mps", "mps")):
        for resource in objects_of(mapping_of(sharing.get(section)).get("resources")):
            if resource.get("name") == GPU:
                return strategy, number(resource.get("replicas"))
    return "none", 1


@check("IG203", "nodes offer all their GPUs", needs=("nodes",))
def _not_offered(facts: Facts) -> Iterator[Problem]:
    """Find GPUs in a node's capacity that are not allocatable.

    The device plugin reports unhealthy GPUs.

    Remedy: read the plugin's log on that node.
    """
    evidence: list[str] = []
    nodes: set[str] = set()
    for node in facts.nodes or ():
        offered = allocatable(node)
        lines = [
            f"{name_of(node)}: {name}: capacity {count}, allocatable {offered.get(name, 0)}"
            for name, count in capacity(node).items()
            if offered.get(name, 0) < count
        ]
        if lines:
            nodes.add(name_of(node))
        evidence += lines
    if evidence:
        plugins = PLUGIN.pods_on(facts, nodes)
        read_logs = logs(plugins, "kubectl -n NAMESPACE logs of the device plugin's pod there")
        again = delete(plugins, "kubectl -n NAMESPACE delete pod POD")
        yield Problem(
            severity=Severity.WARNING,
            what="nodes have GPUs that they do not offer: the device plugin reports them "
            "unhealthy, or does not run",
            evidence=tuple(evidence),
            remedy=f"{read_logs} (which GPU, which XID); once the GPU works again, restart that "
            f"pod: {again}",
        )


@check("IG204", "the MPS control daemon runs", needs=("nodes", "pods"))
def _dead_mps(facts: Facts) -> Iterator[Problem]:
    """Find MPS nodes whose MPS control daemon does not run.

    A label says that the node uses MPS.

    Remedy: read the daemon's log, or check its DaemonSet.
    """
    daemons = [pod for pod in facts.pods or () if is_called(pod, MPS_WORDS)]
    alive = {node_of(pod) for pod in daemons if is_running(pod)}
    dead = {node_of(pod): pod for pod in daemons if not is_running(pod)}
    evidence: list[str] = []
    without: list[str] = []
    broken: list[Object] = []
    for node in facts.nodes or ():
        name = name_of(node)
        if labels_of(node).get(STRATEGY) != "mps" or name in alive:
            continue
        pod = dead.get(name)
        if pod is None:
            without.append(name)
            state = "no pod of the MPS control daemon"
        else:
            broken.append(pod)
            state = f"{key_of(pod)} is {_state(pod)}"
        evidence.append(f"{name}: {STRATEGY}=mps, {state}")
    if evidence:
        yield Problem(
            severity=Severity.ERROR,
            what="the MPS control daemon does not run: CUDA does not start in pods on these nodes",
            evidence=tuple(evidence),
            remedy="; ".join(
                [
                    f"kubectl label node {named(without)} nvidia.com/mps.capable=true --overwrite, "
                    "because its DaemonSet selects by this label"
                ][: bool(without)]
                + [f"{logs(broken, '')} shows why; then {delete(broken, '')}"][: bool(broken)]
            ),
        )


def _state(pod: Object) -> str:
    """Return a pod's phase, with its container's waiting reason and restarts if there are any."""
    status = mapping_of(pod.get("status"))
    for one in objects_of(status.get("containerStatuses")):
        reason = mapping_of(mapping_of(one.get("state")).get("waiting")).get("reason")
        if reason:
            return f"{status.get('phase')}, {reason}, {one.get('restartCount', 0)} restarts"
    return str(status.get("phase"))


@check("IG206", "pods on time-sliced GPUs state their memory", needs=("nodes", "pods"))
def _no_memory_limits(facts: Facts) -> Iterator[Problem]:
    """Find pods on time-sliced GPUs that do not declare their GPU memory.

    Remedy: set `idlegpu.io/gpu-memory`, or use MPS.
    """
    sliced = {
        name_of(node)
        for node in facts.nodes or ()
        if labels_of(node).get(STRATEGY) == "time-slicing"
    }
    evidence: defaultdict[str, list[str]] = defaultdict(list)
    for pod in gpu_pods(facts):
        is_share = bool({GPU, SHARED} & requested_gpus(pod).keys())
        if node_of(pod) in sliced and is_share and not annotations_of(pod).get(_MEMORY):
            evidence[node_of(pod)].append(key_of(pod))
    if evidence:
        yield Problem(
            severity=Severity.WARNING,
            what="pods share time-sliced GPUs and do not say how much memory they need: one can "
            "exhaust the memory of another, and the extender cannot reject a GPU that is too full",
            evidence=tuple(f"{node}: {some(pods)}" for node, pods in sorted(evidence.items())),
            remedy=f'annotations: {{{_MEMORY}: "8Gi"}} in the pod\'s template; or MPS, which caps '
            "each share (sharing.mps in the device plugin's configuration)",
        )


_MIG_STATE: Final = "nvidia.com/mig.config.state"
MANAGER_WORDS: Final = ("nvidia-mig-manager",)
_MANAGER: Final = WorkloadPart(MANAGER_WORDS)
_EXPORTER: Final = WorkloadPart(EXPORTER_WORDS)


@check("IG205", "nodes offer the MIG instances that they have", needs=("nodes",))
def _unlike_layout(facts: Facts) -> Iterator[Problem]:
    """Find nodes with a failed MIG layout, or whose MIG instances differ from their resources.

    Labels and telemetry are compared with the offered resources, also under strategy `single`.
    Layouts that are being changed are skipped.

    Remedy: restart the plugin, or correct `mig.config`.
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
            remedy=f"{_restart_plugin(facts)} (it counts instances when it starts), then "
            f"{_restart_discovery(facts)} and {restart_exporter}",
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
    if "-MIG-" in labels.get(PRODUCT, "") and _COUNT in labels:
        yield from _unlike_single(labels, offered, seen)
        return
    if _COUNT not in labels:
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
    count, replicas = number(labels.get(_COUNT)), max(number(labels.get(REPLICAS)), 1)
    here, shown = _called_gpus(offered), seen.instances.total()
    product = labels.get(PRODUCT)
    if here != count * replicas:
        yield (
            f"{PRODUCT}={product}, {_COUNT}={count} instances with {replicas} replicas, capacity "
            f"{GPU}: {here or 'none'}"
        )
    elif shown and shown != count:
        yield f"{PRODUCT}={product}, {_COUNT}={count}, telemetry shows {shown} instances"


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
