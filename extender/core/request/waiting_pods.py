"""Parse the requests of waiting pods from their stored records."""

from collections import OrderedDict
from dataclasses import replace
from typing import Final

from extender.core.devices.gpu_models import OTHER, normalize_model
from extender.core.nodes.host_resources import CPU, MEMORY, STORAGE, HostResources
from extender.core.nodes.inventory import PodRecord
from extender.core.policy import Policy
from extender.core.request.annotations import Annotation, parse_models
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import ParsedRequest, parse_request

_REMEMBERED: Final = 256
"""Cache size: number of different requests; most waiting pods have equal ones."""


class WaitingRequests:
    """Cached parser of pod records: equal requests are parsed once."""

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self._read: OrderedDict[object, ParsedRequest] = OrderedDict()

    def read(self, record: PodRecord, policy: Policy) -> ParsedRequest:
        """Return the result that `parse_request` gives for the pod's own object.

        Args:
            record: record of an unbound pod.
            policy: defaults for annotations that the pod does not set.
        """
        if self._policy is not policy:
            self._policy = policy
            self._read.clear()
        key = (
            tuple(record.resources.items()),
            record.containers,
            record.wishes,
            record.nominated_node,
            record.message if record.is_unscheduled else None,
            record.has_claims,
            record.host,
            record.has_preferences,
            record.group,
            record.memory_bytes,
            record.memory_share,
        )
        parsed = self._read.get(key)
        if parsed is None:
            parsed = self._read[key] = _parse(record, policy)
            if len(self._read) > _REMEMBERED:
                self._read.popitem(last=False)
        return parsed


def required_models(record: PodRecord) -> tuple[str, ...]:
    """Return the GPU models that an unbound pod accepts, normalized; () for all.

    They come from its annotation, else from its node selector or affinity.
    """
    wishes = dict(record.wishes)
    listed = wishes.get(Annotation.REQUIRE_MODELS, "")
    if listed:
        try:
            return tuple(map(normalize_model, parse_models(listed)))
        except ValueError:
            return ()
    is_wish = Annotation.PREFER_MODELS in wishes
    return () if is_wish or record.wanted_model in {"", OTHER} else (record.wanted_model,)


def _requests(host: HostResources) -> dict[str, str]:
    """Return the resource requests of an equivalent container."""
    return {
        CPU: f"{host.millicores}m",
        MEMORY: str(host.memory_bytes),
        STORAGE: str(host.storage_bytes),
    }


def _parse(record: PodRecord, policy: Policy) -> ParsedRequest:
    """Parse a pod's record through an equivalent Pod object."""
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
    # The record's resources are in the order of the setting.
    names = ResourceNames(tuple(limits)) if limits else ResourceNames()
    parsed = parse_request(pod, resources=names, defaults=policy, group=record.group)
    if parsed.request is None:
        return parsed
    memory_bytes = parsed.request.memory_bytes
    request = replace(
        parsed.request,
        containers=record.containers,
        has_preferences=record.has_preferences,
        # Its containers' limits are not in the equivalent pod.
        memory_bytes=record.memory_bytes if memory_bytes is None else memory_bytes,
        memory_share=record.memory_share,
    )
    return replace(parsed, request=request)
