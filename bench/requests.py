"""kube-scheduler's requests as bytes: ExtenderArgs with the names of all candidates.

Each request has a pod as the API server returns it (some kilobytes), and the names of all nodes:
the candidates if kube-scheduler's own plugins filter no node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import orjson

from bench.world import World

GPU: Final = "nvidia.com/gpu"
MIG: Final = "nvidia.com/mig-1g.5gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """GPU request of a pod.

    Attributes:
        resource: GPU resource.
        gpus: number of GPUs.
        annotations: names without the prefix, and values.
    """

    resource: str = GPU
    gpus: int = 1
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


EVERYDAY: Final = (
    Wish(),
    Wish(gpus=2),
    Wish(gpus=4),
    Wish(gpus=8),
    Wish(resource=MIG),
    Wish(annotations={"gpu-memory": "20Gi"}),
    Wish(annotations={"strategy": "pack"}),
    Wish(gpus=8, annotations={"gpu-memory": "70Gi"}),
)
"""A few requests that recur."""


def distinct(count: int) -> tuple[Wish, ...]:
    """Return `count` different requests: each has another memory request."""
    return tuple(
        Wish(
            gpus=(1, 1, 2, 4, 8)[number % 5], annotations={"gpu-memory": f"{2048 + 64 * number}Mi"}
        )
        for number in range(count)
    )


def create_pod(world: World, wish: Wish) -> tuple[str, bytes]:
    """Create a pod with a request; return its UID, and its JSON from the API server."""
    created = world.control(
        "pods",
        kind="gpu",
        resource=wish.resource,
        gpus=wish.gpus,
        annotations={f"idlegpu.io/{name}": value for name, value in wish.annotations.items()},
        objects=True,
    )
    return created["uids"][0], orjson.dumps(created["objects"][0])


def names_json(nodes: Sequence[str]) -> bytes:
    """Encode names for `request_body`."""
    return orjson.dumps(list(nodes))


def request_body(pod: bytes, names: bytes) -> bytes:
    """Encode ExtenderArgs for `nodeCacheCapable: true`."""
    return b'{"Pod":%b,"Nodes":null,"NodeNames":%b}' % (pod, names)
