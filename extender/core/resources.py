"""Which resources are GPUs, and how many of them a pod holds by Kubernetes' own arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from extender.core.quantity import parse_count
from extender.core.untyped import items_of, mapping_of, objects_of, text_of

DEFAULT_NAMES: Final = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*")
"""What NVIDIA's device plugin offers; `nvidia.com/mig-*` covers the `.shared` forms as well."""

NO_NAMES: Final = ("idlegpu.io/none",)
"""Stands for no name at all: nobody offers such a resource."""

GPU_CLASSES: Final = ("gpu.nvidia.com", "mig.nvidia.com", "vfio.gpu.nvidia.com")
"""Device classes of NVIDIA's DRA driver that are GPUs."""

_GPU_CLASS_RESOURCES: Final = frozenset(
    f"deviceclass.resource.kubernetes.io/{name}" for name in GPU_CLASSES
)
"""The resources that Kubernetes makes of these classes by itself."""

MAX_COUNT: Final = 1_000_000
"""More devices than any cluster has; a larger count is held at this, so that sums stay small."""

MOST_CONTAINERS: Final = 1000
"""Of a pod whose sender is not known: reading more takes longer than others may have to wait."""

MOST_QUANTITIES: Final = 5000
"""Of a pod likewise: limits and requests of all its containers together."""


