"""Restores the case of a Pod's field names: Go matches them in any case, and so do we."""

from collections.abc import Mapping
from typing import Final

from extender.core.request.gpu_resources import MOST_CONTAINERS
from extender.webhook.go_json import MOST_FIELDS, WireError, fold_key

Shape = Mapping[str, "Shape"]
"""The fields of an object by name, with the shape of their values; {} is left as it is."""

_RESOURCES: Final[Shape] = {"limits": {}, "requests": {}}
_CONTAINERS: Final[Shape] = {"resources": _RESOURCES, "restartPolicy": {}}
POD: Final[Shape] = {
    "metadata": {"uid": {}, "namespace": {}, "name": {}, "annotations": {}},
    "spec": {
        "containers": _CONTAINERS,
        "initContainers": _CONTAINERS,
        "resources": _RESOURCES,
        "overhead": {},
        "resourceClaims": {"name": {}},
    },
    "status": {
        "nominatedNodeName": {},
        "resourceClaimStatuses": {"name": {}, "resourceClaimName": {}},
        "extendedResourceClaimStatus": {},
        "conditions": {"type": {}, "status": {}, "reason": {}, "message": {}},
    },
}
"""What the request is read from; names of annotations and resources keep their case."""


def restore_case(value: object, shape: Shape) -> object:
    """Return decoded JSON with the fields that `shape` names under those very names.

    Raises:
        WireError: an object has too many fields, or a list too many items, as one of containers.

    Example:
        >>> restore_case({"Metadata": {"UID": "1", "Labels": {}}}, POD)
        {'metadata': {'uid': '1', 'Labels': {}}}
    """
    if not shape:
        return value
    if isinstance(value, list):
        if len(value) > MOST_CONTAINERS:
            raise _too_many(f"a list of {len(value)} items", MOST_CONTAINERS)
        # No field is a list of lists, so that the recursion ends where the shape does.
        return [restore_case(item, shape) if isinstance(item, dict) else item for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) > MOST_FIELDS:
        raise _too_many(f"an object of {len(value)} fields", MOST_FIELDS)
    names = {fold_key(name): name for name in shape}
    restored = {}
    for key, field in value.items():
        name = names.get(fold_key(key))
        restored[name or key] = restore_case(field, shape[name]) if name else field
    return restored


def _too_many(found: str, most: int) -> WireError:
    return WireError(f"cannot read a pod with {found}: must be at most {most}")
