"""CPU and memory of nodes that pods request, by kube-scheduler's own arithmetic."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from extender.core.quantity import parse_quantity
from extender.core.untyped import mapping_of, objects_of

CPU: Final = "cpu"
MEMORY: Final = "memory"
MAX_CACHED: Final = 4096


class HostResources(NamedTuple):
    """CPU and memory of a node.

    Attributes:
        millicores: thousandths of a CPU.
        memory_bytes: memory.
    """

    millicores: int = 0
    memory_bytes: int = 0

    def plus(self, other: "HostResources") -> "HostResources":
        """Return the sum of both."""
        return HostResources(
            self.millicores + other.millicores, self.memory_bytes + other.memory_bytes
        )

    def less(self, other: "HostResources") -> "HostResources":
        """Return what is left of it without the other."""
        return HostResources(
            self.millicores - other.millicores, self.memory_bytes - other.memory_bytes
        )

    def most(self, other: "HostResources") -> "HostResources":
        """Return the larger of each."""
        return HostResources(
            max(self.millicores, other.millicores), max(self.memory_bytes, other.memory_bytes)
        )


NONE: Final = HostResources()


@dataclass(frozen=True, slots=True)
class ContainerNeeds:
    """What one container requests.

    Attributes:
        needs: of the node.
        is_sidecar: it is an init container that restarts always, and runs beside the others.
    """

    needs: HostResources
    is_sidecar: bool = False


def read_quantities(cpu: object, memory: object) -> HostResources:
    """Return CPU and memory; what cannot be read counts as none: the API server lets none in.

    Example:
        >>> read_quantities("1500m", "2Gi")
        HostResources(millicores=1500, memory_bytes=2147483648)
    """
    return HostResources(_scaled(cpu, 1000), _scaled(memory, 1))


def _scaled(value: object, scale: int) -> int:
    return _scaled_text(value, scale) if isinstance(value, str | int | float) else 0


@lru_cache(maxsize=MAX_CACHED)
def _scaled_text(value: str | float, scale: int) -> int:
    """Return a quantity in so many parts of its unit, rounded up."""
    try:
        return max(-int(-parse_quantity(value) * scale // 1), 0)
    except ValueError:
        return 0


def add_up(
    containers: Iterable[HostResources],
    init_containers: Iterable[ContainerNeeds],
) -> HostResources:
    """Return what a pod requests of its node.

    Containers run together; init containers one after the other, each beside the sidecars that
    were started before it.
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
    """Return what a pod requests where it says that itself, beside its containers."""
    own = read_quantities(cpu, memory)
    return HostResources(
        needs.millicores if cpu is None else own.millicores,
        needs.memory_bytes if memory is None else own.memory_bytes,
    )


def requested(pod: Mapping[str, object]) -> HostResources:
    """Return what a pod requests of its node.

    Args:
        pod: the Pod object as decoded from JSON.

    Example:
        >>> container = {"resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}
        >>> requested({"spec": {"containers": [container, container]}})
        HostResources(millicores=4000, memory_bytes=2147483648)
    """
    spec = mapping_of(pod.get("spec"))
    needs = add_up(
        (_of_container(container) for container in objects_of(spec.get("containers"))),
        (
            ContainerNeeds(_of_container(container), container.get("restartPolicy") == "Always")
            for container in objects_of(spec.get("initContainers"))
        ),
    )
    own = mapping_of(mapping_of(spec.get("resources")).get("requests"))
    needs = override(needs, own.get(CPU), own.get(MEMORY))
    overhead = mapping_of(spec.get("overhead"))
    return needs.plus(read_quantities(overhead.get(CPU), overhead.get(MEMORY)))


def _of_container(container: Mapping[str, object]) -> HostResources:
    requests = mapping_of(mapping_of(container.get("resources")).get("requests"))
    return read_quantities(requests.get(CPU), requests.get(MEMORY))
