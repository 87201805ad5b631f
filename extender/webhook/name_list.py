"""The list of candidates in a question: thousands of names, found where they stand.

What an answer says of them is cut out of the question: no name is read, and none written anew.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.node_names import NamesIn
from extender.core.nodes.snapshot import Rows
from extender.runtime.decoding import MalformedError, decode_with

NAMES: Final = msgspec.json.Decoder(list[str])
NAMES_KEY: Final = b',"NodeNames":'


def read_names(
    text: bytes, begin: int, end: int, node_index: NodeIndex, most: int
) -> Sequence[str] | None:
    """Return the names of a JSON list in a text, each once; None where it is no list of strings.

    Of a list of more than may be asked about a name may be there twice.

    Args:
        text: has the list in it.
        begin: where the list begins.
        end: where the list ends.
        node_index: has most of the nodes that may be named.
        most: so many may be asked about.
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
    """Split the list of names off a question that ends with it, as kube-scheduler writes it.

    A parser would look at each of thousands of names only to pass over them. The key cannot stand
    inside a string, where its quotation marks would be escaped; if what is before it and one brace
    are an object, it is a key of the question itself; and one list of strings ends the question.
    """
    at = body.find(NAMES_KEY)
    if at < 0 or not body.endswith(b"]}"):
        return body, None
    listed = read_names(body, at + len(NAMES_KEY), len(body) - 1, node_index, most)
    # Where no names are sent, whole nodes may be.
    return (body[:at] + b"}", listed) if listed else (body, None)


def write_names(names: Sequence[str], kept: Rows) -> msgspec.Raw | list[str]:
    """Return some of the names of a question as an encoder takes them.

    Args:
        names: the candidates.
        kept: their indexes, in order and each at most once.
    """
    if isinstance(names, NamesIn):
        return msgspec.Raw(b"[%b]" % names.pieces.joined(kept))
    return [names[at] for at in kept.tolist()]


def write_reasons(
    names: Sequence[str], reasons: Sequence[tuple[str, Rows]]
) -> msgspec.Raw | dict[str, str]:
    """Return names of a question with what is against each as an encoder takes them.

    Args:
        names: the candidates.
        reasons: each with the indexes of those that it is against; a name has one at most.
    """
    if reasons and isinstance(names, NamesIn):
        parts = []
        for reason, rows in reasons:
            after = b":%b" % msgspec.json.encode(reason)
            # None of them has a comma in it.
            parts.append(names.pieces.joined(rows).replace(b",", after + b",") + after)
        return msgspec.Raw(b"{%b}" % b",".join(parts))
    return {names[at]: reason for reason, rows in reasons for at in rows.tolist()}


def write_scores(names: NamesIn, scores: Sequence[int]) -> bytes:
    """Return names of a question, each with its score, as a HostPriorityList."""
    between = {score: b',"Score":%d},{"Host":' % score for score in set(scores)}
    parts = [b""] * (2 * len(scores))
    parts[0::2] = names.pieces.split()
    parts[1::2] = map(between.__getitem__, scores)
    parts[-1] = b',"Score":%d}]' % scores[-1]
    return b'[{"Host":' + b"".join(parts)
