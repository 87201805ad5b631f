"""The route /v1/unasked: pods bound without the extender's answer, and the likely causes."""

from dataclasses import asdict, replace
from typing import Final

import msgspec
from aiohttp import web

from extender.insight.replica_answers import AnswerFormat, ask_replicas
from extender.insight.replicas import ONE, Replicas
from extender.placement.bypass_causes import BypassEvidence, likely_causes, merge
from extender.placement.bypassed_pods import BypassedPods, BypassReport
from extender.server.json_answers import CONTENT_TYPE, json_answer
from extender.server.redaction import VIEWER, namespace_of, pod_key

PATH: Final = "/v1/unasked"

PEERS_PATH: Final = "/v1/peers/unasked"
"""Path for other replicas; its prefix requires a replica's client certificate."""
VERSION: Final = 1
"""Version of the format; it grows when an older replica would misread it."""


class _PeerAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """A replica's answer to another replica, not redacted.

    Attributes:
        version: version of the format.
        replica: short name of the answering replica.
        unjudged: pods bound before its start, which it cannot judge.
        evidence: its evidence about the other pods; times are seconds relative to the answer.
        asked_by: schedulers that call it.
    """

    version: int
    replica: str
    unjudged: int
    evidence: BypassEvidence
    asked_by: tuple[str, ...] = ()


_FORM: Final = AnswerFormat(msgspec.json.Decoder(_PeerAnswer).decode, VERSION)


class BypassedPodsTable:
    """Handlers of /v1/unasked, for clients and for other replicas.

    Args:
        bypassed_pods: judges bound pods.
        replicas: this replica and the others; one that has just started has no evidence itself.
    """

    def __init__(self, bypassed_pods: BypassedPods, replicas: Replicas = ONE) -> None:
        self._bypassed_pods = bypassed_pods
        self._replicas = replicas

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/unasked."""
        return [web.get(PATH, self._answer)]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route at which other replicas query evidence."""
        return [web.get(PEERS_PATH, self._answer_peer)]

    async def _answer(self, _: web.Request) -> web.StreamResponse:
        replies = await ask_replicas(self._replicas, PEERS_PATH, _FORM)
        answers = [each for _, each in replies.answers]
        own = self._bypassed_pods.report()
        known = merge((_from_now(own), *(each.evidence for each in answers)))
        examples = (group.example for group in known.pods if group.example)
        await VIEWER.get().learn({namespace_of(example) for example in examples})
        groups = [
            {
                "scheduler": group.scheduler,
                "resources": group.resources,
                "verdict": group.verdict,
                "count": group.count,
                "example": pod_key(group.example),
                "first_age_seconds": -group.first_at,
                "last_age_seconds": -group.last_at,
            }
            for group in known.pods
        ]
        return json_answer(
            {
                "unjudged": max((own.unjudged, *(each.unjudged for each in answers))),
                "bound": groups,
                "asked_by": sorted(
                    {*own.asked_by, *(name for each in answers for name in each.asked_by)}
                ),
                "likely_causes": [asdict(cause) for cause in likely_causes(known)],
                "unreachable": replies.unreachable,
            }
        )

    async def _answer_peer(self, _: web.Request) -> web.StreamResponse:
        """Answer another replica, which redacts the answer for its caller."""
        refusal = self._replicas.refusal()
        if refusal is not None:
            return refusal
        report = self._bypassed_pods.report()
        answer = _PeerAnswer(
            version=VERSION,
            replica=self._replicas.name,
            unjudged=report.unjudged,
            evidence=_from_now(report),
            asked_by=report.asked_by,
        )
        return web.Response(body=msgspec.json.encode(answer), content_type=CONTENT_TYPE)


def _from_now(report: BypassReport) -> BypassEvidence:
    """Convert times to seconds relative to now, as each process has its own monotonic clock."""
    pods = (
        replace(group, first_at=group.first_at - report.at, last_at=group.last_at - report.at)
        for group in report.bound
    )
    return replace(report.evidence, pods=tuple(pods))
