"""The route POST /v1/size: measured use of similar pods."""

from aiohttp import web

from extender.answers import routes
from extender.answers.holding import MeasuredUse, Size
from extender.core.nodes.pod_owners import kin_of, owner_key, similarity_of
from extender.core.untyped import mapping_of, text_of
from extender.fleet.fleet import Fleet
from extender.insight.what_if import read_pod
from extender.server.json_answers import json_answer
from extender.server.query_parameters import serve
from extender.server.redaction import VIEWER, sees


class SizeRoute:
    """Handler of POST /v1/size.

    Args:
        fleet: state of the fleet.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[web.RouteDef]:
        """Return the route POST /v1/size."""
        return [serve(routes.SIZE, self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        pod = await read_pod(request)
        if isinstance(pod, web.Response):
            return pod
        metadata = mapping_of(pod.get("metadata"))
        namespace = text_of(metadata.get("namespace")) or "default"
        kin = kin_of({**pod, "metadata": {**metadata, "namespace": namespace}})
        owner = request.query.get("owner")
        if owner:
            kin = (owner_key(namespace, owner, ""), *kin[1:])
        await VIEWER.get().learn({namespace})
        return json_answer(Size(measured=self._measured(kin) if sees(namespace) else None))

    def _measured(self, kin: tuple[str, ...]) -> MeasuredUse | None:
        """Return the measured use of the most similar pods; None without measurements."""
        found = self._fleet.measured_like(kin)
        if found is None:
            return None
        key, used = found
        return MeasuredUse(
            by=similarity_of(key), pods=len(used), memory_bytes=max(used), least_bytes=min(used)
        )
