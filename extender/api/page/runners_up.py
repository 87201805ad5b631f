"""The route /v1/page/lost: why the runner-up lost, for the decisions in sight on a page.

A full explanation of a decision takes ten milliseconds. This compares only the scores of the first
two nodes, which both passed.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Final
from urllib.parse import urlencode

import orjson
from aiohttp import web

from extender.core.decision.verdicts import NodeScore, only, scores_of
from extender.core.untyped import mapping_of, text_of
from extender.insight.explain_views import lost_by
from extender.insight.replicas import Replicas
from extender.insight.views import Json
from extender.placement.history import DecisionHistory, DecisionRecord
from extender.runtime.decoding import MalformedError, decode_with
from extender.server.json_answers import CONTENT_TYPE, json_answer
from extender.server.query_parameters import QueryError, check_parameters, refusing
from extender.server.redaction import VIEWER, namespace_of, sees

PATH: Final = "/v1/page/lost"
PEERS_PATH: Final = "/v1/peers/lost"
"""Path for other replicas; its prefix requires a replica's client certificate."""
MOST_IDS: Final = 50
"""Largest number of decisions in one request: no screen shows more."""
MOST_KEPT: Final = 1000

Told = tuple[str, str | None]
"""A pod's `namespace/name`, and the reason why the runner-up lost."""


class Lost:
    """Handlers of /v1/page/lost, for pages and for other replicas.

    Args:
        history: decisions of this replica.
        replicas: this replica and the others.
        yield_control: yields to webhook requests.
    """

    def __init__(
        self,
        history: DecisionHistory,
        replicas: Replicas,
        yield_control: Callable[[], Awaitable[None]],
    ) -> None:
        self._history = history
        self._replicas = replicas
        self._yield_control = yield_control
        self._cache: OrderedDict[int, Told] = OrderedDict()

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/page/lost."""
        return [web.get(PATH, refusing(self._answer))]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route at which other replicas query explanations of runners-up."""
        return [web.get(PEERS_PATH, refusing(self._answer_peer))]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        ids = _read_ids(request)
        ours = [one for one in ids if self._replicas.is_ours(one)]
        lost = await self._own(ours)
        theirs = [one for one in ids if not self._replicas.is_ours(one)]
        if theirs:
            query = urlencode({"ids": ",".join(theirs)})
            answers = await self._replicas.others.ask(f"{PEERS_PATH}?{query}")
            for body in answers.values():
                lost |= {name: one for name, one in _read(body).items() if name in theirs}
            await VIEWER.get().learn({namespace_of(pod) for pod, _ in lost.values()})
        seen: Json = {name: why for name, (pod, why) in lost.items() if sees(namespace_of(pod))}
        return json_answer({"lost_by": seen})

    async def _answer_peer(self, request: web.Request) -> web.StreamResponse:
        """Answer another replica, which redacts the answer for its caller."""
        refusal = self._replicas.refusal()
        if refusal is not None:
            return refusal
        lost = await self._own(one for one in _read_ids(request) if self._replicas.is_ours(one))
        return web.Response(body=orjson.dumps(lost), content_type=CONTENT_TYPE)

    async def _own(self, ids: Iterable[str]) -> dict[str, Told]:
        """Explain decisions of this replica."""
        found: dict[str, Told] = {}
        for name in ids:
            number = name.rpartition("-")[2]
            record = self._history.get(int(number)) if number.isdecimal() else None
            if record is not None:
                found[name] = await self._explain(record)
        return found

    async def _explain(self, record: DecisionRecord) -> Told:
        cached = self._cache.get(record.number)
        if cached is not None:
            return cached
        await self._yield_control()
        order = record.decision.order[:2].tolist()
        why = None
        if len(order) > 1:
            first, second = (record.decision.candidates[at] for at in order)
            scores = _scores(record, first, second)
            if second in scores:
                why = lost_by(scores.get(first), scores[second])
        reason = self._cache[record.number] = record.pod.key, why
        if len(self._cache) > MOST_KEPT:
            self._cache.popitem(last=False)
        return reason


def _scores(record: DecisionRecord, *nodes: str) -> dict[str, NodeScore]:
    """Return the recorded scores of nodes; the lowest if a node has several."""
    found: dict[str, NodeScore] = {}
    for part in record.evidence:
        here = [node for node in nodes if node in part.nodes]
        for one in scores_of(only(part.evidence, *here)) if here else ():
            other = found.get(one.node)
            if other is None or one.score < other.score:
                found[one.node] = one
    return found


def _read_ids(request: web.Request) -> list[str]:
    """Parse the requested decision ids.

    Raises:
        QueryError: there are none or too many.
    """
    check_parameters(request.query, frozenset({"ids"}))
    text = request.query.get("ids", "")
    ids = [one for one in text.split(",") if one]
    if not 1 <= len(ids) <= MOST_IDS:
        raise QueryError("ids", text, f"must be 1 to {MOST_IDS} decision ids, separated by commas")
    return ids


def _read(body: bytes | None) -> dict[str, Told]:
    """Decode another replica's answer; empty if it is malformed."""
    try:
        document = mapping_of(decode_with(orjson.loads, body or b"{}"))
    except MalformedError:
        return {}
    return {
        name: (text_of(one[0]), text_of(one[1]) or None)
        for name, one in document.items()
        if isinstance(one, list) and len(one) == 2  # noqa: PLR2004 - pod and reason
    }
