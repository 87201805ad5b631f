"""Store the inputs of a verdict with the identity of its devices, because rows are reused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from extender.core.decision.health import shown_by, throttling_in_words
from extender.core.decision.signals import busiest_signal
from extender.core.decision.verdicts import (
    DeviceVerdict,
    NodeVerdict,
    ReportedSignal,
    VerdictEvidence,
    explain,
    part_of,
)
from extender.core.devices.readings import Column, DeviceInfo, Signal
from extender.core.nodes.snapshot import Rows
from extender.core.steps import Steps, finish
from extender.fleet.columns import ReportedValues
from extender.fleet.store import DeviceStore

_PIECE_NODES: Final = 16
"""Nodes per cooperative step: 3 ms with eight devices each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEvidence:
    """Inputs of the verdicts on some nodes, with their devices.

    Attributes:
        evidence: the columns; one row per node, one column per device slot.
        infos: per device, node by node, its identity; None if no source reported it.
        sources: per device, source of its activity.
        age_seconds: per device, age of its activity at the decision; NaN without a reading.
        at: time of the decision, seconds since the epoch.
        shown: other reported values of each device, with source and time.
        health: source and time of the reading behind the health cause, by device number; only for
            devices with such a cause.
        is_late: collected at the binding, because the inputs of the decision were gone.
    """

    evidence: VerdictEvidence
    infos: tuple[DeviceInfo | None, ...]
    sources: tuple[str, ...]
    age_seconds: Column
    at: float
    shown: ReportedValues
    health: Mapping[int, tuple[str, float]]
    is_late: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return self.evidence.nodes

    def explain(self) -> tuple[NodeVerdict, ...]:
        """Return the verdict on each node, with the identity of its devices."""
        return tuple(finish(self.explain_in_steps()))

    def explain_in_steps(self) -> Steps[list[NodeVerdict]]:
        """Return the verdicts as in `explain`, in cooperative steps."""
        at = iter(range(len(self.infos)))
        verdicts: list[NodeVerdict] = []
        for start in range(0, len(self.nodes), _PIECE_NODES):
            verdicts += (
                replace(
                    verdict,
                    is_late=self.is_late,
                    devices=tuple(self._named(device, next(at)) for device in verdict.devices),
                )
                for verdict in explain(part_of(self.evidence, start, start + _PIECE_NODES))
            )
            yield
        return verdicts

    def _named(self, device: DeviceVerdict, at: int) -> DeviceVerdict:
        info, age = self.infos[at], float(self.age_seconds[at])
        if info is None or not info.uuid:
            return device
        reading = self.shown.reading(at)
        reasons = reading.get(Signal.CLOCK_EVENT_REASONS)
        return replace(
            device,
            index=info.index,
            uuid=info.uuid,
            gpu_instance_id=info.gpu_instance_id,
            source=self.sources[at],
            age_seconds=None if np.isnan(age) else age,
            temperature_celsius=reading.get(Signal.TEMPERATURE),
            memory_temperature_celsius=reading.get(Signal.MEMORY_TEMPERATURE),
            throttling=None if reasons is None else throttling_in_words(reasons),
            signals=self._signals(at, busiest_signal(reading, float(self.shown.rest_watts[at]))),
        )

    def _signals(self, at: int, busiest: Signal | None) -> dict[str, ReportedSignal]:
        """Return source and age of each reported signal of a device."""
        age = float(self.age_seconds[at])
        of_activity = ReportedSignal(
            self.sources[at], age, "" if busiest is None else busiest.value
        )
        reported = {} if np.isnan(age) else {"utilization": of_activity}
        for name, word in {**self.shown.sources(at), "health": self.health.get(at)}.items():
            if word is not None:
                reported[name] = ReportedSignal(word[0], max(self.at - word[1], 0.0))
        return reported


def place_evidence(evidence: VerdictEvidence, store: DeviceStore, now: float) -> PlacedEvidence:
    """Add the identity of the devices to the inputs of verdicts.

    Args:
        evidence: inputs from a snapshot whose rows still belong to the same devices.
        store: the devices.
        now: time of the decision, seconds since the epoch.
    """
    present = evidence.batch.present
    rows = evidence.batch.slots[present]
    sources, measured_at = store.activity_sources(rows)
    return PlacedEvidence(
        evidence=evidence,
        infos=tuple(map(store.info, rows.tolist())),
        sources=sources,
        age_seconds=np.maximum(now - measured_at, 0.0),
        at=now,
        shown=store.copy_reported(rows),
        health=_of_health(evidence, rows, evidence.batch.telemetry.cause[present], store),
    )


def _of_health(
    evidence: VerdictEvidence, rows: Rows, causes: Rows, store: DeviceStore
) -> dict[int, tuple[str, float]]:
    """Return source and time of the reading behind each health cause, by device number."""
    reported = {}
    for at in np.flatnonzero(causes).tolist():
        signals, row = shown_by(int(causes[at]), int(rows[at]), evidence.siblings)
        word = store.reported(signals, row)
        if word is not None:
            reported[at] = word
    return reported
