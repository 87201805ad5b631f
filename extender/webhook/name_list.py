"""Parse and write the list of candidate nodes without decoding thousands of names.

Names are looked up as bytes of the request body, and copied from there into the answer.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.node_names import NamesIn
from extender.core.nodes.snapshot import Rows
from extender.runtime.decoding import MalformedError, decode_with

NAMES: Final = msgspec.json.Decoder(list[str])
_NAMES_KEY: Final = b',"NodeNames":'


def read_names(
    text: bytes, begin: int, end: int, node_index: NodeIndex, most: int
) -> Sequence[str] | None:
    """Return the names of a JSON list, without duplicates; None if it is not a list of strings.

    A list longer than `most` keeps its duplicates, because the caller refuses it.

    Args:
        text: text that contains the list.
        begin: offset of the list's first byte.
        end: offset behind the list.
        node_index: known nodes.
        most: maximum number of nodes in a request.
    """
    found = node_index.find(text, begin, end)
    if found is not None:
        return found
    try:
        names = decode_with(NAMES.decode, memoryview(text)[begin:end])
    except MalformedError:
        return None
    return names if len(names) > most else tuple(dict.fromkeys(names))


def split_names(
    body: bytes, node_index: NodeIndex, most: int
) -> tuple[bytes, Sequence[str] | None]:
    """Split a body that ends with the list of names, as kube-scheduler writes it.

    A JSON parser would scan every name only to skip it. Searching for the key is safe: inside a
    string its quotation marks would be escaped; the part before it must parse as an object once a
    brace is added, so it is a top-level key; and the list must end the body.

    Returns:
        The body without the list, and the names; the whole body and None in any other form.
    """
    at = body.find(_NAMES_KEY)
    if at < 0 or not body.endswith(b"]}"):
        return body, None
    listed = read_names(body, at + len(_NAMES_KEY), len(body) - 1, node_index, most)
    # Without names the body may have whole nodes.
    return (body[:at] + b"}", listed) if listed else (body, None)


def write_names(names: Sequence[str], kept: Rows) -> msgspec.Raw | list[str]:
    """Return the names of the kept candidates, ready for the JSON encoder.

    Args:
        names: the candidates.
        kept: indexes of the names to write, in order, without duplicates.
    """
    if isinstance(names, NamesIn):
        return msgspec.Raw(b"[%b]" % names.pieces.joined(kept))
    return [names[at] for at in kept.tolist()]


def write_reasons(
    names: Sequence[str], reasons: Sequence[tuple[str, Rows]]
) -> msgspec.Raw | dict[str, str]:
    """Return a map from refused node to reason, ready for the JSON encoder.

    Args:
        names: the candidates.
        reasons: each reason with the indexes of its nodes; a node has at most one reason.
    """
    if reasons and isinstance(names, NamesIn):
        parts = []
        for reason, rows in reasons:
            after = b":%b" % msgspec.json.encode(reason)
            # Node names contain no comma.
            parts.append(names.pieces.joined(rows).replace(b",", after + b",") + after)
        return msgspec.Raw(b"{%b}" % b",".join(parts))
    return {names[at]: reason for reason, rows in reasons for at in rows.tolist()}


def write_scores(names: NamesIn, scores: Sequence[int]) -> bytes:
    """Encode the names with their scores as a HostPriorityList."""
    between = {score: b',"Score":%d},{"Host":' % score for score in set(scores)}
    parts = [b""] * (2 * len(scores))
    parts[0::2] = names.pieces.split()
    parts[1::2] = map(between.__getitem__, scores)
    parts[-1] = b',"Score":%d}]' % scores[-1]
    return b'[{"Host":' + b"".join(parts)
