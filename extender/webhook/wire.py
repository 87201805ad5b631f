"""Decode and encode kube-scheduler's extender/v1 JSON; Go's field names occur only here.

Whole Node objects are never decoded: each is copied into the answer byte for byte.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np

from extender.core.decision.decision import Decision
from extender.core.decision.filtering import SIGNATURE, Code, Rejection
from extender.core.decision.scoring import UNITS
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.node_index import EMPTY_NODE_INDEX, NodeIndex
from extender.core.nodes.node_names import NamesIn
from extender.core.nodes.snapshot import Rows
from extender.core.request.gpu_resources import excess_of
from extender.core.request.request import PodRef, parse_pod_ref
from extender.core.untyped import mapping_of
from extender.runtime.decoding import MalformedError, decode_with, excess_values
from extender.webhook.go_json import (
    POD,
    SHOWN,
    RawObject,
    WireError,
    decode,
    fields_of,
    fold,
    is_null,
    list_of,
    object_of,
    restore_case,
    unfit,
)

_NAMES: Final = msgspec.json.Decoder(list[str])
_NAMES_KEY: Final = b',"NodeNames":'

JsonObject = Mapping[str, object]
RequestPod = JsonObject | PodRecord

_TEXT: Final[msgspec.json.Decoder[str | None]] = msgspec.json.Decoder(str | None)
_NUMBER: Final[msgspec.json.Decoder[int | None]] = msgspec.json.Decoder(int | None)
_ANYTHING: Final = msgspec.json.Decoder(dict[str, object])
_ENCODER: Final = msgspec.json.Encoder()

_IDENTITY: Final = re.compile(
    rb'\{"Pod":\{"metadata":\{"name":"[\w.-]+",(?:"generateName":"[\w.-]+",)?'
    rb'"namespace":"[\w-]+","uid":"(?P<uid>[\w-]+)","resourceVersion":"(?P<version>\w+)",'
)
"""Beginning of a request: Go writes the fields of an object in the order of their declaration."""
_NO_NODES: Final = b'},"Nodes":null}'

_NO_PODS: Final[Mapping[str, PodRecord]] = MappingProxyType({})

_ARGS: Final = "ExtenderArgs"
_PREEMPTION_ARGS: Final = "ExtenderPreemptionArgs"
_MAX_INT64: Final = (1 << 63) - 1
_REMEMBERED_BYTES: Final = 1 << 16

_MOST_NODES: Final = 20_000
"""Limit for the nodes of a request, or twice the number of known nodes if that is more."""

_MAX_NAME: Final = 1024
"""Limit for a node's name in a request, in bytes, quotation marks included; decisions keep it."""

_MOST_VICTIMS: Final = 30_000
"""Limit for a preempt request: kube-scheduler tries a tenth of the nodes, at least 100."""

_MOST_POD_BYTES: Final = 4 << 20
"""Limit for a Pod: the API server accepts 3 MiB, and decoding delays all other answers."""

_WIRE_UNITS: Final = 400
"""Score units that the range on the wire spans; nodes further behind get the lowest score. A node
of lower certainty is at least 160 units behind, more than kube-scheduler's plugins can add."""

_WISHES_UNITS: Final = 120
"""Maximum sum that kube-scheduler's own plugins add, 1,200 points, in units."""

_FIRST_UNITS: Final = 2
"""Lead of our first choice over equal nodes: breaks ties, and is less than any plugin's score."""

_JUST: Final = 1e-6
"""Added before rounding down: floating-point errors may leave a result just below an integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtenderRequest:
    """A filter or prioritize request.

    Attributes:
        pod: the Pod object, empty if the request has none; or the inventory's record of the same
            version of the pod.
        nodes: names of the candidate nodes in kube-scheduler's order, without duplicates.
        node_objects: the encoded Node objects; None if kube-scheduler sent names
            (`nodeCacheCapable: true`).
    """

    pod: RequestPod
    nodes: Sequence[str]
    node_objects: tuple[msgspec.Raw, ...] | None

    @property
    def about(self) -> PodRef:
        """Return the identity of the pod."""
        pod = self.pod
        return PodRef.of(pod) if isinstance(pod, PodRecord) else parse_pod_ref(pod)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCandidate:
    """A node on which kube-scheduler would evict pods.

    Attributes:
        uids: UIDs of the victims.
        pdb_violations: number of violated disruption budgets; returned unchanged.
    """

    node: str
    uids: tuple[str, ...]
    pdb_violations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionRequest:
    """A preempt request."""

    pod: JsonObject
    candidates: tuple[PreemptionCandidate, ...]


class _HostPriority(msgspec.Struct):
    """A node's score in the form of extender/v1."""

    Host: str
    Score: int


