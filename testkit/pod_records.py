"""Build parts of Pod objects, and reduce Pod objects to records."""

from extender.core.nodes.inventory import PodRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.sources.kubernetes.records import reduce_pod
from testkit.kube_objects import Object

NAMES = ResourceNames()
T0 = "2026-01-01T00:00:00Z"
T30 = "2026-01-01T00:00:30Z"
T61 = "2026-01-01T00:01:01Z"
EPOCH = "1970-01-01T00:00:00Z"
START = 1767225600.0


def reduced(raw: Object) -> PodRecord:
    record = reduce_pod(raw, NAMES, early_seconds=60)
    assert record is not None
    return record


def container(kind: str = "state", **state: Object) -> Object:
    return {"name": "main", kind: state}


def ended(
    code: int = 1, start: str | None = T0, end: str | None = T30, reason: str = "Error"
) -> Object:
    return {"exitCode": code, "startedAt": start, "finishedAt": end, "reason": reason}
