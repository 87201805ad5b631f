"""What was decided, here and by the other replicas: any of them answers for all."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Final
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from extender.core.untyped import text_of
from extender.observe.answers import (
    CONTENT_TYPE,
    chunks,
    document_answer,
    json_answer,
    stream_answer,
    unknown_decision,
    write_in_pieces,
)
from extender.observe.hearing import Form, hear
from extender.observe.parameters import (
    check_parameters,
    read_boolean,
    read_number,
    refusing,
)
from extender.observe.replicas import ONE, Replicas
from extender.observe.seen import VIEWER, namespace_of, sees, write_json_in_full
from extender.observe.views import Json, decision_in_steps, veiled
from extender.placement.history import DecisionHistory, DecisionRecord
from extender.stepping import in_turns

PEERS_PATH: Final = "/v1/peers/decisions"
"""Where other replicas ask: under the prefix that only their certificates open."""

MAX_DECISIONS: Final = 1000
PIECE_DECISIONS: Final = 32
"""Decisions that are written for another replica between two turns of the event loop."""

VERSION: Final = 1
"""Grows where an older replica would misread what is told."""


class Told(msgspec.Struct, kw_only=True, frozen=True):
    """What a replica tells another.

    Attributes:
        version: of this form.
        replica: who tells, short.
        decisions: views with all that they say; it hides nothing from a replica.
    """

    version: int
    replica: str
    decisions: list[dict[str, object]] = []


class _Written(msgspec.Struct, kw_only=True, frozen=True):
    """What a replica tells another, with the decisions as they are written."""

    version: int
    replica: str
    decisions: list[msgspec.Raw] = []


_WRITTEN: Final = msgspec.json.Decoder(_Written)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VIEW: Final = msgspec.json.Decoder(dict[str, object])

LONG_BYTES: Final = 1 << 16
"""Of a decision that is read in parts; one in short has less than a kilobyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Far:
    """A decision of another replica, in short."""

    address: str
    view: Json
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """What the others told.

    Attributes:
        decisions: theirs, each replica's newest first.
        unreachable: addresses of those that did not answer, or not so that it can be read.
    """

    decisions: Sequence[_Far]
    unreachable: Sequence[str]