def decode_request(
    body: bytes,
    node_index: NodeIndex = EMPTY_NODE_INDEX,
    waiting: Mapping[str, PodRecord] = _NO_PODS,
    *,
    known: int = 0,
) -> ExtenderRequest:
    """Decode an ExtenderArgs.

    Args:
        body: body of the request.
        node_index: known nodes; their names need not be decoded.
        waiting: records of unbound pods by UID; these pods need not be decoded.
        known: number of known nodes.

    Raises:
        WireError: the body is malformed; the message has the path, the value and what is allowed.
    """
    most = max(_MOST_NODES, 2 * known)
    if excess := excess_values(body):
        raise WireError(f"cannot read {_ARGS}: $ has {excess}")
    head, listed = _split_names(body, node_index, most)
    if listed is not None:
        _check_count(len(listed), most, _ARGS, "$.NodeNames")
        _check_lengths(listed, "$.NodeNames")
        read = _pod_of if len(head) <= _REMEMBERED_BYTES else _pod_of.__wrapped__
        pod = _find_waiting(head, waiting) or read(head)
        return ExtenderRequest(pod=pod, nodes=listed, node_objects=None)
    document = fields_of(body, _ARGS)
    pod = _pod(document, _ARGS)
    names = _names(document.get("nodenames"), most)
    _check_lengths(names, "$.NodeNames")
    node_list = object_of(document.get("nodes"), _ARGS, "$.Nodes")
    if names or node_list is None:
        return ExtenderRequest(pod=pod, nodes=names, node_objects=None)
    items = list_of(fold(node_list).get("items"), _ARGS, "$.Nodes.items")
    _check_count(len(items), most, _ARGS, "$.Nodes.items")
    nodes: dict[str, msgspec.Raw] = {}
    for index, item in enumerate(items):
        nodes.setdefault(_node_name(item, f"$.Nodes.items[{index}]"), item)
    _check_lengths(nodes, "$.Nodes.items")
    return ExtenderRequest(pod=pod, nodes=tuple(nodes), node_objects=tuple(nodes.values()))


def decode_preemption(body: bytes, *, known: int = 0) -> PreemptionRequest:
    """Decode an ExtenderPreemptionArgs, with whole pods or with their UIDs.

    Args:
        body: body of the request.
        known: number of known nodes.

    Raises:
        WireError: as in `decode_request`.
    """
    if excess := excess_values(body):
        raise WireError(f"cannot read {_PREEMPTION_ARGS}: $ has {excess}")
    document = fields_of(body, _PREEMPTION_ARGS)
    by_form = {
        name: object_of(document.get(name.lower()), _PREEMPTION_ARGS, f"$.{name}")
        for name in ("NodeNameToMetaVictims", "NodeNameToVictims")
    }
    form, by_node = next(
        ((name, victims) for name, victims in by_form.items() if victims), ("", RawObject())
    )
    _check_count(len(by_node), max(_MOST_NODES, 2 * known), _PREEMPTION_ARGS, f"$.{form}")
    candidates: list[PreemptionCandidate] = []
    left = _MOST_VICTIMS
    for node, victims in by_node.items():
        candidates.append(_candidate(node, victims, f"$.{form}[{node[:SHOWN]!r}]", left))
        left -= len(candidates[-1].uids)
    pod = _pod(document, _PREEMPTION_ARGS)
    return PreemptionRequest(pod=pod, candidates=tuple(candidates))


def _check_count(count: int, most: int, what: str, where: str) -> None:
    """Check the length of a list or an object."""
    if count > most:
        raise WireError(f"cannot read {what}: {where} has {count} entries, must be at most {most}")


