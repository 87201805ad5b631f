"""What pods that wait ask for, read from the little that is kept of them."""

from collections import OrderedDict
from dataclasses import replace
from typing import Final

from extender.core.host_resources import CPU, MEMORY, HostResources
from extender.core.inventory import PodRecord
from extender.core.policy import Policy
from extender.core.request import ParsedRequest, parse_request
from extender.core.resources import ResourceNames

REMEMBERED: Final = 256
"""So many pods that say different things; most say the same as many others."""


class WaitingRequests:
    """Reads what pods ask for from their records, once for all that say the same."""

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self._read: OrderedDict[object, ParsedRequest] = OrderedDict()

    def read(self, record: PodRecord, policy: Policy) -> ParsedRequest:
        """Return what `parse_request` reads in the pod's own object.

        Args:
            record: of a pod that is not bound.
            policy: what holds where the pod does not say.
        """
        if self._policy is not policy:
            self._policy = policy
            self._read.clear()
        said = (
            tuple(record.resources.items()),
            record.wishes,
            record.nominated_node,
            record.message if record.is_unscheduled else None,
            record.has_claims,
            record.host,
            record.has_preferences,
        )
        parsed = self._read.get(said)
        if parsed is None:
            parsed = self._read[said] = _parse(record, policy)
            if len(self._read) > REMEMBERED:
                self._read.popitem(last=False)
        return parsed


def _requests(host: HostResources) -> dict[str, str]:
    """Return CPU and memory as a container requests them."""
    return {CPU: f"{host.millicores}m", MEMORY: str(host.memory_bytes)}


def _parse(record: PodRecord, policy: Policy) -> ParsedRequest:
    """Read a pod's record as kube-scheduler's questions are read."""
    limits = {resource: str(count) for resource, count in record.resources.items()}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pod = {
        "metadata": {"annotations": dict(record.wishes)},
        "spec": {
            "containers": [{"resources": {"limits": limits, "requests": _requests(record.host)}}],
            "resourceClaims": [{"name": "one"}] if record.has_claims else [],
        },
        "status": {
            "nominatedNodeName": record.nominated_node,
            "conditions": [condition | {"message": record.message}] * record.is_unscheduled,
        },
    }
    # The record has its resources in the order of the setting.
    names = ResourceNames(tuple(limits)) if limits else ResourceNames()
    parsed = parse_request(pod, resources=names, defaults=policy)
    if parsed.request is None or not record.has_preferences:
        return parsed
    return replace(parsed, request=replace(parsed.request, has_preferences=True))
