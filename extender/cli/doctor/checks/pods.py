"""Check that pods can use their GPUs, and use all that they request."""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

from extender.cli.doctor.facts import (
    Facts,
    Object,
    command_of,
    containers,
    environment_of,
    gpu_pods,
    is_running,
    key_of,
    labels_of,
    name_of,
    node_of,
    number,
    requested_by,
)
from extender.cli.doctor.findings import Problem, Severity, check
from extender.core.nodes.pod_groups import POD_GROUP, PodGroup, read_group
from extender.core.policy import Policy
from extender.core.request.annotations import Annotation, TargetPolicy, read_annotations
from extender.core.request.gpu_resources import GPU_DRIVER
from extender.core.untyped import mapping_of, number_of, objects_of, text_of

_IMAGE_CUDA: Final = (
    re.compile(r"/cuda:(1[0-9])\.([0-9]+)"),
    re.compile(r"cuda[-_]?(1[0-9])\.([0-9]+)"),
    re.compile(r"\bcu(1[0-9])([0-9])\b"),
)
"""Patterns of the CUDA version in an image name: nvidia/cuda:12.4.1-..., ...-cuda12.4-...,
...-cu124."""
_REQUIREMENT: Final = re.compile(r"cuda>=([0-9]+)\.([0-9]+)")
_UNMET: Final = re.compile(r"unsatisfied condition: [^\n]*?(cuda>=[0-9.]+|driver>=[0-9.]+)")

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_ASSIGNMENT: Final = re.compile(
    rf"""(?:^|[\s;&|(]){_VISIBLE}=("[^"]*"|'[^']*'|[^\s;&|)]*)""", re.MULTILINE
)
_COMMENT: Final = re.compile(r"^\s*#.*$", re.MULTILINE)

_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensor": ("--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--tp_size", "--num-shard"),
    "pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp_size"),
    "data": ("--data-parallel-size", "-dp", "--dp-size"),
}
"""Options of vLLM, SGLang, TensorRT-LLM and TGI for the number of GPUs of a model."""
_SEVERAL_PODS: Final = (
    *("--nnodes", "--node-rank", "--dist-init-addr", "--headless"),
    *("--data-parallel-size-local", "ray"),
)
"""Words of a model server that spans several pods, so that one pod has only some of the GPUs."""
_SHARD_VARIABLES: Final = ("NUM_SHARD", "TENSOR_PARALLEL_SIZE")
_DATA_WITHIN_TENSOR: Final = "--enable-dp-attention"
"""SGLang option: data-parallel ranks share the GPUs of the tensor-parallel ranks."""

_REFERENCE: Final = re.compile(
    r"\$\(([A-Za-z_]\w*)\)|\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$([A-Za-z_]\w*)"
)
"""Variable references in a command: `$(NAME)` is expanded by the kubelet, the others by a shell."""


@check("IG301", "drivers are new enough for the CUDA of pods", needs=("nodes", "pods"))
def _old_driver(facts: Facts) -> Iterator[Problem]:
    """Find pods whose CUDA version is too new for their node's driver.

    Either the container runtime reports it (`unsatisfied condition: cuda>=...`), or a pod that is
    not ready has an image (or `NVIDIA_REQUIRE_CUDA`) of a newer major CUDA than the driver. Images
    whose name does not show their CUDA version are not judged.

    Remedy: install a newer driver, or use an older image.
    """
    nodes = {name_of(node): node for node in facts.nodes or ()}
    evidence = []
    for pod in gpu_pods(facts):
        node = nodes.get(node_of(pod))
        refusal = _refused_by_runtime(pod)
        if refusal:
            evidence.append(f"{key_of(pod)} on {node_of(pod)}: {refusal}")
            continue
        # A running container has a working CUDA: an image may contain a compatibility package.
        if node is None or is_running(pod):
            continue
        driver, full = _driver_cuda(node), _driver(node)
        for container in containers(pod):
            needed = _needed_cuda(container)
            if needed and driver and requested_by(container) and needed[0] > driver[0]:
                evidence.append(
                    f"{key_of(pod)} on {node_of(pod)}: {container.get('image')} needs CUDA "
                    f"{needed[0]}.{needed[1]}, driver {full} has {driver[0]}.{driver[1]}"
                )
    if evidence:
        yield Problem(
            severity=Severity.ERROR,
            what="the driver is too old for the CUDA of pods: they cannot start",
            evidence=tuple(evidence),
            remedy="a newer driver there (CUDA 12: 525 or newer, CUDA 13: 580 or newer), an image "
            "with an older CUDA, or a nodeSelector on nvidia.com/cuda.driver-version.major",
        )


