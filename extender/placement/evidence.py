"""What a verdict rested on, with the devices' names: another may have a device's row tomorrow."""

from dataclasses import dataclass, replace

import numpy as np

from extender.core.explain import DeviceVerdict, Evidence, NodeVerdict, explain
from extender.core.readings import Column, DeviceInfo
from extender.fleet.store import DeviceStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEvidence:
    """What the verdict on some nodes was made from, and which devices it speaks of.

    Attributes:
        evidence: the columns; one row per node, one column per device slot.
        infos: per device, node by node, what its source says of it; None where none did.
        sources: per device, who measured it.
        age_seconds: per device, how long before the decision; NaN where nobody did.
    """

    evidence: Evidence
    infos: tuple[DeviceInfo | None, ...]
    sources: tuple[str, ...]
    age_seconds: Column

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that it speaks of."""
        return self.evidence.nodes

    def explain(self) -> tuple[NodeVerdict, ...]:
        """Put the verdict on each node in words, its devices by their names."""
        at = iter(range(len(self.infos)))
        return tuple(
            replace(
                verdict,
                devices=tuple(self._named(device, next(at)) for device in verdict.devices),
            )
            for verdict in explain(self.evidence)
        )

    def _named(self, device: DeviceVerdict, at: int) -> DeviceVerdict:
        info, age = self.infos[at], float(self.age_seconds[at])
        if info is None or not info.uuid:
            return device
        return replace(
            device,
            index=info.index,
            uuid=info.uuid,
            gpu_instance_id=info.gpu_instance_id,
            source=self.sources[at],
            age_seconds=None if np.isnan(age) else age,
        )


def place_evidence(evidence: Evidence, store: DeviceStore, now: float) -> PlacedEvidence:
    """Note which devices some evidence speaks of.

    Args:
        evidence: from a snapshot whose rows are still these devices'.
        store: the devices.
        now: when the decision was made, seconds since the epoch.
    """
    rows = evidence.batch.slots[evidence.batch.present]
    sources, measured_at = store.shown(rows)
    return PlacedEvidence(
        evidence=evidence,
        infos=tuple(map(store.info, rows.tolist())),
        sources=sources,
        age_seconds=np.maximum(now - measured_at, 0.0),
    )
