"""Restore the case of a Pod's field names, because Go accepts field names in any case."""

from collections.abc import Mapping
from typing import Final

from extender.core.request.gpu_resources import MOST_CONTAINERS
from extender.webhook.go_json import MOST_FIELDS, WireError, fold_key

Shape = Mapping[str, "Shape"]
"""Known fields of an object, with the shapes of their values; {} keeps a value unchanged."""

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
"""Fields from which the GPU request is parsed. Annotation and resource names keep their case."""


def restore_case(value: object, shape: Shape) -> object:
    """Return decoded JSON in which the fields of `shape` have exactly the names of `shape`.

    Raises:
        WireError: an object has too many fields, or a list (of containers, say) too many items.

    Example:
        >>> restore_case({"Metadata": {"UID": "1", "Labels": {}}}, POD)
        {'metadata': {'uid': '1', 'Labels': {}}}
    """
    if not shape:
        return value
    if isinstance(value, list):
        if len(value) > MOST_CONTAINERS:
            raise _too_many(f"a list of {len(value)} items", MOST_CONTAINERS)
        # No field is a list of lists, so the recursion is no deeper than the shape.
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
