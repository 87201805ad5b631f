"""The last decision about each pod that waits, whichever replica made it."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final
from urllib.parse import urlencode

import msgspec
import numpy as np
from aiohttp import web

from extender.core.filtering import Code
from extender.fleet.fleet import Fleet
from extender.observe.answers import CONTENT_TYPE, chunks
from extender.observe.hearing import Form, hear
from extender.observe.parameters import check_parameters, refusing
from extender.observe.reasons import Counted
from extender.observe.replicas import Replicas
from extender.placement.history import DecisionHistory, DecisionRecord

PEERS_PATH: Final = "/v1/peers/last"
"""Where other replicas ask: under the prefix that only their certificates open."""

MOST_TOLD: Final = 10_000
"""Pods of which another replica is told, those decided about last: some megabytes."""
PIECE_DECISIONS: Final = 64
"""Decisions that are written for it between two turns of the event loop."""

VERSION: Final = 1
"""Grows where an older replica would misread what is told."""


class Last(msgspec.Struct, kw_only=True, frozen=True):
    """The last decision of one replica about a pod, in short; it names no pod.

    Attributes:
        id: what it is called, as no other of any replica.
        replica: which pod of ours made it, for people.
        number: its number there.
        at: when it was made, seconds since the epoch.
        verb: filter or prioritize.
        candidates: nodes that were asked about.
        feasible: of those, nodes that would do.
        node: the first choice, None where there is none.
        leaves_none: the answer leaves the pod no node.
        refused: our reasons against candidates, the commonest first.
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
    refused: tuple[Counted, ...]


class _Told(msgspec.Struct, kw_only=True, frozen=True):
    """What a replica tells another: by UID, of pods that wait."""

    version: int
    replica: str
    last: dict[str, Last]


_FORM: Final = Form(msgspec.json.Decoder(_Told).decode, VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastHeard:
    """What the other replicas told of their last decisions.

    Attributes:
        last: their last decision about each pod, by UID.
        unreachable: addresses of those that did not answer, or not so that it can be read.
    """

    last: Mapping[str, Last] = field(default_factory=dict)
    unreachable: Sequence[str] = ()


NOTHING_HEARD: Final = LastHeard()


class LastDecisions:
    """Tells what was decided last about pods that wait; any replica knows it of all.

    Args:
        fleet: says which pods wait.
        history: the decisions of this replica.
        replicas: this one and the others.
    """

    def __init__(self, fleet: Fleet, history: DecisionHistory, replicas: Replicas) -> None:
        self._fleet = fleet
        self._history = history
        self._replicas = replicas

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route for other replicas."""
        return [web.get(PEERS_PATH, refusing(self._tell))]

    def of(self, uid: str, heard: LastHeard) -> Last | None:
        """Return the last decision about a pod, here or elsewhere; None where none is known."""
        record = self._history.last_of(uid)
        own = None if record is None else self._last(record)
        other = heard.last.get(uid)
        if own is None or other is None:
            return own or other
        return own if own.at >= other.at else other

    async def hear(self, *, uid: str = "", namespace: str = "") -> LastHeard:
        """Ask the others.

        Args:
            uid: about this pod alone, "" for all that wait.
            namespace: about its pods alone, "" for all.
        """
        asked = {name: it for name, it in (("uid", uid), ("namespace", namespace)) if it}
        path = f"{PEERS_PATH}?{urlencode(asked)}" if asked else PEERS_PATH
        heard = await hear(self._replicas, path, _FORM)
        last: dict[str, Last] = {}
        for _, told in heard.told:
            for pod, one in told.last.items():
                known = last.get(pod)
                if known is None or one.at > known.at:
                    last[pod] = one
            await asyncio.sleep(0)
        return LastHeard(last=last, unreachable=heard.unreachable)

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        """Answer another replica; it knows the pods itself, and hides what its caller may not see.

        Nothing is told of a pod that does not wait as far as we know: its binding is the news.
        """
        refusal = self._replicas.refusal()
        if refusal is not None:
            return refusal
        query = request.query
        check_parameters(query, frozenset({"uid", "namespace"}))
        records = self._waiting(query.get("uid", ""), query.get("namespace", ""))
        written: list[bytes] = []
        for some in chunks(islice(records, MOST_TOLD), PIECE_DECISIONS):
            written += [
                b"%b:%b" % (msgspec.json.encode(it.pod.uid), msgspec.json.encode(self._last(it)))
                for it in some
            ]
            await asyncio.sleep(0)
        head = msgspec.json.encode({"version": VERSION, "replica": self._replicas.name})
        body = b'%b,"last":{%b}}' % (head[:-1], b",".join(written))
        return web.Response(body=body, content_type=CONTENT_TYPE)

    def _waiting(self, uid: str, namespace: str) -> Iterator[DecisionRecord]:
        """Yield the last decision of this replica about each pod that waits, the newest first."""
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
            refused=rejections(record),
        )


def rejections(record: DecisionRecord) -> tuple[Counted, ...]:
    """Return our own reasons against the candidates of a decision, the commonest first."""
    counts = np.bincount(record.decision.codes, minlength=len(Code)).tolist()
    found = [Counted(count=counts[code], reason=code.text) for code in Code if counts[code]]
    return tuple(sorted((one for one in found if one.reason), key=lambda one: -one.count))
