"""Which pods are alike: what some of them did tells what the next one will do."""

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from extender.core.untyped import mapping_of, objects_of, text_of

MAX_OWNER: Final = 200
MAX_CACHED: Final = 4096

Kin = tuple[str, ...]
"""Keys that pods have in common which are alike, the most alike first: their owner, their images,
their requests; all within one namespace."""


def owner_of(metadata: Mapping[str, object]) -> str:
    """Return kind and name of what controls a pod, "" where nothing does."""
    for owner in objects_of(metadata.get("ownerReferences")):
        if owner.get("controller") is True:
            told = f"{text_of(owner.get('kind'))} {text_of(owner.get('name'))}"
            return told.strip()[:MAX_OWNER]
    return ""


def owner_key(namespace: str, owner: str, name: str) -> str:
    """Return the key of a pod's owner; a pod without one is its own.

    Example:
        >>> owner_key("ns", "Job train", "train-x7k2p"), owner_key("ns", "", "alone")
        ('ns/Job train', 'ns/alone')
    """
    return f"{namespace}/{owner or name}"


def kin_of(pod: Mapping[str, object]) -> Kin:
    """Return the keys of a Pod object.

    Example:
        >>> container = {"image": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        >>> metadata = {"namespace": "ns", "name": "alone"}
        >>> len(kin_of({"metadata": metadata, "spec": {"containers": [container]}}))
        3
    """
    metadata = mapping_of(pod.get("metadata"))
    namespace, name = text_of(metadata.get("namespace")), text_of(metadata.get("name"))
    return owner_key(namespace, owner_of(metadata), name), *likeness_of(pod)


def likeness_of(pod: Mapping[str, object]) -> Kin:
    """Return the keys of a Pod object's images and requests, those that it says anything of."""
    containers = list(objects_of(mapping_of(pod.get("spec")).get("containers")))
    images = [text_of(container.get("image")) for container in containers]
    requests = [
        f"{name}={text_of(amount)}"
        for container in containers
        for kind in ("limits", "requests")
        for name, amount in mapping_of(mapping_of(container.get("resources")).get(kind)).items()
    ]
    namespace = text_of(mapping_of(pod.get("metadata")).get("namespace"))
    return _likeness(namespace, tuple(filter(None, images)), tuple(sorted(set(requests))))


@lru_cache(maxsize=MAX_CACHED)
def _likeness(namespace: str, *what: tuple[str, ...]) -> Kin:
    """Return a key for each list that is not empty; pods of one owner have the same object."""
    named = zip(("images", "requests"), what, strict=True)
    return tuple(f"{namespace} {kind} {_digest(texts)}" for kind, texts in named if texts)


def _digest(texts: tuple[str, ...]) -> str:
    return blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
