"""Decode bytes from outside the process: every failure is one typed error."""

from collections.abc import Callable
from typing import TypeVar

Content = TypeVar("Content")
Value = TypeVar("Value")

MOST_SHOWN: int = 300
"""Characters of a decoder's message that are kept: some quote the content."""


class MalformedError(ValueError):
    """The content cannot be decoded. The decoder's own error is the cause."""


def decode_with(decoder: Callable[[Content], Value], content: Content) -> Value:
    """Decode content from another process.

    Args:
        decoder: decodes the content, and may raise anything.
        content: what another process sent.

    Raises:
        MalformedError: the decoder failed, in whichever way.

    Example:
        >>> decode_with(float, "1.5")
        1.5
        >>> decode_with(float, "[" * 3)
        Traceback (most recent call last):
        extender.decoding.MalformedError: could not convert string to float: '[[['
    """
    try:
        return decoder(content)
    except RecursionError as error:
        raise MalformedError("nested too deeply") from error
    # Decoders have no common base class: msgspec.DecodeError is no ValueError, yaml raises
    # KeyError for some tags, and no list of ours would stay complete.
    except Exception as error:
        raise MalformedError(str(error)[:MOST_SHOWN] or type(error).__name__) from error
