"""What replicas tell of decisions, and one attempt of which two replicas know a half each.

kube-scheduler may ask one replica for filter and another for prioritize: then the one has why nodes
were refused, and the other how the rest was ranked.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec
import orjson

from extender.core.steps import Steps
from extender.core.untyped import mapping_of, text_of
from extender.decoding import MalformedError, decode_with
from extender.observe.explain_node import NodeTold, in_short_or_full
from extender.observe.explain_views import kept_view
from extender.observe.parameters import QueryError
from extender.observe.views import PIECE_SHORT, PIECE_VERDICTS, Json
from extender.placement.history import DecisionRecord

ATTEMPT_SECONDS: Final = 5.0
"""Filter and prioritize of one attempt are asked so close together."""
CLOCKS_SECONDS: Final = 1.0
"""The clocks of two replicas may differ by so much."""

_LONG: Final = frozenset({"nodes", "others"})
"""What is told of thousands of nodes, and goes from another replica to the caller unread."""
_TOLD: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])


class _Node(msgspec.Struct, frozen=True):
    """What is read of a node, whatever else is told of it."""

    node: str
    score: float
    rejection: str | None


class _Counts(msgspec.Struct, frozen=True):
    """What is read of a decision."""

    candidates: int
    feasible: int


_NODE: Final = msgspec.json.Decoder(_Node)


def read_told(body: bytes | None) -> Json:
    """Return what another replica told, empty where it is nothing that can be read.

    What it says of thousands of nodes goes to the caller as it is.
    """
    try:
        return decode_with(_read_told, body or b"{}")
    except MalformedError:
        return {}


def _read_told(body: bytes) -> Json:
    told = _TOLD.decode(body)
    return {name: raw if name in _LONG else msgspec.json.decode(raw) for name, raw in told.items()}


def decided_at(view: Mapping[str, object]) -> float:
    """Return when what another replica told was decided, 0 where it does not say."""
    try:
        return datetime.fromisoformat(
            text_of(mapping_of(view.get("decision")).get("at"))
        ).timestamp()
    except ValueError:
        return 0.0


def filter_before(
    history: Iterable[DecisionRecord], decided: DecisionRecord
) -> DecisionRecord | None:
    """Return what filter said in the same attempt, None where that is not remembered.

    Args:
        history: decisions of one replica, the newest first.
        decided: one of them.
    """
    if decided.verb == "filter":
        return None
    for record in history:
        if record.pod.uid == decided.pod.uid and record.number < decided.number:
            is_same = decided.at - record.at < ATTEMPT_SECONDS and record.verb == "filter"
            return record if is_same else None
    return None


def filter_near(history: Iterable[DecisionRecord], uid: str, at: float) -> DecisionRecord | None:
    """Return what filter said of a pod shortly before another replica ranked, None for nothing.

    Args:
        history: decisions of one replica, the newest first.
        uid: the pod's.
        at: when the other ranked, seconds since the epoch.
    """
    for record in history:
        is_same = -CLOCKS_SECONDS < at - record.at < ATTEMPT_SECONDS
        if record.pod.uid == uid and record.verb == "filter" and is_same:
            return record
    return None


def read_attempt(query: Mapping[str, str]) -> float:
    """Return when the attempt was that another replica asks about, 0 for none.

    Raises:
        QueryError: it is no time.
    """
    text = query.get("attempt", "0")
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text):
        raise QueryError("attempt", text, "must be seconds since the epoch")
    return float(text)


def lacks_filter(view: Mapping[str, object]) -> bool:
    """Whether an explanation is of a ranking alone: who ranked was not asked what would do."""
    verb = mapping_of(view.get("decision")).get("verb")
    return verb == "prioritize" and view.get("filter") is None


def joined_in_steps(ranked: Json, filtered: Json, limit: int) -> Steps[Json]:
    """Return a ranking's explanation with what filter knew of the nodes left out of it.

    Args:
        ranked: the explanation by who was asked to prioritize.
        filtered: that by who was asked to filter, in the same attempt.
        limit: so many of the nodes that are not known in full.

    Returns:
        `ranked` as it is where the other cannot be read.
    """
    try:
        return (yield from _join(ranked, filtered, limit))
    except (msgspec.MsgspecError, KeyError):
        return ranked


def _join(ranked: Json, filtered: Json, limit: int) -> Steps[Json]:
    counts = msgspec.convert(filtered["decision"], _Counts)
    nodes = yield from _items(ranked["nodes"])
    in_full = {one.node for one, _ in nodes}
    # Those that passed as well were ranked better here, and are short there.
    passed: dict[str, float] = {}
    for one, item in (yield from _items(filtered["nodes"])):
        if one.node in in_full:
            continue
        if one.rejection:
            nodes.append((one, item))
        else:
            passed[one.node] = min(one.score, passed.get(one.node, one.score))
    for one, _ in (yield from _items(filtered["others"])):
        if one.node not in in_full:
            passed[one.node] = one.score
    shown = sorted(passed, key=lambda name: -passed[name])[:limit]
    ranked_in_full = len({one.node for one, _ in nodes if not one.rejection})
    names = {one.node for one, _ in nodes}
    asked = filtered.get("asked_node")
    told = msgspec.convert(asked, NodeTold) if asked is not None else None
    return ranked | {
        "filter": filtered["decision"],
        "kept": kept_view(counts.candidates, len(names)),
        "nodes": [item for _, item in nodes],
        "others": [{"node": name, "score": passed[name], "rejection": None} for name in shown],
        "others_left": max(counts.feasible - ranked_in_full - len(shown), 0),
        "rejected": filtered["rejected"],
        "asked_node": in_short_or_full(told, names, counts.feasible) if told else None,
    }


def _items(listed: object) -> Steps[list[tuple[_Node, object]]]:
    """Return the nodes of a list, each with the whole of what is told of it, as it is written."""
    found: list[tuple[_Node, object]] = []
    if isinstance(listed, list):
        for start in range(0, len(listed), PIECE_SHORT):
            yield
            found += (
                (msgspec.convert(item, _Node), item) for item in listed[start : start + PIECE_SHORT]
            )
        return found
    raws = _ITEMS.decode(listed) if isinstance(listed, msgspec.Raw) else []
    for start in range(0, len(raws), PIECE_VERDICTS):
        yield
        found += (
            (_NODE.decode(raw), orjson.Fragment(bytes(raw)))
            for raw in raws[start : start + PIECE_VERDICTS]
        )
    return found
