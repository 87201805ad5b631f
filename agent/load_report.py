"""The report without anybody in it: how busy each device is, for pods of any tenant to read."""

from typing import Final

from agent.device_load import SIGNALS
from agent.report import Device, Report

_READ: Final = frozenset(SIGNALS)


def loads_of(report: Report) -> Report:
    """Return what `agent.device` reads of a report: no pod, no process, nothing of the machine.

    Example:
        >>> from agent.report import Tenant
        >>> held = Device(uuid="GPU-0", allocated_to=(Tenant(namespace="red", pod="a"),))
        >>> loads_of(Report(node="gpu-7", at=1.0, devices=(held,))).devices == (
        ...     Device(uuid="GPU-0"),
        ... )
        True
    """
    return Report(
        node=report.node,
        at=report.at,
        devices=tuple(
            Device(
                uuid=device.uuid,
                gpu_instance_id=device.gpu_instance_id,
                mig_uuids=device.mig_uuids,
                age_seconds=device.age_seconds,
            )
            for device in report.devices
        ),
        signals={name: column for name, column in report.signals.items() if name in _READ},
    )