@check("IG306", "kube-scheduler calls idlegpu for all pods that get GPUs", needs=("pods", "claims"))
def _claims_alone(facts: Facts) -> Iterator[Problem]:
    """Find pods and PodGroups that hold GPUs through ResourceClaims and request none as a resource.

    kube-scheduler does not call idlegpu for them. Info only.

    Remedy: request `nvidia.com/gpu`, which a DeviceClass can serve (docs/dra.md).
    """
    with_resource = list(gpu_pods(facts))
    requested = {mapping_of(pod.get("metadata")).get("uid") for pod in with_resource}
    groups = {group.key for pod in with_resource if (group := read_group(pod))}
    evidence = []
    for claim in facts.claims or ():
        status = mapping_of(claim.get("status"))
        devices = mapping_of(mapping_of(status.get("allocation")).get("devices"))
        count = sum(
            one.get("driver") == GPU_DRIVER and one.get("adminAccess") is not True
            for one in objects_of(devices.get("results"))
        )
        namespace = key_of(claim).partition("/")[0]
        held = f"claim {name_of(claim)} with {count} GPU{'s' * (count > 1)}"
        for holder in objects_of(status.get("reservedFor")) if count else ():
            kind, name = holder.get("resource"), text_of(holder.get("name"))
            if kind == "pods" and holder.get("uid") not in requested:
                evidence.append(f"{namespace}/{name}: {held}")
            elif kind == "podgroups" and PodGroup(POD_GROUP, namespace, name).key not in groups:
                evidence.append(f"{namespace}/{name} (PodGroup): {held}")
    if evidence:
        yield Problem(
            severity=Severity.INFO,
            what="pods get GPUs through ResourceClaims alone: kube-scheduler places them without "
            "calling idlegpu, which counts their GPUs as held",
            evidence=tuple(evidence),
            remedy="none if kube-scheduler may choose among these GPUs by itself; otherwise let "
            "the pods request nvidia.com/gpu, which a DeviceClass can serve (docs/dra.md)",
        )


@check("IG304", "the targets of waiting pods exist", needs=("nodes", "pods"))
def _lost_targets(facts: Facts) -> Iterator[Problem]:
    """Find waiting pods whose targets (`idlegpu.io/target`) are all missing from the cluster.

    Remedy: correct the names, or set `target-policy: prefer`.
    """
    known = {name_of(node) for node in facts.nodes or ()}
    evidence = []
    for pod in gpu_pods(facts):
        wishes = read_annotations(pod, Policy())
        nodes = [target.node for target in wishes.targets]
        waits = not node_of(pod) and wishes.target_policy is TargetPolicy.REQUIRE
        if nodes and waits and known.isdisjoint(nodes):
            evidence.append(f"{key_of(pod)} names {', '.join(nodes)}")
    if evidence:
        yield Problem(
            severity=Severity.WARNING,
            what=f"pods name nodes in {Annotation.TARGET} that do not exist",
            evidence=tuple(evidence),
            remedy="correct the names (kubectl get nodes), or set idlegpu.io/target-policy to "
            '"prefer" in the pod\'s template',
        )


def _refused_by_runtime(pod: Object) -> str:
    """Return the requirement that NVIDIA's container runtime reports as unmet, "" if none."""
    for one in objects_of(mapping_of(pod.get("status")).get("containerStatuses")):
        for kind in ("state", "lastState"):
            for state in mapping_of(one.get(kind)).values():
                message = text_of(mapping_of(state).get("message"))
                match = _UNMET.search(message)
                if match:
                    return f"the container runtime says: unsatisfied condition {match[1]}"
    return ""


