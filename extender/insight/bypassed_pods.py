"""The route /v1/unasked: pods bound without the extender's answer, and the likely causes."""

from dataclasses import asdict
from typing import Final

from aiohttp import web

from extender.placement.bypass_causes import likely_causes
from extender.placement.bypassed_pods import BypassedPods
from extender.server.json_answers import json_answer
from extender.server.redaction import VIEWER, namespace_of, pod_key

_PATH: Final = "/v1/unasked"
_SHOWN: Final = ("scheduler", "resources", "verdict", "count")


class BypassedPodsTable:
    """Handler of /v1/unasked: each replica judges, and reports, every pod that it saw waiting."""

    def __init__(self, bypassed_pods: BypassedPods) -> None:
        self._bypassed_pods = bypassed_pods

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/unasked."""
        return [web.get(_PATH, self._answer)]

    async def _answer(self, _: web.Request) -> web.StreamResponse:
        report = self._bypassed_pods.report()
        examples = (group.example for group in report.pods if group.example)
        await VIEWER.get().learn({namespace_of(example) for example in examples})
        groups = [
            {
                **{name: getattr(group, name) for name in _SHOWN},
                "example": pod_key(group.example),
                "first_age_seconds": report.at - group.first_at,
                "last_age_seconds": report.at - group.last_at,
            }
            for group in report.pods
        ]
        return json_answer(
            {
                "unjudged": report.unjudged,
                "bound": groups,
                "asked_by": sorted(report.asked_by),
                "likely_causes": [asdict(cause) for cause in likely_causes(report)],
            }
        )
