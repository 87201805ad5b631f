"""Prometheus collector whose rows are applied in the same way as in the extender."""

import asyncio
import json
from collections.abc import Mapping
from typing import Final

from extender.core.devices.readings import DeviceKey, Signal
from extender.settings.sources import Prometheus
from extender.sources.prometheus.collector import Collector, Round
from extender.sources.prometheus.dcgm_devices import DeviceRow
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.responses import Rows

NOW: Final = 1_800_000_000.0
NODES: Final = NodeIdentity(
    names=frozenset(
        {"gpu-1", "gpu-2", "gpu-h100-01", "gpu-a100-mig-03", "ip-10-0-31-7.ec2.internal"}
    ),
    addresses={"10.244.3.17": "gpu-1"},
    exporter_pods=dict.fromkeys(("gpu-metrics-x7z", "gpu-operator/gpu-metrics-x7z"), "gpu-1"),
)
EXPORTER: Final = {
    "namespace": "gpu-operator",
    "pod": "nvidia-dcgm-exporter-7tk2x",
    "container": "nvidia-dcgm-exporter",
    "service": "nvidia-dcgm-exporter",
    "job": "nvidia-dcgm-exporter",
    "instance": "10.244.3.17:9400",
}
PLAIN: Final = {"job": "gpus", "instance": "somewhere:9400"}


def vector_of(values: Mapping[str, float]) -> Rows:
    """Return the rows of a vector from values by GPU UUID."""
    result = [
        {"metric": {"UUID": uuid}, "value": [1.5, f"{value:g}"]} for uuid, value in values.items()
    ]
    return Rows(json.dumps(result, separators=(",", ":")).encode())


class CollectorState:
    """Collector with the rows and tenants of its rounds so far."""

    def __init__(self, url: str, **values: object) -> None:
        settings = {"url": url, "timeout_seconds": 2, "exporter_interval_seconds": 30}
        self.collector = Collector(Prometheus.model_validate({**settings, **values}))
        self.rows: list[DeviceRow] = []
        self.tenants: dict[DeviceKey, tuple[str, ...]] = {}
        self.found: Round

    async def round(self, now: float) -> Round:
        self.found = await asyncio.to_thread(self.collector.collect, NODES, now)
        gone = set(self.found.removed)
        self.rows = [row for at, row in enumerate(self.rows) if at not in gone]
        self.rows += self.found.added
        for key, pods in (self.found.tenants or {}).items():
            self.tenants[key] = pods
        return self.found

    def value(self, signal: Signal, uuid: str = "GPU-1", instance: str = "") -> float:
        keys = [row.key for row in self.rows]
        return float(self.found.columns[signal][keys.index(DeviceKey((uuid, instance)))])

    def held(self) -> dict[str, tuple[str, ...]]:
        return {key[0][-1] + key[1]: pods for key, pods in self.tenants.items() if pods}
