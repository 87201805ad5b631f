"""Join filter and prioritize of one scheduling attempt if two replicas answered them.

kube-scheduler may call one replica for filter and another for prioritize. The first one then has
the reasons of the rejected nodes, the second one the ranking of the others.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec

from extender.answers.pods import NodeReport, Other
from extender.core.steps import Steps
from extender.core.untyped import mapping_of, text_of
from extender.insight.explain_node import in_short_or_full
from extender.insight.explain_views import kept_view
from extender.insight.views import PIECE_SHORT, PIECE_VERDICTS, Json
from extender.placement.history import DecisionRecord
from extender.runtime.decoding import MalformedError, decode_with
from extender.server.json_api import QueryError

_ATTEMPT_SECONDS: Final = 5.0
"""Longest time between filter and prioritize of one attempt."""
_CLOCKS_SECONDS: Final = 1.0
"""Tolerated difference between two replicas' clocks."""

_LONG: Final = frozenset({"nodes", "others"})
"""Fields with thousands of nodes, which are forwarded to the caller without being decoded."""
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])


class _Node(msgspec.Struct, frozen=True):
    """Fields of a node that the join needs."""

    node: str
    score: float
    rejection: str | None


class _Counts(msgspec.Struct, frozen=True):
    """Fields of a decision that the join needs."""

    candidates: int
    feasible: int


_NODE: Final = msgspec.json.Decoder(_Node)


def read_explanation(body: bytes | None) -> Json:
    """Decode another replica's explanation; empty if it is malformed. Long fields stay encoded."""
    try:
        return decode_with(_decode, body or b"{}")
    except MalformedError:
        return {}


def _decode(body: bytes) -> Json:
    fields = _FIELDS.decode(body)
    return {
        name: raw if name in _LONG else msgspec.json.decode(raw) for name, raw in fields.items()
    }


def decided_at(view: Mapping[str, object]) -> float:
    """Return the time of an explanation's decision, 0 if it is missing."""
    try:
        return datetime.fromisoformat(
            text_of(mapping_of(view.get("decision")).get("at"))
        ).timestamp()
    except ValueError:
        return 0.0


def filter_before(
    history: Iterable[DecisionRecord], decided: DecisionRecord
) -> DecisionRecord | None:
    """Return the filter decision of the same attempt, None if it is not remembered.

    Args:
        history: decisions of one replica, newest first.
        decided: one of these decisions.
    """
    if decided.verb == "filter":
        return None
    for record in history:
        if record.pod.uid == decided.pod.uid and record.number < decided.number:
            is_same = decided.at - record.at < _ATTEMPT_SECONDS and record.verb == "filter"
            return record if is_same else None
    return None


def filter_near(history: Iterable[DecisionRecord], uid: str, at: float) -> DecisionRecord | None:
    """Return the filter decision shortly before another replica's ranking, None if there is none.

    Args:
        history: decisions of one replica, newest first.
        uid: the pod's UID.
        at: time of the ranking, seconds since the epoch.
    """
    for record in history:
        is_same = -_CLOCKS_SECONDS < at - record.at < _ATTEMPT_SECONDS
        if record.pod.uid == uid and record.verb == "filter" and is_same:
            return record
    return None


def read_attempt(query: Mapping[str, str]) -> float:
    """Parse the time of the attempt that another replica asks for, 0 for none.

    Raises:
        QueryError: the value is not a time.
    """
    text = query.get("attempt", "0")
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text):
        raise QueryError("attempt", text, "must be seconds since the epoch")
    return float(text)


def lacks_filter(view: Mapping[str, object]) -> bool:
    """Check whether an explanation has a ranking without its filter decision."""
    verb = mapping_of(view.get("decision")).get("verb")
    return verb == "prioritize" and view.get("filter") is None


def joined_in_steps(ranked: Json, filtered: Json, limit: int) -> Steps[Json]:
    """Add a filter decision's rejected nodes to the explanation of a ranking.

    Args:
        ranked: explanation from the replica that was called for prioritize.
        filtered: explanation of the same attempt from the replica that was called for filter.
        limit: largest number of nodes without full detail.

    Returns:
        The joined explanation; `ranked` unchanged if `filtered` is malformed.
    """
    try:
        return (yield from _join(ranked, filtered, limit))
    except (msgspec.MsgspecError, KeyError):
        return ranked


def _join(ranked: Json, filtered: Json, limit: int) -> Steps[Json]:
    counts = msgspec.convert(filtered["decision"], _Counts)
    nodes = yield from _items(ranked["nodes"])
    in_full = {one.node for one, _ in nodes}
    # Nodes that passed filter have a better record in the ranking: keep only their score.
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
    raw = filtered.get("requested_node")
    node_report = msgspec.convert(raw, NodeReport) if raw is not None else None
    return ranked | {
        "filter": filtered["decision"],
        "kept": kept_view(counts.candidates, len(names)),
        "nodes": [item for _, item in nodes],
        "others": [Other(node=name, score=passed[name]) for name in shown],
        "others_left": max(counts.feasible - ranked_in_full - len(shown), 0),
        "rejected": filtered["rejected"],
        "requested_node": in_short_or_full(node_report, names, counts.feasible)
        if node_report
        else None,
    }


def _items(listed: object) -> Steps[list[tuple[_Node, object]]]:
    """Decode the nodes of a list; keep each node's full record encoded."""
    found: list[tuple[_Node, object]] = []
    if isinstance(listed, list):
        for start in range(0, len(listed), PIECE_SHORT):
            yield
            found += (
                (msgspec.convert(item, _Node, from_attributes=True), item)
                for item in listed[start : start + PIECE_SHORT]
            )
        return found
    raws = _ITEMS.decode(listed) if isinstance(listed, msgspec.Raw) else []
    for start in range(0, len(raws), PIECE_VERDICTS):
        yield
        found += ((_NODE.decode(raw), raw.copy()) for raw in raws[start : start + PIECE_VERDICTS])
    return found
