"""Latest decision about each waiting pod, made by any replica."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final
from urllib.parse import urlencode

import msgspec
import numpy as np
from aiohttp import web

from extender.core.decision.filtering import Code
from extender.fleet.fleet import Fleet
from extender.insight.replicas import AnswerFormat, Replicas, query_replicas
from extender.insight.scheduler_message import CountedReason
from extender.placement.history import DecisionHistory, DecisionRecord
from extender.server.json_api import CONTENT_TYPE, check_parameters, chunks, refusing

PEERS_PATH: Final = "/v1/peers/last"
"""Path for other replicas; its prefix requires a replica's client certificate."""

_MOST_SENT: Final = 10_000
"""Largest number of pods in an answer to another replica, latest decisions first: some
megabytes."""
_PIECE_DECISIONS: Final = 64
"""Decisions to encode for another replica between two yields to the event loop."""

_VERSION: Final = 1
"""Version of the format; it grows when an older replica would misread it."""


class Last(msgspec.Struct, kw_only=True, frozen=True):
    """Short form of a replica's latest decision about a pod; it does not contain the pod's name.

    Attributes:
        id: id of the decision, unique across replicas.
        replica: name of the extender pod that made it.
        number: number of the decision within that replica.
        at: time of the decision, seconds since the epoch.
        verb: filter or prioritize.
        candidates: number of candidate nodes.
        feasible: number of nodes that passed.
        node: first choice, None if no node passed.
        leaves_none: whether the answer left the pod without a node.
        refused: reasons of the rejected candidates, most frequent first.
        examples: one rejected candidate for each of these reasons.
    """

    id: str
    replica: str
    number: int
    at: float
    verb: str
    candidates: int
    feasible: int
    node: str | None
    leaves_none: bool
    refused: tuple[CountedReason, ...]
    examples: dict[str, str] = {}


class _PeerAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """A replica's answer to another replica: decisions about waiting pods, by UID."""

    version: int
    replica: str
    last: dict[str, Last]


_FORM: Final = AnswerFormat(msgspec.json.Decoder(_PeerAnswer).decode, _VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReported:
    """Latest decisions of the other replicas.

    Attributes:
        last: latest decision about each pod, by UID.
        unreachable: addresses of replicas that did not answer or sent a malformed answer.
    """

    last: Mapping[str, Last] = field(default_factory=dict)
    unreachable: Sequence[str] = ()


NOTHING_REPORTED: Final = LastReported()


class LastDecisions:
    """Finds the latest decision about a waiting pod across all replicas.

    Args:
        fleet: state of the fleet.
        history: decisions of this replica.
        replicas: this replica and the others.
    """

    def __init__(self, fleet: Fleet, history: DecisionHistory, replicas: Replicas) -> None:
        self._fleet = fleet
        self._history = history
        self._replicas = replicas

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route at which other replicas query the latest decisions."""
        return [web.get(PEERS_PATH, refusing(self._answer_peer))]

    def of(self, uid: str, others: LastReported) -> Last | None:
        """Return the latest decision about a pod by any replica, None if there is none."""
        record = self._history.last_of(uid)
        own = None if record is None else self._last(record)
        other = others.last.get(uid)
        if own is None or other is None:
            return own or other
        return own if own.at >= other.at else other

    async def fetch(self, *, uid: str = "", namespace: str = "") -> LastReported:
        """Query the other replicas.

        Args:
            uid: only this pod; "" for all waiting pods.
            namespace: only pods of this namespace; "" for all.
        """
        query = {name: it for name, it in (("uid", uid), ("namespace", namespace)) if it}
        path = f"{PEERS_PATH}?{urlencode(query)}" if query else PEERS_PATH
        replies = await query_replicas(self._replicas, path, _FORM)
        last: dict[str, Last] = {}
        for _, answer in replies.answers:
            for pod, one in answer.last.items():
                known = last.get(pod)
                if known is None or one.at > known.at:
                    last[pod] = one
            await asyncio.sleep(0)
        return LastReported(last=last, unreachable=replies.unreachable)

    async def _answer_peer(self, request: web.Request) -> web.StreamResponse:
        """Answer another replica, which redacts the answer for its caller.

        Pods that no longer wait are left out: the asking replica sees their binding itself.
        """
        refusal = self._replicas.refusal()
        if refusal is not None:
            return refusal
        query = request.query
        check_parameters(query, frozenset({"uid", "namespace"}))
        records = self._waiting(query.get("uid", ""), query.get("namespace", ""))
        written: list[bytes] = []
        for some in chunks(islice(records, _MOST_SENT), _PIECE_DECISIONS):
            written += [
                b"%b:%b" % (msgspec.json.encode(it.pod.uid), msgspec.json.encode(self._last(it)))
                for it in some
            ]
            await asyncio.sleep(0)
        head = msgspec.json.encode({"version": _VERSION, "replica": self._replicas.name})
        body = b'%b,"last":{%b}}' % (head[:-1], b",".join(written))
        return web.Response(body=body, content_type=CONTENT_TYPE)

    def _waiting(self, uid: str, namespace: str) -> Iterator[DecisionRecord]:
        """Yield this replica's latest decision about each waiting pod, newest first."""
        pods = [uid] if uid else tuple(self._fleet.unbound_pods)
        last = (self._history.last_of(pod) for pod in pods)
        known = [record for record in last if record is not None]
        for record in sorted(known, key=lambda it: -it.number):
            pod = self._fleet.unbound_pods.get(record.pod.uid)
            if pod is not None and namespace in {"", pod.namespace}:
                yield record

    def _last(self, record: DecisionRecord) -> Last:
        return Last(
            id=self._replicas.id_of(record.number),
            replica=self._replicas.host,
            number=record.number,
            at=record.at,
            verb=record.verb,
            candidates=len(record.decision.candidates),
            feasible=record.decision.feasible,
            node=record.decision.best,
            leaves_none=record.leaves_none,
            refused=_rejections(record),
            examples=_examples(record),
        )


def _rejections(record: DecisionRecord) -> tuple[CountedReason, ...]:
    """Count a decision's rejected candidates by reason, most frequent first."""
    counts = np.bincount(record.decision.codes, minlength=len(Code)).tolist()
    found = [CountedReason(count=counts[code], reason=code.text) for code in Code if counts[code]]
    return tuple(sorted((one for one in found if one.reason), key=lambda one: -one.count))


def _examples(record: DecisionRecord) -> dict[str, str]:
    """Return the first rejected candidate for each reason."""
    codes = record.decision.codes
    found = [Code(code) for code in np.flatnonzero(np.bincount(codes)).tolist() if code]
    names = record.decision.candidates
    return {code.text: names[int(np.argmax(codes == code))] for code in found}
