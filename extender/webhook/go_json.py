"""Splits JSON as Go reads it: keys in any case, null for what is absent, nothing read twice.

Errors name the place in the document, what stands there and what may.
"""

from typing import Final, TypeVar

import msgspec

from extender.runtime.decoding import MalformedError, decode_with

T = TypeVar("T")

RawObject = dict[str, msgspec.Raw]

_FIELDS: Final = msgspec.json.Decoder(RawObject)
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])

SHOWN: Final = 80
"""So many bytes of a value are enough to recognize it, and too few to flood a log."""


MOST_FIELDS: Final = 1000
"""Of an object whose fields are read one by one: Kubernetes' have a few dozen."""


class WireError(ValueError):
    """The question is not one that kube-scheduler would ask."""


def fields_of(body: bytes, what: str) -> RawObject:
    """Split the body at its top-level keys, folded.

    Raises:
        WireError: it is no object, or no UTF-8: parts of it are answered as they came.
    """
    try:
        body.isascii() or body.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"cannot read {what}: $ is not UTF-8: {error}") from error
    return fold(decode(_FIELDS, body, what, "$", "an object"))


def fold(fields: RawObject) -> RawObject:
    """Return the fields with lower-case keys: Go matches them without regard to case.

    Raises:
        WireError: there are too many.
    """
    if len(fields) > MOST_FIELDS:
        raise WireError(
            f"cannot read an object of {len(fields)} fields: must be at most {MOST_FIELDS}"
        )
    return {fold_key(key): value for key, value in fields.items()}


def fold_key(key: str) -> str:
    """Return a key in lower case: two keys are one field to Go where this is the same.

    Go takes the long s for an s, and the Kelvin sign for a k, as Python's lower() does.

    Example:
        >>> fold_key("NodeName\u017f")
        'nodenames'
    """
    return key.lower().replace("\u017f", "s")


def decode(
    decoder: "msgspec.json.Decoder[T]",
    value: msgspec.Raw | bytes,
    what: str,
    where: str,
    allowed: str,
) -> T:
    """Decode one value.

    Raises:
        WireError: it is not JSON, or not what is allowed there.
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
    """Return the fields of an object; None where it is absent or null."""
    if value is None or is_null(value):
        return None
    return decode(_FIELDS, value, what, where, "an object or null")


def list_of(value: msgspec.Raw | None, what: str, where: str) -> list[msgspec.Raw]:
    """Return the items of a list; absent and null are empty."""
    if value is None or is_null(value):
        return []
    return decode(_ITEMS, value, what, where, "a list or null")


def is_null(value: msgspec.Raw) -> bool:
    """Whether a value is null: no other begins with an n."""
    return bytes(memoryview(value)[:1]) == b"n"


def unfit(what: str, where: str, value: msgspec.Raw | bytes, allowed: str) -> str:
    """Return the message for a value that is not allowed."""
    start = bytes(memoryview(value)[: SHOWN + 1])
    shown = start.decode(errors="replace")
    if start.startswith((b"{", b"[")):
        shown = "an object" if start.startswith(b"{") else "a list"
    elif len(start) > SHOWN:
        shown = f"{shown[:SHOWN]}..."
    return f"cannot read {what}: {where} is {shown}, must be {allowed}"
