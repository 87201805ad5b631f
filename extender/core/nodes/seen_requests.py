"""Learn which requests pods make, so that a placement leaves room for the next ones."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from extender.core.nodes.inventory import PodRecord

_MAX_KINDS: Final = 32
"""Maximum number of different requests per resource, the rarest dropped first. On a public trace
they are 87 % of all pods."""

_MAX_RESOURCES: Final = 32
"""Maximum number of resources, least recently requested dropped first."""

_HALF_LIFE: Final = 4000.0
"""A request counts half after this many further requests. With 1,000, 0.16 % more of all GPUs stay
unallocated on a public trace with many fractions of GPUs."""

_LEAST: Final = 8.0
"""Minimum number of requests before they count."""

_STEP: Final = 0.1
"""Requests are published again once this share of them differs from those published. Each time all
nodes are evaluated again."""

_LARGEST: Final = 1e12


@dataclass(frozen=True, slots=True, order=True)
class RequestKind:
    """One request, made by any number of equal pods.

    Attributes:
        count: devices or replicas.
        memory_bytes: memory per device, 0 if not specified.
        millicores: CPU of the node.
        host_bytes: memory of the node.
        models: accepted GPU models, normalized; () for all.
        storage_bytes: ephemeral storage of the node.
    """

    count: int
    memory_bytes: int = 0
    millicores: int = 0
    host_bytes: int = 0
    models: tuple[str, ...] = ()
    storage_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenRequests:
    """Requests seen for one resource, and the share of the pods that made each request.

    Attributes:
        kinds: the different requests.
        shares: share of each among all requests; they sum to 1.
        weight: `shares` as a column, like the next four with one row per kind.
        count: devices or replicas.
        millicores: CPU of the node.
        host_bytes: memory of the node.
        storage_bytes: ephemeral storage of the node; None if no request specifies any.
        parts: index of the distinct pair of count and memory per device that the kind requests.
            Whether a device can serve a kind depends only on this pair.
        part_count: count of each such pair.
        part_bytes: memory per device of each such pair; None if no request specifies any.
        names_models: whether any of them names GPU models.
    """

    kinds: tuple[RequestKind, ...] = ()
    shares: tuple[float, ...] = ()
    weight: npt.NDArray[np.float64] = field(init=False, repr=False)
    count: npt.NDArray[np.intp] = field(init=False, repr=False)
    millicores: npt.NDArray[np.intp] = field(init=False, repr=False)
    host_bytes: npt.NDArray[np.intp] = field(init=False, repr=False)
    storage_bytes: npt.NDArray[np.intp] | None = field(init=False, repr=False)
    parts: npt.NDArray[np.intp] = field(init=False, repr=False)
    part_count: npt.NDArray[np.intp] = field(init=False, repr=False)
    part_bytes: npt.NDArray[np.float64] | None = field(init=False, repr=False)
    names_models: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pairs = list(dict.fromkeys((kind.count, kind.memory_bytes) for kind in self.kinds))
        storage = [kind.storage_bytes for kind in self.kinds]
        memory = [memory_bytes for _, memory_bytes in pairs]
        columns = {
            "weight": np.array(self.shares, dtype=np.float64),
            "count": np.array([kind.count for kind in self.kinds], dtype=np.intp),
            "millicores": np.array([kind.millicores for kind in self.kinds], dtype=np.intp),
            "host_bytes": np.array([kind.host_bytes for kind in self.kinds], dtype=np.intp),
            "storage_bytes": np.array(storage, dtype=np.intp) if any(storage) else None,
            "parts": np.array(
                [pairs.index((kind.count, kind.memory_bytes)) for kind in self.kinds], dtype=np.intp
            ),
            "part_count": np.array([count for count, _ in pairs], dtype=np.intp),
            "part_bytes": np.array(memory, dtype=np.float64) if any(memory) else None,
            "names_models": any(kind.models for kind in self.kinds),
        }
        for name, column in columns.items():
            object.__setattr__(self, name, column)

    def __bool__(self) -> bool:
        return bool(self.kinds)

    @classmethod
    def of(cls, weights: Mapping[RequestKind, float]) -> Self:
        """Return requests with shares in proportion to their weights."""
        total = sum(weights.values())
        kinds = tuple(sorted(weights))
        return cls(kinds=kinds, shares=tuple(weights[kind] / total for kind in kinds))

    def distance(self, other: "SeenRequests") -> float:
        """Return the share of the requests in which two mixes differ, 0 to 1."""
        before = dict(zip(other.kinds, other.shares, strict=True))
        return sum(
            max(share - before.get(kind, 0.0), 0.0)
            for kind, share in zip(self.kinds, self.shares, strict=True)
        )


NONE_SEEN: Final = SeenRequests()


class RequestTable:
    """Counts requests by resource; old ones count less and less, so the table follows the pods."""

    def __init__(self) -> None:
        self._weights: OrderedDict[str, dict[RequestKind, float]] = OrderedDict()
        self._next = 1.0
        self._published: dict[str, SeenRequests] = {}

    def note(self, record: PodRecord, models: tuple[str, ...] = ()) -> None:
        """Count the request of a new pod.

        Args:
            record: record of the unbound pod; records of bound pods lack CPU and memory.
            models: accepted GPU models, normalized; () for all.
        """
        for resource, count in record.resources.items():
            self.add(
                resource,
                RequestKind(
                    count=count,
                    memory_bytes=record.memory_bytes or 0,
                    millicores=record.host.millicores,
                    host_bytes=record.host.memory_bytes,
                    models=models,
                    storage_bytes=record.host.storage_bytes,
                ),
            )

    def add(self, resource: str, kind: RequestKind) -> None:
        """Count one request for a resource."""
        weights = self._weights.setdefault(resource, {})
        self._weights.move_to_end(resource)
        if len(self._weights) > _MAX_RESOURCES:
            self._weights.popitem(last=False)
        if kind not in weights and len(weights) >= _MAX_KINDS:
            del weights[min(weights, key=weights.__getitem__)]
        weights[kind] = weights.get(kind, 0.0) + self._next
        self._next *= 2 ** (1 / _HALF_LIFE)
        if self._next > _LARGEST:
            self._rescale()

    def clear(self) -> None:
        """Forget all requests, because other nodes may get other requests."""
        self._weights.clear()

    def _rescale(self) -> None:
        for weights in self._weights.values():
            for kind in weights:
                weights[kind] /= self._next
        self._next = 1.0

    def publish(self) -> Mapping[str, SeenRequests]:
        """Return the requests by resource: the same objects until the mix changed by `_STEP`."""
        for resource, weights in self._weights.items():
            if sum(weights.values()) < _LEAST * self._next:
                continue
            seen = SeenRequests.of(weights)
            if seen.distance(self._published.get(resource, NONE_SEEN)) > _STEP:
                self._published[resource] = seen
        for resource in self._published.keys() - self._weights.keys():
            del self._published[resource]
        return self._published
