"""kube-scheduler's questions as bytes: ExtenderArgs with the names of all candidates.

A pod is as the API server shows it (some kilobytes), the names are all nodes of the cluster: what
kube-scheduler's own plugins leave over where nothing but GPUs narrows the choice.
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
    """What a pod asks for.

    Attributes:
        resource: GPU resource.
        gpus: how many.
        annotations: without the prefix.
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
"""A few requests that come again and again."""


def distinct(count: int) -> tuple[Wish, ...]:
    """Return so many requests of which no two are alike: each asks for another memory."""
    return tuple(
        Wish(
            gpus=(1, 1, 2, 4, 8)[number % 5], annotations={"gpu-memory": f"{2048 + 64 * number}Mi"}
        )
        for number in range(count)
    )


def create_pod(world: World, wish: Wish) -> tuple[str, bytes]:
    """Create a pod with a wish; return its UID, and the pod as the API server shows it."""
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
    """Return names as `question` takes them."""
    return orjson.dumps(list(nodes))


def question(pod: bytes, names: bytes) -> bytes:
    """Return an ExtenderArgs (nodeCacheCapable: true)."""
    return b'{"Pod":%b,"Nodes":null,"NodeNames":%b}' % (pod, names)
