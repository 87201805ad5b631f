"""The route /v1/bypassed: pods bound without the extender's answer, and the likely causes."""

from dataclasses import asdict

from aiohttp import web

from extender.answers import routes
from extender.answers.pods import BypassedAnswer, BypassedGroup, Cause
from extender.placement.bypassed_pods import BypassedPods, likely_causes
from extender.server.json_api import json_answer
from extender.server.redaction import VIEWER, namespace_of, pod_key


class BypassedPodsTable:
    """Handler of /v1/bypassed: each replica classifies and reports the pods that it saw waiting."""

    def __init__(self, bypassed_pods: BypassedPods) -> None:
        self._bypassed_pods = bypassed_pods

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/bypassed."""
        return [web.get(routes.BYPASSED.path, self._answer)]

    async def _answer(self, _: web.Request) -> web.StreamResponse:
        report = self._bypassed_pods.report()
        examples = (group.example for group in report.pods if group.example)
        await VIEWER.get().learn({namespace_of(example) for example in examples})
        groups = [
            BypassedGroup(
                scheduler=group.scheduler,
                resources=list(group.resources),
                verdict=group.verdict,
                count=group.count,
                example=pod_key(group.example),
                first_age_seconds=report.at - group.first_at,
                last_age_seconds=report.at - group.last_at,
            )
            for group in report.pods
        ]
        return json_answer(
            BypassedAnswer(
                unjudged=report.unjudged,
                bound=groups,
                schedulers=sorted(report.schedulers),
                likely_causes=[Cause(**asdict(cause)) for cause in likely_causes(report)],
            )
        )
