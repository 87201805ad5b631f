"""Split JSON objects the way Go does: case-insensitive keys, and null means absent.

Errors name the path in the document, the value, and the allowed values.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from extender.core.request.gpu_resources import MOST_CONTAINERS
from extender.runtime.decoding import MalformedError, decode_with

_T = TypeVar("_T")

RawObject = dict[str, msgspec.Raw]

_FIELDS: Final = msgspec.json.Decoder(RawObject)
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])

SHOWN: Final = 80
"""Bytes of a value that an error message quotes."""


_MOST_FIELDS: Final = 1000
"""Limit for the fields of one object; Kubernetes objects have a few dozen."""


class WireError(ValueError):
    """The request body is malformed: kube-scheduler would not send it."""


def fields_of(body: bytes, what: str) -> RawObject:
    """Split the body at its top-level keys, in lower case.

    Raises:
        WireError: the body is not a JSON object, or not UTF-8. Parts of it are copied into the
            answer unchanged, so invalid UTF-8 must not get through.
    """
    try:
        body.isascii() or body.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"cannot read {what}: $ is not UTF-8: {error}") from error
    return fold(decode(_FIELDS, body, what, "$", "an object"))


def fold(fields: RawObject) -> RawObject:
    """Return the fields with lower-case keys, because Go ignores the case of keys.

    Raises:
        WireError: the object has too many fields.
    """
    if len(fields) > _MOST_FIELDS:
        raise WireError(
            f"cannot read an object of {len(fields)} fields: must be at most {_MOST_FIELDS}"
        )
    return {_fold_key(key): value for key, value in fields.items()}


def _fold_key(key: str) -> str:
    """Return a key in the form in which Go compares keys: lower case.

    Go also matches the long s with s, and the Kelvin sign with k; `str.lower` covers the latter.

    Example:
        >>> _fold_key("NodeName\u017f")
        'nodenames'
    """
    return key.lower().replace("\u017f", "s")


def decode(
    decoder: "msgspec.json.Decoder[_T]",
    value: msgspec.Raw | bytes,
    what: str,
    where: str,
    allowed: str,
) -> _T:
    """Decode one JSON value to the expected type.

    Args:
        decoder: decoder of the expected type.
        value: the encoded value.
        what: name of the document, for the error.
        where: path of the value, for the error.
        allowed: description of the allowed values, for the error.

    Raises:
        WireError: the value is not JSON, or of another type.
    """
    try:
        return decode_with(decoder.decode, value)
    except MalformedError as error:
        # A number that no double holds, somewhere in the value: the type of the value is right.
        is_inside = "out of range" in str(error) and bytes(memoryview(value)[:1]) in b"{["
        if isinstance(error.__cause__, msgspec.ValidationError) and not is_inside:
            raise WireError(unfit(what, where, value, allowed)) from error
        raise WireError(f"cannot read {what}: {where} is not JSON: {error}") from error


def object_of(value: msgspec.Raw | None, what: str, where: str) -> RawObject | None:
    """Return the fields of an object; None if it is absent or null."""
    if value is None or is_null(value):
        return None
    return decode(_FIELDS, value, what, where, "an object or null")


def list_of(value: msgspec.Raw | None, what: str, where: str) -> list[msgspec.Raw]:
    """Return the items of a list; an absent or null list is empty."""
    if value is None or is_null(value):
        return []
    return decode(_ITEMS, value, what, where, "a list or null")


def is_null(value: msgspec.Raw) -> bool:
    """Return whether a value is null, the only JSON value that begins with n."""
    return bytes(memoryview(value)[:1]) == b"n"


def unfit(what: str, where: str, value: msgspec.Raw | bytes, allowed: str) -> str:
    """Return the error message for a value that is not allowed."""
    start = bytes(memoryview(value)[: SHOWN + 1])
    shown = start.decode(errors="replace")
    if start.startswith((b"{", b"[")):
        shown = "an object" if start.startswith(b"{") else "a list"
    elif len(start) > SHOWN:
        shown = f"{shown[:SHOWN]}..."
    return f"cannot read {what}: {where} is {shown}, must be {allowed}"


_Shape = Mapping[str, "_Shape"]
"""Known fields of an object, with the shapes of their values; {} keeps a value unchanged."""

_RESOURCES: Final[_Shape] = {"limits": {}, "requests": {}}
_CONTAINERS: Final[_Shape] = {"resources": _RESOURCES, "restartPolicy": {}}
POD: Final[_Shape] = {
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


def restore_case(value: object, shape: _Shape) -> object:
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
    if len(value) > _MOST_FIELDS:
        raise _too_many(f"an object of {len(value)} fields", _MOST_FIELDS)
    names = {_fold_key(name): name for name in shape}
    restored = {}
    for key, field in value.items():
        name = names.get(_fold_key(key))
        restored[name or key] = restore_case(field, shape[name]) if name else field
    return restored


def _too_many(found: str, most: int) -> WireError:
    return WireError(f"cannot read a pod with {found}: must be at most {most}")
