"""Device stores for tests: every device is a free, idle H100."""

from dataclasses import replace

import numpy as np

from extender.core.decision.signals import estimate
from extender.core.devices.readings import DeviceInfo, Readings, Signal
from extender.core.nodes.snapshot import Telemetry
from extender.core.policy import Policy
from extender.fleet.device_holders import WHOLE_DEVICE, DeviceUse
from extender.fleet.store import DeviceStore
from testkit.builders import GIB, NOW

NAN = float("nan")
CARD = DeviceInfo(node="node", uuid="GPU-0", index=0, model="NVIDIA H100 80GB HBM3")
INSTANCE = replace(CARD, gpu_instance_id="7", mig_profile="1g.10gb")


def readings(
    *devices: DeviceInfo, at: float = NOW, measured_at: float | None = None, **values: float
) -> Readings:
    """Return one answer with readings; every device is idle by default."""
    count = len(devices)
    said = {"GRAPHICS_ACTIVE": 0.0, "MEMORY_USED": 0.0, "MEMORY_FREE": 80 * GIB, **values}
    return Readings(
        source="prometheus",
        at=at,
        devices=devices,
        columns={Signal[name]: np.full(count, value) for name, value in said.items()},
        measured_at=np.full(count, at if measured_at is None else measured_at),
        tenants=None,
    )


def store_of(*devices: DeviceInfo, **values: float) -> DeviceStore:
    """Return a store with one reading of these devices, none of which a pod holds."""
    store = DeviceStore(Policy())
    store.apply(readings(*devices, **values), NOW)
    for row in range(len(store)):
        free(store, row)
    return store


def free(store: DeviceStore, row: int, *, for_sure: bool = True) -> None:
    store.set_tenancy(
        [
            DeviceUse(
                row=row,
                has_tenants=False,
                is_unheld=True,
                is_free_for_sure=for_sure,
                declared_bytes=0 if for_sure else WHOLE_DEVICE,
                has_undeclared=False,
                is_filling=False,
            )
        ]
    )


def hold(store: DeviceStore, row: int) -> None:
    """Let a pod hold all of a device."""
    store.set_tenancy(
        [
            DeviceUse(
                row=row,
                has_tenants=True,
                is_unheld=False,
                is_free_for_sure=False,
                declared_bytes=WHOLE_DEVICE,
                has_undeclared=False,
                is_filling=False,
            )
        ]
    )


def row_of(store: DeviceStore, info: DeviceInfo = CARD) -> int:
    row = store.row_of(info.key)
    assert row is not None
    return row


def estimated(store: DeviceStore, at: float = NOW) -> Telemetry:
    return estimate(store.evidence(), Policy(), at)[0]


def infos(store: DeviceStore, node: str = "node") -> list[DeviceInfo | None]:
    return [store.info(row) for row in store.rows_of_node(node)]
