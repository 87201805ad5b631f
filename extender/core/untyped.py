"""Narrow decoded JSON to a type; a value of another type counts as absent."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})

_MOST_DIGITS: Final = 18
"""More digits may not fit 64 bits."""


def mapping_of(value: object) -> Mapping[str, object]:
    """Return a JSON object, or an empty one for any other type.

    Example:
        >>> dict(mapping_of({"a": 1})), dict(mapping_of(None))
        ({'a': 1}, {})
    """
    return value if isinstance(value, dict) else _NOTHING


def items_of(value: object) -> Sequence[object]:
    """Return a JSON list, or an empty one for any other type.

    Example:
        >>> list(items_of([1])), list(items_of("abc"))
        ([1], [])
    """
    return value if isinstance(value, list) else ()


def objects_of(value: object) -> Sequence[Mapping[str, object]]:
    """Return the objects in a JSON list, without items of other types.

    Example:
        >>> objects_of([{"a": 1}, None])
        [{'a': 1}]
    """
    return [item for item in items_of(value) if isinstance(item, dict)]


def text_of(value: object) -> str:
    """Return a JSON string, or "" for any other type.

    Example:
        >>> text_of("a"), text_of(7)
        ('a', '')
    """
    return value if isinstance(value, str) else ""


def int_of(value: object) -> int:
    """Return a JSON integer that fits 64 bits, or 0 for anything else.

    Example:
        >>> int_of(7), int_of("7"), int_of(1 << 63), int_of(-(1 << 63) - 1)
        (7, 0, 0, 0)
        >>> int_of((1 << 63) - 1) + 1 == -int_of(-(1 << 63)) == 1 << 63
        True
    """
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else 0


def number_of(text: str) -> int | None:
    """Return the whole number that a text consists of, or None for any other text.

    `int` raises an error for thousands of digits, and for some characters that `isdigit` accepts.

    Example:
        >>> number_of("7"), number_of("-7"), number_of("\u00b2"), number_of("9" * 5000)
        (7, None, None, None)
    """
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else None
