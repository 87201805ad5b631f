"""Sum the CPU, memory and storage that pods request of their node, by kube-scheduler's rules."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from extender.core.quantity import MAX_LENGTH, parse_quantity
from extender.core.untyped import mapping_of, objects_of

CPU: Final = "cpu"
MEMORY: Final = "memory"
STORAGE: Final = "ephemeral-storage"
NAMES: Final = (CPU, MEMORY, STORAGE)
"""Resource names in the order of the fields of `HostResources`."""
_MAX_CACHED: Final = 4096
_MOST: Final = 1 << 50
"""Largest value of one quantity, more than any node has: sums of such values still fit 64 bits."""


class HostResources(NamedTuple):
    """CPU, memory and ephemeral storage of a node.

    Attributes:
        millicores: CPU in thousandths of a core.
        storage_bytes: ephemeral storage.
    """

    millicores: int = 0
    memory_bytes: int = 0
    storage_bytes: int = 0

    def plus(self, other: "HostResources") -> "HostResources":
        """Add another amount, resource by resource."""
        return HostResources(
            self.millicores + other.millicores,
            self.memory_bytes + other.memory_bytes,
            self.storage_bytes + other.storage_bytes,
        )

    def less(self, other: "HostResources") -> "HostResources":
        """Subtract another amount, resource by resource."""
        return HostResources(
            self.millicores - other.millicores,
            self.memory_bytes - other.memory_bytes,
            self.storage_bytes - other.storage_bytes,
        )

    def most(self, other: "HostResources") -> "HostResources":
        """Return the larger of two amounts, resource by resource."""
        return HostResources(
            max(self.millicores, other.millicores),
            max(self.memory_bytes, other.memory_bytes),
            max(self.storage_bytes, other.storage_bytes),
        )


NONE: Final = HostResources()


@lru_cache(maxsize=_MAX_CACHED)
def shared(needs: HostResources) -> HostResources:
    """Return one object for equal amounts, to save memory: few different amounts exist."""
    return needs


class PlacedPod(NamedTuple):
    """A pod on a node, with the CPU, memory and storage that it requests."""

    node: str
    needs: HostResources


@dataclass(frozen=True, slots=True)
class ContainerNeeds:
    """Requests of one container.

    Attributes:
        needs: requested CPU, memory and storage.
        is_sidecar: it is an init container with restartPolicy Always, and keeps running.
    """

    needs: HostResources
    is_sidecar: bool = False


def read_quantities(cpu: object, memory: object, storage: object = None) -> HostResources:
    """Parse quantities; an unparsable one is 0, because the API server rejects such pods.

    Example:
        >>> read_quantities("1500m", "2Gi")
        HostResources(millicores=1500, memory_bytes=2147483648, storage_bytes=0)
    """
    return HostResources(_scaled(cpu, 1000), _scaled(memory, 1), _scaled(storage, 1))


def read_resources(quantities: Mapping[str, object]) -> HostResources:
    """Parse CPU, memory and ephemeral storage of a list of resources by name."""
    return read_quantities(*map(quantities.get, NAMES))


def _scaled(value: object, scale: int) -> int:
    is_long = isinstance(value, str) and len(value) > MAX_LENGTH  # the cache must not keep it
    return _scaled_text(value, scale) if isinstance(value, str | int | float) and not is_long else 0


@lru_cache(maxsize=_MAX_CACHED)
def _scaled_text(value: str | float, scale: int) -> int:
    """Parse a quantity and multiply it by `scale`, rounded up; 0 if it is unparsable."""
    try:
        return min(max(-int(-parse_quantity(value) * scale // 1), 0), _MOST)
    except ValueError:
        return 0


def add_up(
    containers: Iterable[HostResources], init_containers: Iterable[ContainerNeeds]
) -> HostResources:
    """Sum the requests of a pod's containers.

    Containers run together. Init containers run one after the other, each beside the sidecars
    started before it.
    """
    together = NONE
    for needs in containers:
        together = together.plus(needs)
    sidecars = largest = NONE
    for container in init_containers:
        if container.is_sidecar:
            sidecars = sidecars.plus(container.needs)
            largest = largest.most(sidecars)
        else:
            largest = largest.most(sidecars.plus(container.needs))
    return together.plus(sidecars).most(largest)


def override(needs: HostResources, cpu: object, memory: object) -> HostResources:
    """Return the pod-level requests, or the containers' sum for a resource without one.

    Ephemeral storage cannot be requested for a whole pod.
    """
    own = read_quantities(cpu, memory)
    return HostResources(
        needs.millicores if cpu is None else own.millicores,
        needs.memory_bytes if memory is None else own.memory_bytes,
        needs.storage_bytes,
    )


def requested(pod: Mapping[str, object]) -> HostResources:
    """Parse the CPU, memory and ephemeral storage that a pod requests of its node.

    A resource without a request has its limit as request, as in the API server's defaults: pods of
    a manifest do not have these yet.

    Args:
        pod: the Pod object as decoded from JSON.

    Example:
        >>> container = {"resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}
        >>> requested({"spec": {"containers": [container, container]}})
        HostResources(millicores=4000, memory_bytes=2147483648, storage_bytes=0)
    """
    spec = mapping_of(pod.get("spec"))
    needs = add_up(
        (_of_container(container) for container in objects_of(spec.get("containers"))),
        (
            ContainerNeeds(_of_container(container), container.get("restartPolicy") == "Always")
            for container in objects_of(spec.get("initContainers"))
        ),
    )
    resources = mapping_of(spec.get("resources"))
    own, limits = mapping_of(resources.get("requests")), mapping_of(resources.get("limits"))
    needs = override(
        needs,
        own.get(CPU, None if needs.millicores else limits.get(CPU)),
        own.get(MEMORY, None if needs.memory_bytes else limits.get(MEMORY)),
    )
    return needs.plus(read_resources(mapping_of(spec.get("overhead"))))


def _of_container(container: Mapping[str, object]) -> HostResources:
    resources = mapping_of(container.get("resources"))
    limits, requests = mapping_of(resources.get("limits")), mapping_of(resources.get("requests"))
    return read_resources({**limits, **requests})
