"""Read the GPU memory that a pod's frameworks are limited to, from variables and arguments.

JAX and CUDA under MPS read their variables themselves. TensorFlow, ONNX Runtime and vLLM read none
for this: images read these names and pass the value on, to `set_logical_device_configuration`
(MiB), `gpu_mem_limit` and `--gpu-memory-utilization`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from extender.core.quantity import GIB, MIB, TIB
from extender.core.request.annotations import AnnotationProblem, shorten
from extender.core.request.gpu_resources import ResourceNames, read_counts
from extender.core.untyped import items_of, mapping_of, objects_of, text_of

_SHARE_ALLOWED: Final = "a share of the GPU's memory, above 0 and up to 1, such as 0.4"
_BYTES_ALLOWED: Final = "from 1 MiB to 16 TiB"
_MAX_TEXT: Final = 65_536
"""Arguments of a container are read up to this length, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """GPU memory per device that a container's frameworks are limited to.

    Attributes:
        memory_bytes: the limit, None if it is a share or there is none.
        share: the limit as a share of the card's memory, 0 if it is in bytes or there is none.
        source: the variable or argument, "" without one.
    """

    memory_bytes: int | None = None
    share: float = 0.0
    source: str = ""


_NO_LIMIT: Final = MemoryLimit()

_Parser = Callable[[str], MemoryLimit]


def _parse_share(text: str) -> MemoryLimit:
    """Parse a share of the card's memory."""
    share = float(text)
    if not 0 < share <= 1:
        raise ValueError(f"{text!r}: must be {_SHARE_ALLOWED}")
    return MemoryLimit(share=share)


def _parse_multiple(text: str, unit: int) -> MemoryLimit:
    """Parse a number of units as bytes."""
    count = float(text) * unit
    if not MIB <= count <= 16 * TIB:
        raise ValueError(f"{text!r}: must be {_BYTES_ALLOWED}")
    return MemoryLimit(memory_bytes=int(count))


def _parse_mps(text: str) -> MemoryLimit:
    """Parse the limits of an MPS client, `device=size` separated by commas; the largest counts.

    Example:
        >>> _parse_mps("0=1G,1=512M").memory_bytes >> 20
        1024
    """
    found = [re.fullmatch(r"\d+=(\d+)([GM])B?", one.strip()) for one in text.split(",")]
    if None in found:
        raise ValueError(f"{text!r}: must be such as 0=4G")
    return MemoryLimit(
        memory_bytes=max(
            _parse_multiple(one[1], GIB if one[2] == "G" else MIB).memory_bytes or 0
            for one in found
            if one
        )
    )


def _bytes(text: str) -> MemoryLimit:
    return _parse_multiple(text, 1)


def _mib(text: str) -> MemoryLimit:
    return _parse_multiple(text, MIB)


def _gib(text: str) -> MemoryLimit:
    return _parse_multiple(text, GIB)


_VARIABLES: Final[Mapping[str, _Parser]] = {
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": _parse_mps,
    "VLLM_GPU_MEMORY_UTILIZATION": _parse_share,
    "GPU_MEMORY_UTILIZATION": _parse_share,
    "CUDA_MEMORY_FRACTION": _parse_share,
    "TF_GPU_MEMORY_LIMIT": _mib,
    "TF_GPU_MEMORY_LIMIT_MB": _mib,
    "TF_PER_PROCESS_GPU_MEMORY_FRACTION": _parse_share,
    "ORT_CUDA_GPU_MEM_LIMIT": _bytes,
    "ORT_CUDA_GPU_MEM_LIMIT_MB": _mib,
    "ORT_GPU_MEM_LIMIT_MB": _mib,
    "ORT_GPU_MEM_LIMIT_GB": _gib,
    "ONNX_GPU_MEM_LIMIT_MB": _mib,
    "XLA_PYTHON_CLIENT_MEM_FRACTION": _parse_share,
    "XLA_CLIENT_MEM_FRACTION": _parse_share,
}
"""Variables in the order of precedence. `GPU_MEMORY_UTILIZATION` is that of vLLM's serverless
workers, `CUDA_MEMORY_FRACTION` that of text-generation-inference."""

_ARGUMENT: Final = re.compile(
    r"(--gpu[-_]memory[-_]utilization|--cuda[-_]memory[-_]fraction)[=\s]+[\"']?([^\s\"']*)"
)
"""Argument of vLLM or text-generation-inference: a share, which precedes variables."""


def read_limits(
    pod: Mapping[str, object], names: ResourceNames
) -> tuple[MemoryLimit, tuple[AnnotationProblem, ...]]:
    """Return the largest limit of a pod's containers with GPUs, and the values that are invalid.

    Of the init containers only sidecars count: the others end before the pod's containers start.
    Values that refer to other variables, Secrets or ConfigMaps are unknown, and left out.

    Args:
        pod: the Pod object as decoded from JSON.

    Example:
        >>> container = {
        ...     "args": ["--gpu-memory-utilization", "0.4"],
        ...     "resources": {"limits": {"nvidia.com/gpu": "1"}},
        ... }
        >>> read_limits({"spec": {"containers": [container]}}, ResourceNames())[0].share
        0.4
    """
    best, problems = _NO_LIMIT, []
    for container in _lasting_containers(mapping_of(pod.get("spec"))):
        resources = mapping_of(container.get("resources"))
        if not (read_counts(resources.get("limits"), names)):
            continue
        for source, value, parse in _stated(container):
            try:
                limit = parse(value)
            except ValueError:
                problems.append(_problem(source, value, parse))
                continue
            if (limit.share, limit.memory_bytes or 0) > (best.share, best.memory_bytes or 0):
                best = MemoryLimit(
                    memory_bytes=limit.memory_bytes, share=limit.share, source=source
                )
            break
    return best, tuple(problems)


def _lasting_containers(spec: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the containers that run for the pod's whole life: sidecars, and the main ones."""
    for container in objects_of(spec.get("initContainers")):
        if container.get("restartPolicy") == "Always":
            yield container
    yield from objects_of(spec.get("containers"))


def _stated(container: Mapping[str, object]) -> Iterator[tuple[str, str, _Parser]]:
    """Yield the limits that a container states, in the order of precedence.

    Of a repeated argument the last one counts, as in the frameworks.
    """
    words = [*items_of(container.get("command")), *items_of(container.get("args"))]
    arguments = [*_ARGUMENT.finditer(" ".join(map(text_of, words))[:_MAX_TEXT])]
    for found in reversed(arguments):
        if not found[2].startswith("$"):
            yield f"argument {found[1].replace('_', '-')}", found[2], _parse_share
    values = {
        text_of(one.get("name")): text_of(one.get("value"))
        for one in objects_of(container.get("env"))
    }
    for name, parse in _VARIABLES.items():
        value = values.get(name, "").strip()
        if value and "$(" not in value:
            yield f"variable {name}", value, parse


def _problem(source: str, value: str, parse: _Parser) -> AnnotationProblem:
    kind, _, name = source.partition(" ")
    return AnnotationProblem(
        kind=kind,
        annotation=name,
        value=shorten(value),
        allowed=_SHARE_ALLOWED if parse is _parse_share else _BYTES_ALLOWED,
        default_used="nothing, it is ignored",
    )
