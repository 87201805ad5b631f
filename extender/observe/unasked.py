"""Tells of pods that were bound without our answer, and why, likely."""

from dataclasses import asdict

from aiohttp import web

from extender.observe.answers import json_answer
from extender.observe.seen import pod_key
from extender.placement.unasked import UnaskedPods

PATH = "/v1/unasked"


def unasked_routes(unasked: UnaskedPods) -> list[web.RouteDef]:
    """Return the route."""

    async def answer(_: web.Request) -> web.StreamResponse:
        report = unasked.report()
        groups = [
            {
                "scheduler": group.scheduler,
                "resources": group.resources,
                "verdict": group.verdict,
                "count": group.count,
                "example": pod_key(group.example),
                "first_age_seconds": report.at - group.first_at,
                "last_age_seconds": report.at - group.last_at,
            }
            for group in report.bound
        ]
        return json_answer(
            {
                "unjudged": report.unjudged,
                "bound": groups,
                "asked_by": report.asked_by,
                "likely_causes": [asdict(cause) for cause in report.causes],
            }
        )

    return [web.get(PATH, answer)]