def _needed_cuda(container: Object) -> tuple[int, int] | None:
    """Return the CUDA version that a container was built with, None if unknown."""
    environment = environment_of(container)
    match = _REQUIREMENT.search(environment.get("NVIDIA_REQUIRE_CUDA", ""))
    image = text_of(container.get("image"))
    for pattern in _IMAGE_CUDA:
        match = match or pattern.search(image)
    return (int(match[1]), int(match[2])) if match else None


def _driver_cuda(node: Object) -> tuple[int, int] | None:
    """Return the newest CUDA version that a node's driver supports, None if unknown."""
    labels = labels_of(node)
    for prefix in ("nvidia.com/cuda.runtime-version", "nvidia.com/cuda.runtime"):
        major = number_of(labels.get(f"{prefix}.major", ""))
        if major is not None:
            return major, number(labels.get(f"{prefix}.minor"))
    version = number_of(_driver(node).partition(".")[0])
    if version is None:
        return None
    # NVIDIA's minimum driver version for each major CUDA version.
    for cuda, least in ((13, 580), (12, 525), (11, 450)):
        if version >= least:
            return cuda, 0
    return 10, 0


def _driver(node: Object) -> str:
    labels = labels_of(node)
    return labels.get("nvidia.com/cuda.driver-version.full") or labels.get(
        "nvidia.com/cuda.driver.major", ""
    )


@check("IG302", "pods do not set CUDA_VISIBLE_DEVICES", needs=("pods",))
def _set_by_hand(facts: Facts) -> Iterator[Problem]:
    """Find pods that set CUDA_VISIBLE_DEVICES in their environment or command.

    An error if it names indices other than 0 to n-1, or if a value in `env` omits some of these;
    otherwise a warning. Commands that divide the GPUs among processes, and values that only a shell
    knows, are skipped.

    Remedy: remove the variable.
    """
    lines: defaultdict[_ByHand, list[str]] = defaultdict(list)
    for pod in gpu_pods(facts):
        for container in containers(pod):
            count = sum(requested_by(container).values())
            environment = environment_of(container)
            value = environment.get(_VISIBLE)
            if not count:
                continue
            values = _set_in(container, environment)
            setting = " and ".join(map(repr, values)) + " in its command"
            by_hand = _by_commands(values, count)
            if value is not None:
                setting, by_hand = repr(value), _by_environment(value, count)
            if by_hand is not None:
                lines[by_hand].append(
                    f"{key_of(pod)}: {_VISIBLE}={setting}, {count} GPUs requested"
                )
    for by_hand in _ByHand:
        if lines[by_hand]:
            is_harmful = by_hand is _ByHand.HARMFUL
            yield Problem(
                severity=Severity.ERROR if is_harmful else Severity.WARNING,
                what=f"{_VISIBLE} is set by hand: {by_hand}",
                evidence=tuple(lines[by_hand]),
                remedy=f"take {_VISIBLE} out of env: and command: in a container the GPUs that it "
                "was given are 0 to n-1, and all are visible",
            )


class _ByHand(StrEnum):
    """Consequence of the setting, most severe first."""

    HARMFUL = "it names other GPUs than the pod has, or hides some"
    HIDING = "a command sees some of the pod's GPUs, and no other command names the rest"
    HARMLESS = "it has no effect now, and breaks once the number changes"


def _by_environment(value: str, count: int) -> _ByHand:
    is_all = sorted(_parts(value)) == [str(index) for index in range(count)]
    return _ByHand.HARMLESS if is_all else _ByHand.HARMFUL


def _by_commands(values: Sequence[str], count: int) -> _ByHand | None:
    """Judge the values set in commands; several processes may divide the pod's GPUs."""
    named, given = {part for value in values for part in _parts(value)}, set(map(str, range(count)))
    if not named:
        return None
    if named - given:
        return _ByHand.HARMFUL
    if named < given:
        return _ByHand.HIDING
    return _ByHand.HARMLESS if len(values) == 1 else None


