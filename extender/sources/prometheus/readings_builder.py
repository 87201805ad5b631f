"""Turns the worker's frames into readings, in steps small enough for the extender's loop."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from sys import intern

import numpy as np

from extender.core.devices.readings import (
    ChangedTenants,
    Column,
    DeviceInfo,
    DeviceKey,
    History,
    Readings,
    Signal,
)
from extender.sources.prometheus.frames import Frame

SOURCE = "prometheus"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What a round says besides readings.

    Attributes:
        unmatched_series: series whose labels named no node.
        unmatched_example: labels of one of them.
        failed: queries that failed, by metric, with the reason.
        partial_answers: answers that the server itself called incomplete.
        warning: what it said.
    """

    unmatched_series: int
    unmatched_example: str
    failed: Mapping[str, str]
    partial_answers: int
    warning: str


class ReadingsBuilder:
    """Follows the worker's changes; its memory and the worker's are of one age.

    Owned by one task. What it hands out is never changed afterwards.
    """

    def __init__(self) -> None:
        self._devices: tuple[DeviceInfo, ...] = ()
        self._tenants: dict[DeviceKey, tuple[str, ...]] = {}

    async def apply(self, answer: Sequence[Frame], at: float) -> tuple[Readings, RoundReport]:
        """Apply one answer, which is complete.

        Args:
            answer: the frames.
            at: when the source was asked.
        """
        added: list[DeviceInfo] = []
        changed: dict[DeviceKey, tuple[str, ...]] = {}
        columns: dict[Signal, Column] = {}
        shares: list[tuple[DeviceKey, str, int]] = []
        divided: list[DeviceKey] = []
        *parts, last = answer
        for part in parts:
            added.extend(_device_info(row) for row in part.header.get("added", ()))
            for uuid, gpu_instance_id, *pods in part.header.get("tenants", ()):
                changed[DeviceKey((uuid, gpu_instance_id))] = tuple(pods)
            for uuid, gpu_instance_id, pod, held in part.header.get("shares", ()):
                shares.append((DeviceKey((uuid, gpu_instance_id)), pod, held))
            divided.extend(DeviceKey((uuid, of)) for uuid, of in part.header.get("divided", ()))
            if "signal" in part.header:
                columns[Signal(part.header["signal"])] = _column(part)
            await asyncio.sleep(0)
        self._change_devices(last.header["removed"], added)
        before = self._tenants
        self._change_tenants(changed)
        readings = Readings(
            source=SOURCE,
            at=at,
            devices=self._devices,
            columns=columns,
            measured_at=_column(last),
            tenants=self._tenants if last.header["knows_tenants"] else None,
            tenants_at=last.header["tenants_at"],
            changed_tenants=ChangedTenants(before, changed.keys()),
            shares=tuple(shares),
            divided=tuple(divided),
            unmatched_series=last.header["unmatched_series"],
            unmatched_example=last.header["unmatched_example"],
        )
        report = RoundReport(
            unmatched_series=readings.unmatched_series,
            unmatched_example=readings.unmatched_example,
            failed=last.header["failed"],
            partial_answers=last.header["partial_answers"],
            warning=last.header["warning"],
        )
        return readings, report

    def _change_devices(self, removed: Sequence[int], added: Sequence[DeviceInfo]) -> None:
        """Keep the very same tuple while nothing changes: whoever compares it sees that at once."""
        if removed:
            gone = set(removed)
            kept = (device for at, device in enumerate(self._devices) if at not in gone)
            self._devices = (*kept, *added)
        elif added:
            self._devices = (*self._devices, *added)

    def _change_tenants(self, changed: Mapping[DeviceKey, tuple[str, ...]]) -> None:
        if not changed:
            return
        tenants = {**self._tenants, **changed}
        for key, pods in changed.items():
            if not pods:
                del tenants[key]
        self._tenants = tenants


def _column(frame: Frame) -> Column:
    return np.frombuffer(frame.body, dtype=np.float64)


def _device_info(row: Sequence[object]) -> DeviceInfo:
    node, uuid, gpu_instance_id, index, model, mig_profile, driver_version = row
    # Each frame has its own copy of texts that are the same for many devices.
    return DeviceInfo(
        node=intern(str(node)),
        uuid=str(uuid),
        gpu_instance_id=intern(str(gpu_instance_id)),
        index=index if isinstance(index, int) else None,
        model=intern(str(model)),
        mig_profile=intern(str(mig_profile)),
        driver_version=intern(str(driver_version)),
    )


async def read_history(answer: Sequence[Frame]) -> AsyncIterator[History]:
    """Read the worker's answer about the past, some devices at a time; `answer` is used up."""
    first, *parts = answer
    times = np.array(first.header["times"], dtype=np.float64)
    parts.reverse()
    while parts:
        part = parts.pop()
        devices = tuple(
            DeviceKey((uuid, gpu_instance_id))
            for uuid, gpu_instance_id in part.header.get("devices", ())
        )
        if devices:
            block = np.frombuffer(part.body, dtype=np.float32).astype(np.float64)
            matrices = block.reshape(first.header["matrices"], len(devices), len(times))
            yield History(
                times=times,
                devices=devices,
                utilization=matrices[0].T,
                xid=matrices[1].T if len(matrices) > 1 else None,
            )
        await asyncio.sleep(0)