def _check_lengths(names: Collection[str], where: str) -> None:
    """Check the length of nodes' names.

    Raises:
        WireError: a name is longer than `_MAX_NAME`.
    """
    if isinstance(names, NamesIn):
        longest = int(names.pieces.lengths.max(initial=0))
    else:
        longest = max(map(len, names), default=0)
    if longest > _MAX_NAME:
        raise WireError(
            f"cannot read {_ARGS}: {where} has a name of {longest} bytes, "
            f"must be at most {_MAX_NAME}"
        )


def _candidate(node: str, victims: msgspec.Raw, where: str, most: int) -> PreemptionCandidate:
    fields = fold(object_of(victims, _PREEMPTION_ARGS, where) or {})
    pods = list_of(fields.get("pods"), _PREEMPTION_ARGS, f"{where}.Pods")
    _check_count(len(pods), most, _PREEMPTION_ARGS, f"{where}.Pods")
    return PreemptionCandidate(
        node=node,
        uids=tuple(_victim_uid(pod, f"{where}.Pods[{index}]") for index, pod in enumerate(pods)),
        pdb_violations=_violations(fields.get("numpdbviolations"), f"{where}.NumPDBViolations"),
    )


def _victim_uid(pod: msgspec.Raw, where: str) -> str:
    """Return a victim's UID, from a MetaPod (`UID`) or a whole Pod (`metadata.uid`)."""
    fields = fold(object_of(pod, _PREEMPTION_ARGS, where) or {})
    metadata = object_of(fields.get("metadata"), _PREEMPTION_ARGS, f"{where}.metadata") or {}
    uid = fields.get("uid", fold(metadata).get("uid"))
    if uid is not None:
        text = decode(_TEXT, uid, _PREEMPTION_ARGS, f"{where}.UID", "a string")
        if text:
            return text
    raise WireError(f"cannot read {_PREEMPTION_ARGS}: {where} has no UID, must be a pod with one")


def _violations(number: msgspec.Raw | None, where: str) -> int:
    """Return the number of violated disruption budgets; 0 if it is absent."""
    allowed = "a whole number"
    if number is None:
        return 0
    value = decode(_NUMBER, number, _PREEMPTION_ARGS, where, allowed) or 0
    if abs(value) > _MAX_INT64:
        raise WireError(unfit(_PREEMPTION_ARGS, where, number, allowed))
    return value


def encode_filter(
    request: ExtenderRequest,
    decision: Decision | None,
    shortlist: int = 0,
    *,
    has_preferences: bool = False,
) -> bytes:
    """Encode an ExtenderFilterResult, in the form and order of the request.

    If more nodes pass than the shortlist allows, the others are omitted without a reason:
    kube-scheduler then scores only the best nodes and parses no unneeded reasons. The pod still
    gets a node. If the pod has preferences, the answer includes all nodes that could overtake our
    first choice by these.

    Args:
        decision: the verdict on each candidate; None passes all.
        shortlist: maximum number of nodes in the answer; 0 for all that pass.
        has_preferences: whether the pod has preferences that kube-scheduler scores.
    """
    reach = _WISHES_UNITS / UNITS if has_preferences and shortlist > 1 else 0.0
    kept, refused = _verdicts(request, decision, shortlist, reach)
    # An answer in the other form, or without a list, would mean that no node passes.
    names, objects = request.nodes, request.node_objects
    return _ENCODER.encode(
        {
            "Nodes": None if objects is None else {"items": [objects[at] for at in kept.tolist()]},
            "NodeNames": _write_names(names, kept) if objects is None else None,
            "FailedNodes": _write_reasons(names, _reasons(refused, is_resolvable=True)),
            "FailedAndUnresolvableNodes": _write_reasons(
                names, _reasons(refused, is_resolvable=False)
            ),
            "Error": "",
        }
    )