def _set_in(container: Object, environment: Mapping[str, str]) -> list[str]:
    """Return the values that a container's command assigns, without unknown and empty ones."""
    found = [
        _expanded(match[1].strip("\"'"), environment)
        for part in command_of(container)
        for match in _ASSIGNMENT.finditer(_COMMENT.sub("", part))
    ]
    return [value for value in found if value not in {"", "-1"} and not {"$", "`"} & set(value)]


def _parts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


@check("IG303", "model servers use as many GPUs as their pods request", needs=("pods",))
def _unlike_parallel(facts: Facts) -> Iterator[Problem]:
    """Find model servers that use more or fewer GPUs than their container requests.

    The number is tensor x pipeline x data parallel size of vLLM, SGLang, TensorRT-LLM or TGI: more
    is an error, fewer a warning. With SGLang's `--enable-dp-attention` data parallel ranks need no
    GPUs of their own. Variables count if the container gets their value. Servers over several pods
    (Ray, `--nnodes`), and sizes that are not stated, are skipped.

    Remedy: make both numbers equal.
    """
    too_many: list[str] = []
    too_few: list[str] = []
    for pod in gpu_pods(facts):
        for container in containers(pod):
            count = sum(requested_by(container).values())
            words = _words(command_of(container))
            size, options = _spread(words, environment_of(container))
            if not count or not size or any(word in words for word in _SEVERAL_PODS):
                continue
            line = f"{key_of(pod)}: {options}, so {size} GPUs; it requests {count}"
            if size > count:
                too_many.append(line)
            elif size < count:
                too_few.append(line)
    for lines, severity, consequence in (
        (too_many, Severity.ERROR, "more GPUs than the pod has: it does not start"),
        (too_few, Severity.WARNING, "fewer GPUs than the pod holds: the others stay idle"),
    ):
        if lines:
            yield Problem(
                severity=severity,
                what=f"a model is spread over {consequence}",
                evidence=tuple(lines),
                remedy="make both equal: resources: {limits: {nvidia.com/gpu: N}} and "
                "--tensor-parallel-size N",
            )


def _words(command: Sequence[str]) -> list[str]:
    """Split a command into words, including those of shell scripts in it."""
    found: list[str] = []
    for part in command:
        try:
            words = shlex.split(part)
        except ValueError:
            words = part.split()
        found += words
    return found


def _spread(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Return a model server's number of GPUs, and the options that set it; 0 if unknown.

    Example:
        >>> _spread(["vllm", "serve", "x", "--tensor-parallel-size=2", "-pp", "2"], {})
        (4, '--tensor-parallel-size 2, -pp 2')
        >>> _spread(["vllm", "serve", "x", "-tp", "$(TP)"], {"TP": "4"})
        (4, '-tp 4')
    """
    size, stated = 0, []
    for kind, options in _SIZES.items():
        if kind == "data" and _DATA_WITHIN_TENSOR in words:
            continue
        found = _option(words, options)
        if not found and kind == "tensor":
            found = next(
                ((name, environment[name]) for name in _SHARD_VARIABLES if name in environment),
                None,
            )
        if not found:
            continue
        factor = number(_expanded(found[1], environment))
        if not factor:
            return 0, ""  # a variable with an unknown value
        size = max(size, 1) * factor
        stated.append(f"{found[0]} {factor}")
    if not size and _is_vllm(words):
        return 1, "vllm without --tensor-parallel-size"
    return size, ", ".join(stated)


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """Replace variable references whose value is known; keep the others."""

    def value_of(match: re.Match[str]) -> str:
        kubelets, braced, default, plain = match.groups()
        return environment.get(kubelets or braced or plain, default or match[0])

    return _REFERENCE.sub(value_of, text)


def _option(words: Sequence[str], options: Sequence[str]) -> tuple[str, str] | None:
    """Return the first of the options in a command, with its value; None if there is none."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in options:
            continue
        if equals:
            return name, value
        if index + 1 < len(words):
            return name, words[index + 1]
    return None


def _is_vllm(words: Sequence[str]) -> bool:
    return "vllm.entrypoints.openai.api_server" in words or (
        "serve" in words and any(word.rpartition("/")[2] == "vllm" for word in words)
    )