class Decisions:
    """The routes under /v1/decisions, and the one at which other replicas ask.

    A decision's `number` is its replica's; its `id` is the only one of any replica and process.

    Args:
        history: the decisions of this replica.
        replicas: this one and the others.
    """

    def __init__(self, history: DecisionHistory, replicas: Replicas = ONE) -> None:
        self._history = history
        self._replicas = replicas

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for people and programs."""
        return [
            web.get("/v1/decisions", refusing(self._list)),
            web.get("/v1/decisions/{id}", refusing(self._one)),
        ]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route for other replicas."""
        return [web.get(PEERS_PATH, refusing(self._tell))]

    async def _list(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        check_parameters(query, frozenset({"limit", "pod", "brief"}))
        limit = read_number(query, "limit", default=MAX_DECISIONS, low=1, high=MAX_DECISIONS)
        brief = read_boolean(query, "brief")
        pod = query.get("pod")
        # Of those that bear the pod's name some may be another tenant's, and are left out here.
        asked = {"limit": str(limit)} if pod is None else {"limit": str(MAX_DECISIONS), "pod": pod}
        heard = await self._hear(asked)
        near = [it for it in self._near(pod) if pod is None or sees(it.pod.namespace)]
        far = [it for it in heard.decisions if pod is None or sees(_namespace(it.view))]
        both: list[DecisionRecord | _Far] = [*near, *far]
        newest = sorted(both, key=lambda it: -it.at)[:limit]
        return await stream_answer(
            request,
            "decisions",
            self._pieces(newest, brief=brief),
            {"unreachable": heard.unreachable},
        )

    async def _pieces(
        self, newest: Sequence[DecisionRecord | _Far], *, brief: bool
    ) -> AsyncIterator[list[Json]]:
        """Yield the decisions; those of others are fetched in full one by one.

        Of a replica that does not answer any more the rest is told in short.
        """
        silent: set[str] = set()
        for decision in newest:
            if isinstance(decision, DecisionRecord):
                yield [await self._view(decision, brief=brief)]
                continue
            view = None
            if not brief and decision.address not in silent:
                query = urlencode({"id": text_of(decision.view["id"])})
                body = await self._replicas.others.ask_one(
                    decision.address, f"{PEERS_PATH}?{query}"
                )
                if body is None:
                    silent.add(decision.address)
                told = FORM.read(body)
                view = told.decisions[0] if told and told.decisions else None
            # Forgotten meanwhile: then what it said in short.
            yield [veiled(view or decision.view)]

    async def _one(self, request: web.Request) -> web.StreamResponse:
        check_parameters(request.query, frozenset())
        wanted = request.match_info["id"]
        own = [record for record in self._history if self._is(record, wanted)]
        near = [await self._view(record, brief=False) for record in own]
        heard = _Heard(decisions=(), unreachable=())
        if not self._replicas.is_ours(wanted):
            heard = await self._hear({"id": wanted})
        found = [*near, *(veiled(it.view) for it in heard.decisions)]
        rest: Json = {"unreachable": heard.unreachable} if heard.unreachable else {}
        if len(found) == 1:
            return await document_answer(request, found[0] | rest)
        if found:
            ids = ", ".join(sorted(text_of(view["id"]) for view in found))
            error = f"several replicas have a decision {wanted!r}: ask for one of {ids}"
            return json_answer({"error": error} | rest, 409)
        error = unknown_decision(wanted)
        return json_answer({"error": error} | rest, 404)

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        """Answer another replica."""
        refusal = self._replicas.refusal()
        if refusal is not None:
            return refusal
        query = request.query
        check_parameters(query, frozenset({"limit", "pod", "id", "after"}))
        limit = read_number(query, "limit", default=MAX_DECISIONS, low=1, high=MAX_DECISIONS)
        wanted, after = query.get("id"), query.get("after")
        if wanted is not None:
            records = [record for record in self._history if self._is(record, wanted)]
        elif after is not None:
            records = self._after(after)[:limit]
        else:
            records = self._near(query.get("pod"))[:limit]
        written: list[bytes] = []
        if wanted is not None:
            written += [await self._written(record) for record in records]
        else:
            for some in chunks(records, PIECE_DECISIONS):
                written += [
                    write_json_in_full(await self._view(record, brief=True)) for record in some
                ]
                await asyncio.sleep(0)
        body = b'{"version":%d,"replica":%b,"decisions":[%b]}' % (
            VERSION,
            write_json_in_full(self._replicas.name),
            b",".join(written),
        )
        return web.Response(body=body, content_type=CONTENT_TYPE)

    async def _written(self, record: DecisionRecord) -> bytes:
        """Return a decision in full, written for another replica in steps."""
        pieces: list[bytes] = []
        for piece in write_in_pieces(await self._view(record, brief=False), write_json_in_full):
            pieces.append(piece)
            await asyncio.sleep(0)
        return b"".join(pieces)

    def _near(self, pod: str | None) -> list[DecisionRecord]:
        """Return the decisions of this replica about a pod, or all, the newest first."""
        return [
            record
            for record in self._history
            if pod is None or pod in {record.pod.key, record.pod.uid, record.pod.name}
        ]

    def _after(self, known: str) -> list[DecisionRecord]:
        """Return the decisions of this replica after the last one of them that is known.

        Args:
            known: decisions of any replicas, by commas.
        """
        ours = (one for one in known.split(",") if self._replicas.is_ours(one))
        numbers = (one.rpartition("-")[2] for one in ours)
        last = max((int(one) for one in numbers if one.isdecimal()), default=0)
        return list(takewhile(lambda record: record.number > last, self._history))

    def _is(self, record: DecisionRecord, wanted: str) -> bool:
        return wanted in {str(record.number), self._replicas.id_of(record.number)}

    async def _view(self, record: DecisionRecord, *, brief: bool) -> Json:
        view = await in_turns(decision_in_steps(record, brief=brief))
        return named(self._replicas, record) | view

    async def _hear(self, query: Mapping[str, str]) -> _Heard:
        """Ask the others, and find out what of it the caller may see."""
        heard = await hear(self._replicas, f"{PEERS_PATH}?{urlencode(query)}", FORM)
        decisions = [it for address, told in heard.told for it in _far(address, told)]
        await VIEWER.get().learn({_namespace(it.view) for it in decisions})
        return _Heard(decisions=decisions, unreachable=heard.unreachable)


def named(replicas: Replicas, record: DecisionRecord) -> Json:
    """Return what a decision of ours is called, and who made it."""
    return {"id": replicas.id_of(record.number), "replica": replicas.host}


def _read_told(body: bytes) -> Told:
    """Return what another replica told.

    What a long decision says of thousands of nodes stays as it is written: a `msgspec.Raw`.

    Raises:
        Exception: it cannot be read.
    """
    told = _WRITTEN.decode(body)
    return Told(
        version=told.version,
        replica=told.replica,
        decisions=[_read_view(view) for view in told.decisions],
    )


def _read_view(written: msgspec.Raw) -> dict[str, object]:
    if not _is_long(written):
        return _VIEW.decode(written)
    fields = _FIELDS.decode(written).items()
    return {name: raw if _is_long(raw) else msgspec.json.decode(raw) for name, raw in fields}


def _is_long(written: msgspec.Raw) -> bool:
    return memoryview(written).nbytes >= LONG_BYTES


FORM: Final = Form(_read_told, VERSION)


def _far(address: str, told: Told) -> list[_Far]:
    """Return the decisions that were told; one that does not say when it was made is left out."""
    found = []
    for view in told.decisions:
        try:
            at = datetime.fromisoformat(text_of(view.get("at"))).timestamp()
        except ValueError:
            continue
        if text_of(view.get("id")).startswith(f"{told.replica}-"):
            found.append(_Far(address=address, view=view, at=at))
    return found


def _namespace(view: Mapping[str, object]) -> str:
    return namespace_of(text_of(view.get("pod")))
