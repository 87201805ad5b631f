"""The list of candidates in a question: thousands of names, found where they stand."""

from collections.abc import Sequence
from typing import Final

import msgspec

from extender.core.names import Roll

NAMES: Final = msgspec.json.Decoder(list[str])
NAMES_KEY: Final = b',"NodeNames":'


def read_names(text: bytes, begin: int, end: int, roll: Roll) -> Sequence[str] | None:
    """Return the names of a JSON list in a text, each once; None where it is no list of strings.

    Args:
        text: has the list in it.
        begin: where the list begins.
        end: where the list ends.
        roll: has most of the nodes that may be named.
    """
    found = roll.find(text, begin, end)
    if found is not None:
        return found
    try:
        return tuple(dict.fromkeys(NAMES.decode(memoryview(text)[begin:end])))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def split_names(body: bytes, roll: Roll) -> tuple[bytes, Sequence[str] | None]:
    """Split the list of names off a question that ends with it, as kube-scheduler writes it.

    A parser would look at each of thousands of names only to pass over them. The key cannot stand
    inside a string, where its quotation marks would be escaped; if what is before it and one brace
    are an object, it is a key of the question itself; and one list of strings ends the question.
    """
    at = body.find(NAMES_KEY)
    if at < 0 or not body.endswith(b"]}"):
        return body, None
    listed = read_names(body, at + len(NAMES_KEY), len(body) - 1, roll)
    # Where no names are sent, whole nodes may be.
    return (body[:at] + b"}", listed) if listed else (body, None)
