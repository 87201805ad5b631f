"""Match GPU resource names, and count a pod's devices by Kubernetes' own rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

from extender.core.quantity import parse_whole
from extender.core.untyped import items_of, mapping_of, objects_of, text_of

DEFAULT_NAMES: Final = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*")
"""Resources of NVIDIA's device plugin; `nvidia.com/mig-*` includes the `.shared` forms."""

_NO_NAMES: Final = ("idlegpu.io/none",)
"""Placeholder for an empty list of names: no node offers this resource."""

GPU_DRIVER: Final = "gpu.nvidia.com"
"""DRA driver of NVIDIA's GPUs, as allocations and slices name it."""

_GPU_CLASSES: Final = ("gpu.nvidia.com", "mig.nvidia.com", "vfio.gpu.nvidia.com")
"""Device classes of NVIDIA's DRA driver for GPUs."""

_GPU_CLASS_RESOURCES: Final = frozenset(
    f"deviceclass.resource.kubernetes.io/{name}" for name in _GPU_CLASSES
)
"""Extended resources that Kubernetes derives from these classes."""

_MAX_COUNT: Final = 1_000_000
"""Upper bound of a device count, above any real cluster, so that sums stay small."""

MOST_CONTAINERS: Final = 1000
"""Limit for pods from an unknown sender: parsing more would delay other requests."""

_MOST_QUANTITIES: Final = 5000
"""Limit for pods from an unknown sender: limits and requests of all containers together."""

_MOST_CHARACTERS: Final = 320
"""Limit for a pod's UID, name, namespace and nominated node, and for names of resources, which have
at most 317. They are remembered for up to half an hour."""

_MOST_RESOURCES: Final = 32
"""Limit for GPU resources in one list: two models of cards with all MIG profiles, shared and whole,
have 28. Each resource of a node costs a pool in all snapshots."""

_MOST_JUDGED: Final = 16
"""Maximum number of a pod's containers that are judged singly: each takes time on every node."""