def _verdicts(
    request: ExtenderRequest, decision: Decision | None, shortlist: int, reach: float
) -> tuple[Rows, Mapping[Rejection, Rows]]:
    """Return the rows that pass, in order, and the refused rows by reason."""
    if decision is None:
        return np.arange(len(request.nodes)), {}
    feasible = decision.feasible
    if 0 < shortlist < feasible:
        return decision.shortlist(shortlist, reach), {}
    if feasible == len(decision.codes):  # the usual case
        return np.arange(feasible), {}
    counts = np.bincount(decision.codes)
    refused = {
        rejection: np.flatnonzero(decision.codes == code)
        for code, rejection in _REJECTIONS.items()
        if code < len(counts) and counts[code]
    }
    return np.flatnonzero(decision.codes == Code.PASSES), refused


def _reasons(refused: Mapping[Rejection, Rows], *, is_resolvable: bool) -> list[tuple[str, Rows]]:
    """Return the reasons that preemption can resolve, or the others, with their rows."""
    return [
        (f"{rejection.value}{SIGNATURE}", rows)
        for rejection, rows in refused.items()
        if rejection.is_resolvable is is_resolvable
    ]


_REJECTIONS = {code.value: code.rejection for code in Code if code.rejection is not None}


def encode_filter_error(error: str) -> bytes:
    """Encode an ExtenderFilterResult that fails the call."""
    return _ENCODER.encode(
        {
            "Nodes": None,
            "NodeNames": None,
            "FailedNodes": {},
            "FailedAndUnresolvableNodes": {},
            # Older kube-schedulers use the text as a format string.
            "Error": error.replace("%", ""),
        }
    )


def encode_scores(request: ExtenderRequest, decision: Decision | None, max_score: int) -> bytes:
    """Encode a HostPriorityList: integers from 0 to `max_score`; without a decision all are 0.

    Scores are relative to our first choice, the only node with the highest score. Materially equal
    nodes stay so close that kube-scheduler's own plugins decide (docs/decision.md). A node that
    passes gets at least 1.
    """
    if decision is None:
        return _ENCODER.encode([_HostPriority(node, 0) for node in request.nodes])
    values = np.zeros(len(decision.codes), dtype=np.int64)
    if len(decision.order):
        first = decision.order[0]
        behind = _FIRST_UNITS + (decision.scores[first] - decision.scores) * UNITS
        # Rounded first, so that rounding errors do not separate equal nodes.
        left = 1.0 - np.round(behind, 3) / _WIRE_UNITS
        values = np.maximum(np.floor(left * max_score + _JUST), 1)
        values = np.minimum(values, max_score - 1).astype(np.int64)
        values[decision.codes != Code.PASSES] = 0
        values[first] = max_score
    if isinstance(request.nodes, NamesIn):
        return _write_scores(request.nodes, values.tolist())
    return _ENCODER.encode(list(map(_HostPriority, request.nodes, values.tolist())))


def encode_preemption(candidates: Iterable[PreemptionCandidate]) -> bytes:
    """Encode an ExtenderPreemptionResult, with the victims of the request."""
    return _ENCODER.encode(
        {
            "NodeNameToMetaVictims": {
                candidate.node: {
                    "Pods": [{"UID": uid} for uid in candidate.uids],
                    "NumPDBViolations": candidate.pdb_violations,
                }
                for candidate in candidates
            }
        }
    )


def encode_error(error: str) -> bytes:
    """Encode the body of an answer with an error status."""
    return _ENCODER.encode({"Error": error})


def _find_waiting(head: bytes, waiting: Mapping[str, PodRecord]) -> PodRecord | None:
    """Return the inventory's record of the pod in a request, if it has the same resourceVersion.

    A resourceVersion identifies one state of an object.
    """
    match = _IDENTITY.match(head)
    if match is None or not head.endswith(_NO_NODES):
        return None
    record = waiting.get(match["uid"].decode())
    return record if record and record.version == match["version"].decode() else None


@lru_cache(maxsize=16)
def _pod_of(head: bytes) -> JsonObject:
    """Decode the Pod of a request without its names; callers must not modify it.

    Cached, because the prioritize request repeats the pod of the filter request byte for byte.
    """
    document = fields_of(head, _ARGS)
    object_of(document.get("nodes"), _ARGS, "$.Nodes")
    return _pod(document, _ARGS)


