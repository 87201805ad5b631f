"""Tells of pods that were bound without our answer, and why, likely; by what all replicas know."""

from dataclasses import asdict, replace
from typing import Final

import msgspec
from aiohttp import web

from extender.core.unasked import Evidence, likely_causes, merge
from extender.observe.answers import CONTENT_TYPE, json_answer
from extender.observe.hearing import Form, hear
from extender.observe.replicas import ONE, Replicas
from extender.observe.seen import VIEWER, namespace_of, pod_key
from extender.placement.unasked import UnaskedPods, UnaskedReport

PATH: Final = "/v1/unasked"

PEERS_PATH: Final = "/v1/peers/unasked"
"""Where other replicas ask: under the prefix that only their certificates open."""
VERSION: Final = 1
"""Grows where an older replica would misread what is told."""


class _Told(msgspec.Struct, kw_only=True, frozen=True):
    """What a replica tells another; it hides nothing from a replica.

    Attributes:
        version: of this form.
        replica: who tells, short.
        unjudged: pods of which it does not know, since its start.
        evidence: what it knows of the others; times are in seconds, and 0 is when it tells.
        asked_by: the schedulers that ask it.
    """

    version: int
    replica: str
    unjudged: int
    evidence: Evidence
    asked_by: tuple[str, ...] = ()


_FORM: Final = Form(msgspec.json.Decoder(_Told).decode, VERSION)


class UnaskedTable:
    """The route /v1/unasked, and the one at which other replicas ask.

    Args:
        unasked: judges the pods that were bound.
        replicas: this one and the others: one that has just started has judged none.
    """

    def __init__(self, unasked: UnaskedPods, replicas: Replicas = ONE) -> None:
        self._unasked = unasked
        self._replicas = replicas

    def routes(self) -> list[web.RouteDef]:
        """Return the route for people and programs."""
        return [web.get(PATH, self._answer)]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route for other replicas."""
        return [web.get(PEERS_PATH, self._tell)]

    async def _answer(self, _: web.Request) -> web.StreamResponse:
        heard = await hear(self._replicas, PEERS_PATH, _FORM)
        told = [each for _, each in heard.told]
        own = self._unasked.report()
        known = merge((_from_now(own), *(each.evidence for each in told)))
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
                "unjudged": max((own.unjudged, *(each.unjudged for each in told))),
                "bound": groups,
                "asked_by": sorted(
                    {*own.asked_by, *(name for each in told for name in each.asked_by)}
                ),
                "likely_causes": [asdict(cause) for cause in likely_causes(known)],
                "unreachable": heard.unreachable,
            }
        )

    async def _tell(self, _: web.Request) -> web.StreamResponse:
        """Answer another replica, which hides what its caller may not see."""
        refusal = self._replicas.refusal()
        if refusal is not None:
            return refusal
        report = self._unasked.report()
        told = _Told(
            version=VERSION,
            replica=self._replicas.name,
            unjudged=report.unjudged,
            evidence=_from_now(report),
            asked_by=report.asked_by,
        )
        return web.Response(body=msgspec.json.encode(told), content_type=CONTENT_TYPE)


def _from_now(report: UnaskedReport) -> Evidence:
    """Return what is known with times from now on, for the clock is another in each process."""
    pods = (
        replace(group, first_at=group.first_at - report.at, last_at=group.last_at - report.at)
        for group in report.bound
    )
    return replace(report.evidence, pods=tuple(pods))