@dataclass(frozen=True, slots=True)
class ResourceNames:
    """Names of GPU resources, most important first; a trailing `*` matches any suffix.

    Attributes:
        names: resource names and patterns.

    Raises:
        ValueError: there are no names, or one of them cannot match any resource.

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
        """Return whether `name` is a GPU resource."""
        return name in self._ranks or any(name.startswith(prefix) for prefix, _ in self._prefixes)

    def rank(self, name: str) -> int:
        """Return the index of the first name or pattern that matches `name`."""
        ranks = [rank for prefix, rank in self._prefixes if name.startswith(prefix)]
        return min([*ranks, self._ranks.get(name, len(self.names))])

    def covers(self, others: "ResourceNames") -> bool:
        """Return whether these names match every resource that `others` match."""
        return all(map(self.matches, others.names))  # a pattern too: its * counts as a letter

    def shared_with(self, others: "ResourceNames") -> "ResourceNames":
        """Return names that match the resources which both sets match.

        Example:
            >>> ResourceNames(("a/x", "a/y")).shared_with(ResourceNames(("a/*", "b/z"))).names
            ('a/x', 'a/y')
        """
        shared = (*filter(others.matches, self.names), *filter(self.matches, others.names))
        return ResourceNames(tuple(dict.fromkeys(shared)) or _NO_NAMES)


def _check_name(name: str) -> None:
    """Check that a name can be an extended resource."""
    domain, slash, rest = name.partition("/")
    is_bad = not domain or not slash or not rest or "*" in name[:-1] or " " in name
    if is_bad:
        raise ValueError(
            f"GPU resource {name!r} is not allowed: must be like nvidia.com/gpu, with at most one "
            "*, at the end"
        )


def count_devices(pod: Mapping[str, object], names: ResourceNames) -> dict[str, int]:
    """Count a pod's devices per GPU resource, most important resource first.

    Counts like kube-scheduler: containers run together and are summed. Init containers run one
    after the other, each beside the sidecars (init containers with restartPolicy Always) started
    before it, so the largest sum counts. Pod-level resources and overhead hold no devices. An
    unparsable quantity counts 0: the API server rejects such pods.

    Example:
        >>> container = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
        >>> count_devices({"spec": {"containers": [container, container]}}, ResourceNames())
        {'nvidia.com/gpu': 4}
    """
    together, largest = _count_moments(pod, names)
    return {
        name: min(max(together.get(name, 0), largest.get(name, 0)), _MAX_COUNT)
        for name in sorted({*together, *largest}, key=lambda name: (names.rank(name), name))
    }


def count_lasting(pod: Mapping[str, object], names: ResourceNames) -> dict[str, int]:
    """Count a pod's devices per GPU resource without those that only init containers request.

    The kubelet reserves devices of init containers for the pod's whole life, but reports only the
    others as held.

    Example:
        >>> init = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
        >>> count_lasting({"spec": {"containers": [{}], "initContainers": [init]}}, ResourceNames())
        {}
    """
    return {name: min(count, _MAX_COUNT) for name, count in _count_moments(pod, names)[0].items()}


class ContainerDevices(NamedTuple):
    """Devices of one resource that a container requests.

    Attributes:
        devices: number of devices, at least 1.
        is_passed_on: the container is an init container that ends: the kubelet gives its devices to
            the containers after it.
    """

    devices: int
    is_passed_on: bool = False


Containers = tuple[tuple[str, tuple[ContainerDevices, ...]], ...]
"""Containers that request devices, by resource; () if one container requests all of each."""


def list_containers(pod: Mapping[str, object], names: ResourceNames) -> Containers:
    """List the containers with devices per GPU resource, in the order of admission by a kubelet.

    Init containers come first, sidecars among them. An init container that only uses the devices of
    an earlier one again is left out, and so are the containers after the first `_MOST_JUDGED`.

    Example:
        >>> container = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
        >>> pod = {"spec": {"initContainers": [container], "containers": [container]}}
        >>> ((name, containers),) = list_containers(pod, ResourceNames())
        >>> [tuple(one) for one in containers]
        [(2, True), (2, False)]
    """
    spec = mapping_of(pod.get("spec"))
    found: dict[str, list[ContainerDevices]] = {}
    reused: dict[str, set[int]] = {}  # counts of init containers whose devices are still passed on
    for kind in ("initContainers", "containers"):
        for container in objects_of(spec.get(kind)):
            ends = kind == "initContainers" and container.get("restartPolicy") != "Always"
            for name, count in _container_devices(container, names).items():
                earlier = reused.setdefault(name, set())
                if not ends:
                    earlier.clear()
                elif count in earlier:
                    continue
                else:
                    earlier.add(count)
                containers = found.setdefault(name, [])
                if len(containers) < _MOST_JUDGED:
                    containers.append(ContainerDevices(count, ends))
    if all(len(containers) == 1 for containers in found.values()):
        return ()
    return tuple((name, tuple(containers)) for name, containers in found.items())


def _count_moments(
    pod: Mapping[str, object], names: ResourceNames
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the devices of all running containers, and the maximum while init containers run."""
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
    """Return a message if a pod exceeds the size limits, "" if not, without parsing it.

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
    named = mapping_of(pod.get("metadata"))
    names = [text_of(named.get(name)) for name in ("uid", "namespace", "name")]
    names.append(text_of(mapping_of(pod.get("status")).get("nominatedNodeName")))
    if (longest := max(map(len, names))) > _MOST_CHARACTERS:
        return f"a name of {longest} characters: must be at most {_MOST_CHARACTERS}"
    quantities = len(mapping_of(spec.get("overhead"))) + sum(
        len(mapping_of(part.get(kind))) for part in parts for kind in ("limits", "requests")
    )
    if quantities > _MOST_QUANTITIES:
        return f"{quantities} limits and requests: must be at most {_MOST_QUANTITIES}"
    return ""


def holds_devices(container: Mapping[str, object], names: ResourceNames) -> bool:
    """Return whether a container requests GPUs, or any devices through ResourceClaims.

    Example:
        >>> worker = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        >>> holds_devices(worker, ResourceNames()), holds_devices({}, ResourceNames())
        (True, False)
    """
    claims = items_of(mapping_of(container.get("resources")).get("claims"))
    return bool(claims or _container_devices(container, names))


def has_claims(pod: Mapping[str, object]) -> bool:
    """Return whether a pod uses ResourceClaims: its own, or one created for its resources.

    The kind of the devices is unknown here. A claim that the pod's status lists without a name is
    unneeded and does not count.

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
    """Return whether Kubernetes created a claim for GPU resources of the pod, by device class.

    Such resources are named after a device class, and no count of GPU resources includes them.

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
    """Parse the GPU counts of a resource list; bad quantities and names are skipped.

    Of more than `_MOST_RESOURCES` the first ones count.

    Example:
        >>> read_counts({"nvidia.com/gpu": "8", "cpu": "64"}, ResourceNames())
        {'nvidia.com/gpu': 8}
    """
    counts: dict[str, int] = {}
    for name, quantity in mapping_of(quantities).items():
        if names.matches(name) and len(name) <= _MOST_CHARACTERS:
            try:
                counts[name] = min(parse_whole(quantity), _MAX_COUNT)
            except ValueError:
                continue
            if len(counts) == _MOST_RESOURCES:
                break
    return counts


def _container_devices(container: Mapping[str, object], names: ResourceNames) -> dict[str, int]:
    """Return a container's GPU requests; a resource without a request uses its limit."""
    resources = mapping_of(container.get("resources"))
    counts = {
        **read_counts(resources.get("limits"), names),
        **read_counts(resources.get("requests"), names),
    }
    return {name: count for name, count in counts.items() if count}


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count
