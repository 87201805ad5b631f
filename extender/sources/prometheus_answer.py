"""Turns the worker's frames into readings, in steps small enough for the extender's loop."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from extender.core.readings import DeviceInfo, DeviceKey, History, Readings, Signal
from extender.sources.frames import Frame

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
        *parts, last = answer
        for part in parts:
            added.extend(_device_info(row) for row in part.header.get("added", ()))
            for uuid, gpu_instance_id, *pods in part.header.get("tenants", ()):
                changed[DeviceKey((uuid, gpu_instance_id))] = tuple(pods)
            await asyncio.sleep(0)
        self._change_devices(last.header["removed"], added)
        self._change_tenants(changed)
        block = np.frombuffer(last.body, dtype=np.float64)
        signals = [Signal(name) for name in last.header["signals"]]
        columns = block.reshape(len(signals) + 1, len(self._devices))
        readings = Readings(
            source=SOURCE,
            at=at,
            devices=self._devices,
            columns=dict(zip(signals, columns[:-1], strict=True)),
            measured_at=columns[-1],
            tenants=self._tenants if last.header["knows_tenants"] else None,
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


def _device_info(row: Sequence[object]) -> DeviceInfo:
    node, uuid, gpu_instance_id, index, model, mig_profile, driver_version = row
    return DeviceInfo(
        node=str(node),
        uuid=str(uuid),
        gpu_instance_id=str(gpu_instance_id),
        index=index if isinstance(index, int) else None,
        model=str(model),
        mig_profile=str(mig_profile),
        driver_version=str(driver_version),
    )


async def read_history(answer: Sequence[Frame]) -> History:
    """Read the worker's answer about the past."""
    devices: list[DeviceKey] = []
    *parts, last = answer
    for part in parts:
        devices.extend(
            DeviceKey((uuid, gpu_instance_id)) for uuid, gpu_instance_id in part.header["devices"]
        )
        await asyncio.sleep(0)
    times = np.array(last.header["times"], dtype=np.float64)
    block = np.frombuffer(last.body, dtype=np.float64)
    matrices = block.reshape(last.header["matrices"], len(times), len(devices))
    return History(
        times=times,
        devices=tuple(devices),
        utilization=matrices[0],
        xid=matrices[1] if len(matrices) > 1 else None,
    )