@dataclass(frozen=True, slots=True)
class ResourceNames:
    """The names of GPU resources, most important first; a trailing `*` stands for any rest.

    Attributes:
        names: resource names and patterns.

    Raises:
        ValueError: there are no names, or one of them can match no resource.

    Example:
        >>> names = ResourceNames(("nvidia.com/gpu", "nvidia.com/mig-*"))
        >>> names.matches("nvidia.com/mig-1g.10gb.shared"), names.matches("cpu")
        (True, False)
    """

    names: tuple[str, ...] = DEFAULT_NAMES
    _ranks: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _prefixes: tuple[tuple[str, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("no GPU resource is named: name at least one, e.g. nvidia.com/gpu")
        for name in self.names:
            _check_name(name)
        exact = {name: rank for rank, name in enumerate(self.names) if not name.endswith("*")}
        prefixes = tuple(
            (name[:-1], rank) for rank, name in enumerate(self.names) if name.endswith("*")
        )
        object.__setattr__(self, "_ranks", exact)
        object.__setattr__(self, "_prefixes", prefixes)

    def matches(self, name: str) -> bool:
        """Whether `name` is a GPU resource."""
        return name in self._ranks or any(name.startswith(prefix) for prefix, _ in self._prefixes)

    def rank(self, name: str) -> int:
        """Return the place of the first name or pattern that matches `name`, lower first."""
        ranks = [rank for prefix, rank in self._prefixes if name.startswith(prefix)]
        return min([*ranks, self._ranks.get(name, len(self.names))])

    def covers(self, others: "ResourceNames") -> bool:
        """Whether all that others match are GPU resources by these names, too."""
        return all(map(self.matches, others.names))  # a pattern, too: its * is like any letter

    def shared_with(self, others: "ResourceNames") -> "ResourceNames":
        """Return names for what is a GPU resource by these and by others.

        Example:
            >>> ResourceNames(("a/x", "a/y")).shared_with(ResourceNames(("a/*", "b/z"))).names
            ('a/x', 'a/y')
        """
        shared = (*filter(others.matches, self.names), *filter(self.matches, others.names))
        return ResourceNames(tuple(dict.fromkeys(shared)) or NO_NAMES)


def _check_name(name: str) -> None:
    """Refuse a name that can be no extended resource.

    Raises:
        ValueError: the name, and what it must be.
    """
    domain, slash, rest = name.partition("/")
    is_bad = not domain or not slash or not rest or "*" in name[:-1] or " " in name
    if is_bad:
        raise ValueError(
            f"GPU resource {name!r} is not allowed: must be like nvidia.com/gpu, with at most one "
            "*, at the end"
        )


def count_devices(pod: Mapping[str, object], names: ResourceNames) -> dict[str, int]:
    """Return how many devices a pod holds of each GPU resource, most important resource first.

    As kube-scheduler computes it: containers run together, so theirs are summed; init containers
    run one after the other, each beside the sidecars (init containers that restart always) started
    before it, so the largest moment counts. Pod-level resources and overhead never hold devices.
    A quantity that cannot be read counts as none: the API server lets no such pod in.

    Example:
        >>> container = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
        >>> count_devices({"spec": {"containers": [container, container]}}, ResourceNames())
        {'nvidia.com/gpu': 4}
    """
    together, largest = _count_moments(pod, names)
    return {
        name: min(max(together.get(name, 0), largest.get(name, 0)), MAX_COUNT)
        for name in sorted({*together, *largest}, key=lambda name: (names.rank(name), name))
    }


def count_lasting(pod: Mapping[str, object], names: ResourceNames) -> dict[str, int]:
    """Return how many devices of each GPU resource its containers have once it has begun.

    The kubelet keeps those of init containers for the pod's whole life as well, but names them to
    nobody: mappings show these alone.

    Example:
        >>> ask = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
        >>> count_lasting({"spec": {"containers": [{}], "initContainers": [ask]}}, ResourceNames())
        {}
    """
    return {name: min(count, MAX_COUNT) for name, count in _count_moments(pod, names)[0].items()}


def _count_moments(
    pod: Mapping[str, object], names: ResourceNames
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the devices of containers that run together, and the most while init containers do."""
    spec = mapping_of(pod.get("spec"))
    together: dict[str, int] = {}
    for container in objects_of(spec.get("containers")):
        _add(together, _container_devices(container, names))
    sidecars: dict[str, int] = {}
    largest: dict[str, int] = {}
    for container in objects_of(spec.get("initContainers")):
        moment = _container_devices(container, names)
        if container.get("restartPolicy") == "Always":
            _add(together, moment)
            _add(sidecars, moment)
            moment = sidecars
        else:
            _add(moment, sidecars)
        for name, count in moment.items():
            largest[name] = max(largest.get(name, 0), count)
    return together, largest


def excess_of(pod: Mapping[str, object]) -> str:
    """Return what a pod has too much of, "" for nothing, for less than reading it costs.

    Example:
        >>> excess_of({"spec": {"containers": [{}] * 900, "initContainers": [{}] * 101}})
        '1001 containers: must be at most 1000'
    """
    spec = mapping_of(pod.get("spec"))
    lists = [items_of(spec.get(name)) for name in ("containers", "initContainers")]
    containers = sum(map(len, lists))
    if containers > MOST_CONTAINERS:
        return f"{containers} containers: must be at most {MOST_CONTAINERS}"
    parts = (mapping_of(part.get("resources")) for part in (spec, *map(mapping_of, chain(*lists))))
    quantities = len(mapping_of(spec.get("overhead"))) + sum(
        len(mapping_of(part.get(kind))) for part in parts for kind in ("limits", "requests")
    )
    if quantities > MOST_QUANTITIES:
        return f"{quantities} limits and requests: must be at most {MOST_QUANTITIES}"
    return ""


def holds_devices(container: Mapping[str, object], names: ResourceNames) -> bool:
    """Whether one container of a pod holds GPUs, or devices by ResourceClaims.

    Example:
        >>> ask = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        >>> holds_devices(ask, ResourceNames()), holds_devices({}, ResourceNames())
        (True, False)
    """
    claims = items_of(mapping_of(container.get("resources")).get("claims"))
    return bool(claims or _container_devices(container, names))


def has_claims(pod: Mapping[str, object]) -> bool:
    """Whether a pod holds devices by ResourceClaims: its own, or one made for its resources.

    Devices of which kind, neither the pod nor its node says. A claim that its status calls
    unneeded (listed, without a name) is none.

    Example:
        >>> has_claims({"spec": {"resourceClaims": [{"name": "gpu"}]}})
        True
    """
    spec = mapping_of(pod.get("spec"))
    status = mapping_of(pod.get("status"))
    unneeded = {
        text_of(claim.get("name"))
        for claim in objects_of(status.get("resourceClaimStatuses"))
        if not claim.get("resourceClaimName")
    }
    claims = map(mapping_of, items_of(spec.get("resourceClaims")))
    return any(text_of(claim.get("name")) not in unneeded for claim in claims) or bool(
        mapping_of(status.get("extendedResourceClaimStatus"))
    )


def has_gpu_claims(pod: Mapping[str, object]) -> bool:
    """Whether a claim was made for resources of the pod that are GPUs by their device class.

    Such resources are named after a class, and no count of GPU resources tells of them.

    Example:
        >>> made = {"resourceName": "deviceclass.resource.kubernetes.io/gpu.nvidia.com"}
        >>> has_gpu_claims({"status": {"extendedResourceClaimStatus": {"requestMappings": [made]}}})
        True
    """
    status = mapping_of(mapping_of(pod.get("status")).get("extendedResourceClaimStatus"))
    return any(
        text_of(mapping.get("resourceName")) in _GPU_CLASS_RESOURCES
        for mapping in objects_of(status.get("requestMappings"))
    )


def read_counts(quantities: object, names: ResourceNames) -> dict[str, int]:
    """Return the GPU resources of a resource list; unreadable quantities are left out.

    Example:
        >>> read_counts({"nvidia.com/gpu": "8", "cpu": "64"}, ResourceNames())
        {'nvidia.com/gpu': 8}
    """
    counts = {}
    for name, quantity in mapping_of(quantities).items():
        if names.matches(name):
            try:
                counts[name] = min(parse_count(quantity), MAX_COUNT)
            except ValueError:
                continue
    return counts


def _container_devices(container: Mapping[str, object], names: ResourceNames) -> dict[str, int]:
    """Return what one container asks for; limits stand in where it names no requests."""
    resources = mapping_of(container.get("resources"))
    counts = {
        **read_counts(resources.get("limits"), names),
        **read_counts(resources.get("requests"), names),
    }
    return {name: count for name, count in counts.items() if count}


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    """Add counts to `total`."""
    for name, count in more.items():
        total[name] = total.get(name, 0) + count
