"""Decode bytes from outside the process; every failure is a `MalformedError`."""

import re
from collections.abc import Callable
from typing import Final, TypeVar

Content = TypeVar("Content")
Value = TypeVar("Value")

_MOST_SHOWN: Final = 300
"""Characters of a decoder's message that are kept, because some decoders quote the content."""

_MOST_DEPTH: Final = 128
"""Maximum nesting depth. Kubernetes objects nest about twenty levels deep; a DRA driver's
parameters may nest deeper."""

_MOST_VALUES: Final = 200_000
_VALUE_BYTES: Final = 24
"""A body may have this many values, plus one for each `_VALUE_BYTES`. The time for decoding grows
with the values. Kubernetes' own JSON has at least 28 bytes for each."""

_TOKENS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


class MalformedError(ValueError):
    """The content cannot be decoded. The decoder's own error is the cause."""


def decode_with(decoder: Callable[[Content], Value], content: Content) -> Value:
    """Decode content from another process.

    Args:
        decoder: decodes the content, and may raise anything.
        content: data from another process.

    Raises:
        MalformedError: the decoder raised any exception.

    Example:
        >>> decode_with(float, "1.5")
        1.5
        >>> decode_with(float, "[" * 3)
        Traceback (most recent call last):
        extender.runtime.decoding.MalformedError: could not convert string to float: '[[['
    """
    try:
        return decoder(content)
    except RecursionError as error:
        raise MalformedError("nested too deeply") from error
    # The libraries' exceptions share no base class: msgspec.DecodeError is not a ValueError, and
    # yaml raises KeyError for some tags.
    except Exception as error:
        raise MalformedError(str(error)[:_MOST_SHOWN] or type(error).__name__) from error


def excess_values(content: bytes) -> str:
    """Return a message if JSON has too many values to decode, else "".

    Commas approximate the number of values, so that nothing is decoded to count them.

    Example:
        >>> excess_values(b"[" + b"0," * 300_000 + b"0]")
        '300000 commas, must be at most 225000'
    """
    if len(content) <= _MOST_VALUES:
        return ""
    values, most = content.count(b","), _MOST_VALUES + len(content) // _VALUE_BYTES
    return f"{values} commas, must be at most {most}" if values > most else ""


_ESCAPES: Final = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
    rb"|(?P<lone>\\u[dD][89a-fA-F][\da-fA-F]{2})|\\."
)


def paired_json(content: bytes) -> bytes:
    r"""Replace each unpaired surrogate in JSON with the replacement character.

    A decoder rejects the whole content for one unpaired surrogate. Go replaces it in the same way.

    Example:
        >>> paired_json(rb'"\ud83d \ud83d\ude00 \\ud83d"')
        b'"\\ufffd \\ud83d\\ude00 \\\\ud83d"'
    """
    return _ESCAPES.sub(lambda found: rb"\ufffd" if found["lone"] else found[0], content)


def shallow_json(content: bytes) -> bytes:
    """Return JSON in which each value that nests deeper than `_MOST_DEPTH` is null.

    A decoder refuses the whole content when one value nests too deeply. This function is about a
    hundred times slower than a decoder, so call it only after a decoder has refused the content.

    Example:
        >>> shallow_json(b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}").count(b"["), _MOST_DEPTH
        (127, 128)
    """
    parts: list[bytes] = []
    depth = copied_to = 0
    for token in _TOKENS.finditer(content):
        kind = token[0][:1]
        if kind in b"[{":
            if depth == _MOST_DEPTH:
                parts.append(content[copied_to : token.start()] + b"null")
            depth += 1
        elif kind in b"]}":
            depth -= 1
            if depth == _MOST_DEPTH:
                copied_to = token.end()
    return b"".join(parts) + content[copied_to:]
