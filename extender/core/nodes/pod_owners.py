"""Identify similar pods: measurements and failures of some predict the behavior of the next."""

import re
from calendar import timegm
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from extender.core.untyped import mapping_of, objects_of, text_of

_MAX_OWNER: Final = 200
_MAX_CACHED: Final = 4096
_MAX_NAMESPACE: Final = 63

_TEMPLATE_HASH_LABEL: Final = "pod-template-hash"
"""Label of a Deployment's pods. A ReplicaSet's name is the Deployment's name and this label's
value."""

_OWNER_NAME_LABELS: Final[Mapping[str, tuple[str, str]]] = {
    "Job": ("jobset.sigs.k8s.io/jobset-name", "JobSet"),
    "StatefulSet": ("leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet"),
}
"""By a controller's kind: the pod label with the name of the controller's owner, and the owner's
kind."""

_MAX_RUN_DAYS: Final = 31
"""Maximum time between a CronJob's scheduled time and its pod's creation. A Job whose name ends in
an older time has another origin: users often put dates into names."""

_MINUTES: Final = re.compile(r"[0-9]{8}")
"""Minutes since the epoch, from 1989 to 2160."""

_TIME: Final = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):")

_SERIES: Final = re.compile(r"-(?:[bcdfghjklmnpqrstvwxz2456789]{5}|[0-9]{1,10})\Z")
"""End of a pod's name in a series: the API server's addition to a `generateName` with a hyphen at
its end, or a number."""

_LIKENESS: Final = ("images", "requests")
"""Properties that make pods similar besides their owner, the most specific first."""

Kin = tuple[str, ...]
"""Keys that similar pods share, the most specific first: their owner, images and requests, each
within one namespace."""


def owner_of(metadata: Mapping[str, object]) -> str:
    """Return kind and name of a pod's controller, "" without one.

    A Deployment creates a ReplicaSet per revision, and a CronJob a Job per run. The result is the
    Deployment or the CronJob if the controller's name proves it.

    Example:
        >>> owner = {"controller": True, "kind": "ReplicaSet", "name": "serve-5d8f9c"}
        >>> owner_of({"ownerReferences": [owner], "labels": {"pod-template-hash": "5d8f9c"}})
        'Deployment serve'
    """
    for owner in objects_of(metadata.get("ownerReferences")):
        if owner.get("controller") is True:
            kind, name = text_of(owner.get("kind")), text_of(owner.get("name"))
            found = _maker_of(kind, name, metadata) or f"{kind} {name}"
            return found.strip()[:_MAX_OWNER]
    return ""


def _maker_of(kind: str, name: str, metadata: Mapping[str, object]) -> str:
    """Return kind and name of the controller's own owner, "" if uncertain."""
    labels = mapping_of(metadata.get("labels"))
    base, _, suffix = name.rpartition("-")
    if kind == "ReplicaSet" and base and suffix and suffix == labels.get(_TEMPLATE_HASH_LABEL):
        return f"Deployment {base}"
    label, maker_kind = _OWNER_NAME_LABELS.get(kind, ("", ""))
    maker = text_of(labels.get(label))
    if maker and f"{name}-".startswith(f"{maker}-"):
        return f"{maker_kind} {maker}"
    if kind == "Job" and base and _is_of_schedule(suffix, metadata):
        return f"CronJob {base}"
    return ""


def _is_of_schedule(suffix: str, metadata: Mapping[str, object]) -> bool:
    """Return whether a Job's name ends in the scheduled time of its CronJob."""
    if not _MINUTES.fullmatch(suffix):
        return False
    created = _TIME.match(text_of(metadata.get("creationTimestamp")))
    if created is None:
        return False
    try:
        created_at = timegm((*map(int, created.groups()), 0))
    except ValueError:  # no such day
        return False
    return 0 <= created_at // 60 - int(suffix) <= _MAX_RUN_DAYS * 24 * 60


def owner_key(namespace: str, owner: str, name: str) -> str:
    """Return the key of a pod's owner, or of the pod itself without an owner.

    Pods without an owner are one series, with one key, if their names come from one `generateName`
    or differ only in the number at their end.

    Example:
        >>> owner_key("ns", "Job train", "train-x7k2p"), owner_key("ns", "", "alone")
        ('ns/Job train', 'ns/alone')
        >>> owner_key("ns", "", "sweep-x7k2p"), owner_key("ns", "", "sweep-12")
        ('ns/sweep-', 'ns/sweep-')
    """
    if owner:
        return f"{namespace}/{owner}"
    return f"{namespace}/{_SERIES.sub('-', name)}"


def kin_of(pod: Mapping[str, object]) -> Kin:
    """Return the keys of a Pod object: owner, images and requests.

    Example:
        >>> container = {"image": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        >>> metadata = {"namespace": "ns", "name": "alone"}
        >>> len(kin_of({"metadata": metadata, "spec": {"containers": [container]}}))
        3
    """
    metadata = mapping_of(pod.get("metadata"))
    namespace, name = text_of(metadata.get("namespace")), text_of(metadata.get("name"))
    return owner_key(namespace, owner_of(metadata), name), *likeness_of(pod)


def similarity_of(key: str) -> str:
    """Return the common property of pods with a key: owner, images or requests.

    Example:
        >>> similarity_of("ns/Job train"), similarity_of("ns images 5d8f9c")
        ('owner', 'images')
    """
    return next((kind for kind in _LIKENESS if f" {kind} " in key), "owner")


def likeness_of(pod: Mapping[str, object]) -> Kin:
    """Return the keys of a Pod object's images and requests, without empty ones."""
    containers = list(objects_of(mapping_of(pod.get("spec")).get("containers")))
    images = [text_of(container.get("image")) for container in containers]
    requests = [
        f"{name}={text_of(amount)}"
        for container in containers
        for kind in ("limits", "requests")
        for name, amount in mapping_of(mapping_of(container.get("resources")).get(kind)).items()
    ]
    namespace = text_of(mapping_of(pod.get("metadata")).get("namespace"))
    digests = _digest([text for text in images if text]), _digest(sorted(set(requests)))
    return _likeness(namespace[:_MAX_NAMESPACE], *digests)


@lru_cache(maxsize=_MAX_CACHED)
def _likeness(namespace: str, *digests: str) -> Kin:
    """Return a key per non-empty digest; cached, so that similar pods share one object.

    The cache keeps its arguments, so they must be short for any pod that a caller sends.
    """
    named = zip(_LIKENESS, digests, strict=True)
    return tuple(f"{namespace} {kind} {digest}" for kind, digest in named if digest)


def _digest(texts: Sequence[str]) -> str:
    """Return a short digest of a list, "" if it is empty."""
    if not texts:
        return ""
    text = "\n".join(texts).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).hexdigest()