def _pod(document: RawObject, what: str) -> JsonObject:
    """Return the Pod with Kubernetes' field names; an absent or null Pod is empty."""
    value = document.get("pod")
    if value is None or is_null(value):
        return {}
    if len(memoryview(value)) > _MOST_POD_BYTES:
        raise WireError(unfit(what, "$.Pod", value, f"at most {_MOST_POD_BYTES} bytes"))
    pod = decode(_ANYTHING, value, what, "$.Pod", "an object or null")
    restored = mapping_of(restore_case(pod, POD))
    if excess := excess_of(restored):
        raise WireError(f"cannot read {what}: $.Pod has {excess}")
    return restored


def _names(value: msgspec.Raw | None, most: int) -> Sequence[str]:
    """Return the candidates' names without duplicates; Go reads a null name as ""."""
    if value is None or is_null(value):
        return ()
    names = _strange_names(value, most)
    _check_count(len(names), most, _ARGS, "$.NodeNames")
    return tuple(dict.fromkeys(names))


def _strange_names(value: msgspec.Raw, most: int) -> list[str]:
    """Return the names of a list in a form that Go does not write."""
    try:
        return decode_with(_NAMES.decode, value)
    except MalformedError:
        # Decode name by name: one is null, or the error must name it.
        names = list_of(value, _ARGS, "$.NodeNames")
        _check_count(len(names), most, _ARGS, "$.NodeNames")
        return [
            decode(_TEXT, name, _ARGS, f"$.NodeNames[{index}]", "a string") or ""
            for index, name in enumerate(names)
        ]


def _node_name(node: msgspec.Raw, where: str) -> str:
    """Return the name of a whole Node object; Go reads a missing name as ""."""
    fields = object_of(node, _ARGS, where) or {}
    raw = fields.get("metadata") or fold(fields).get("metadata")
    metadata = object_of(raw, _ARGS, f"{where}.metadata") or {}
    name = metadata.get("name") or fold(metadata).get("name")
    if name is None:
        return ""
    return decode(_TEXT, name, _ARGS, f"{where}.metadata.name", "a string") or ""


# The list of candidate nodes: names are looked up as bytes of the request body, and copied from
# there into the answer, because decoding thousands of them takes time.


def _read_names(
    text: bytes, begin: int, end: int, node_index: NodeIndex, most: int
) -> Sequence[str] | None:
    """Return the names of a JSON list, without duplicates; None if it is not a list of strings.

    A list longer than `most` keeps its duplicates, because the caller refuses it.

    Args:
        text: text that contains the list.
        begin: offset of the list's first byte.
        end: offset behind the list.
        most: maximum number of nodes in a request.
    """
    found = node_index.find(text, begin, end)
    if found is not None:
        return found
    try:
        names = decode_with(_NAMES.decode, memoryview(text)[begin:end])
    except MalformedError:
        return None
    return names if len(names) > most else tuple(dict.fromkeys(names))


def _split_names(
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
    listed = _read_names(body, at + len(_NAMES_KEY), len(body) - 1, node_index, most)
    # Without names the body may have whole nodes.
    return (body[:at] + b"}", listed) if listed else (body, None)


def _write_names(names: Sequence[str], kept: Rows) -> msgspec.Raw | list[str]:
    """Return the names of the kept candidates, ready for the JSON encoder.

    Args:
        kept: indexes of the names to write, in order, without duplicates.
    """
    if isinstance(names, NamesIn):
        return msgspec.Raw(b"[%b]" % names.pieces.joined(kept))
    return [names[at] for at in kept.tolist()]


def _write_reasons(
    names: Sequence[str], reasons: Sequence[tuple[str, Rows]]
) -> msgspec.Raw | dict[str, str]:
    """Return a map from refused node to reason, ready for the JSON encoder.

    Args:
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


def _write_scores(names: NamesIn, scores: Sequence[int]) -> bytes:
    """Encode the names with their scores as a HostPriorityList."""
    between = {score: b',"Score":%d},{"Host":' % score for score in set(scores)}
    parts = [b""] * (2 * len(scores))
    parts[0::2] = names.pieces.split()
    parts[1::2] = map(between.__getitem__, scores)
    parts[-1] = b',"Score":%d}]' % scores[-1]
    return b'[{"Host":' + b"".join(parts)
