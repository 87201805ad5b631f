"""What one source said of the devices at one time, before it is merged with anything else."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
"""One number for each device; NaN where the source did not say (the only use of NaN here)."""

DeviceKey = NewType("DeviceKey", tuple[str, str])
"""Identity of a device: (UUID of the card, GPU instance id or "" for the whole card)."""


GROWTH_SECONDS = 300.0
"""Errors on links are judged by how many came in so long."""

REMAPPED_SECONDS = 86_400.0
"""Remapped memory rows are judged by how many were added in so long."""

LARGEST_XID = 1000
"""NVIDIA numbers XIDs in the low hundreds; a larger one is no XID."""


class Signal(StrEnum):
    """What can be measured of a device; the value names the unit."""

    GPU_UTILIZATION = "gpu_utilization_ratio"
    """Share of the driver's last sample window in which a kernel ran (GPU_UTIL)."""
    GRAPHICS_ACTIVE = "graphics_active_ratio"
    """Share of time in which a compute or graphics context was busy (GR_ENGINE_ACTIVE)."""
    SM_ACTIVE = "sm_active_ratio"
    TENSOR_ACTIVE = "tensor_active_ratio"
    DRAM_ACTIVE = "dram_active_ratio"
    MEMORY_COPY_UTILIZATION = "memory_copy_utilization_ratio"
    MEMORY_USED = "memory_used_bytes"
    MEMORY_FREE = "memory_free_bytes"
    MEMORY_RESERVED = "memory_reserved_bytes"
    MEMORY_TOTAL = "memory_total_bytes"
    POWER = "power_watts"
    POWER_LIMIT = "power_limit_watts"
    TEMPERATURE = "temperature_celsius"
    MEMORY_TEMPERATURE = "memory_temperature_celsius"
    CLOCK_EVENT_REASONS = "clock_event_reasons"
    """Bit mask, as NVML's current clocks event reasons."""
    XID = "xid"
    """Number of the last XID error; sticky, 0 for none."""
    ROW_REMAP_FAILURE = "row_remap_failure"
    ROW_REMAP_PENDING = "row_remap_pending"
    UNCORRECTABLE_REMAPPED_ROWS = "uncorrectable_remapped_rows"
    ROWS_REMAPPED_LATELY = "uncorrectable_rows_remapped_in_a_day"
    """Growth of that, over the last `REMAPPED_SECONDS`."""
    ECC_DOUBLE_BIT_VOLATILE = "ecc_double_bit_volatile_errors"
    RETIRED_PAGES_PENDING = "retired_pages_pending"
    RETIRED_PAGES_SINGLE_BIT = "retired_pages_single_bit"
    RETIRED_PAGES_DOUBLE_BIT = "retired_pages_double_bit"
    RECOVERY_ACTION = "recovery_action"
    FABRIC_MANAGER_STATUS = "fabric_manager_status"
    HEALTH_STATUS = "health_status"
    """DCGM's health verdict: 0 pass, 10 warn, 20 fail."""
    PCIE_REPLAY_RATE = "pcie_replays_per_second"
    """Growth of a counter, over the last `GROWTH_SECONDS`; and so the next three."""
    NVLINK_REPLAY_RATE = "nvlink_replays_per_second"
    NVLINK_RECOVERY_RATE = "nvlink_recoveries_per_second"
    NVLINK_CRC_RATE = "nvlink_crc_errors_per_second"
    SRAM_THRESHOLD_EXCEEDED = "sram_threshold_exceeded"
    FABRIC_HEALTH = "fabric_health"
    """NVML's summary of the fabric's health: 1 healthy, 2 unhealthy, 3 limited capacity."""
    NVLINKS_DOWN = "nvlinks_down"
    """NVLinks that were up and are not any more, or that other cards of its model there have up."""
    INFOROM_CORRUPTED = "inforom_corrupted"
    TEMPERATURE_SHUTDOWN = "temperature_shutdown_celsius"
    """From here the card switches itself off."""
    TEMPERATURE_SLOWDOWN = "temperature_slowdown_celsius"
    """From here the card's clocks are held back."""
    PROCESSES = "processes"
    """How many processes use it, whoever's they are."""


NO_INSTANCES = "none"
"""Stands for the MIG profile of a card with MIG on and no instance: no pod can be given it."""

GROWING = frozenset(
    {
        Signal.PCIE_REPLAY_RATE,
        Signal.NVLINK_REPLAY_RATE,
        Signal.NVLINK_RECOVERY_RATE,
        Signal.NVLINK_CRC_RATE,
    }
)
"""Signals that are the growth of a counter."""

NVML_ONLY = frozenset(
    {
        Signal.SRAM_THRESHOLD_EXCEEDED,
        Signal.FABRIC_HEALTH,
        Signal.NVLINKS_DOWN,
        Signal.INFOROM_CORRUPTED,
        Signal.TEMPERATURE_SHUTDOWN,
        Signal.TEMPERATURE_SLOWDOWN,
        Signal.PROCESSES,
    }
)
"""Signals that the node agent alone can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a source knows of a device besides numbers.

    Attributes:
        node: name of the node, already matched against the cluster's nodes.
        uuid: UUID of the card; of the parent card for a MIG instance.
        gpu_instance_id: "" for a whole card.
        index: the source's index of the card on its node, None where it does not say.
        model: model as the source writes it (`NVIDIA H100 80GB HBM3`), "" where unknown.
        mig_profile: profile of the instance (`1g.10gb`), "" for a whole card, `NO_INSTANCES` for
            one with MIG on and no instance.
        driver_version: "" where unknown.
    """

    node: str
    uuid: str
    gpu_instance_id: str = ""
    index: int | None = None
    model: str = ""
    mig_profile: str = ""
    driver_version: str = ""

    @property
    def key(self) -> DeviceKey:
        """Identity of the device."""
        return DeviceKey((self.uuid, self.gpu_instance_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Which pods hold the devices of one node, as a source on that node says.

    Attributes:
        at: when that was so, seconds since the epoch.
        pods: pods (`namespace/name`) by device; what is not listed nobody holds.
        uids: UID by pod, for those of which the source knows it.
    """

    at: float
    pods: Mapping[DeviceKey, tuple[str, ...]]
    uids: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What only a source that runs on the nodes themselves can say, and of these nodes alone.

    Attributes:
        nodes: the nodes: the answer is complete for them, and says nothing of others.
        news: those of them of which something has changed that may change a decision.
        holders: by node, who holds its devices; None where the source cannot tell.
        mean: utilization of each device on average since the source last said it, NaN where it
            does not: what the window takes in place of the latest value.
        mean_square: likewise, of its square.
        is_foreign: whether the source knows that somebody outside Kubernetes uses the device.
        xid_age: how long before `measured_at` the XID happened, in seconds, NaN where unknown.
        devices: how many devices the source sees on all nodes.
        replicas: shares that the kubelet offers of each device, by node and MIG profile as
            resources write it; what is missing the source cannot tell.
        foreign_bytes: memory of each device that processes outside Kubernetes have in use, NaN
            where it cannot tell; None where it tells of none.
    """

    nodes: tuple[str, ...]
    news: frozenset[str]
    holders: Mapping[str, Holders | None]
    mean: Column
    mean_square: Column
    is_foreign: npt.NDArray[np.bool_]
    xid_age: Column
    devices: int = 0
    replicas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    foreign_bytes: Column | None = None


@dataclass(frozen=True, slots=True)
class ChangedTenants:
    """Where an answer's tenants are not those of an earlier one.

    Attributes:
        since: the tenants of the earlier answer, the very same object.
        devices: all that have other pods now, or none any more.
    """

    since: Mapping[DeviceKey, tuple[str, ...]]
    devices: Collection[DeviceKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """One answer of one source, complete for every device that it sees.

    Attributes:
        source: the source's name ("prometheus").
        at: when the source was asked, seconds since the epoch.
        devices: the devices, in the order of the columns.
        columns: by signal, one value per device; NaN where missing.
        measured_at: per device, when its values were measured (scrape time less the exporter's
            collection interval), seconds since the epoch; NaN where nothing was measured.
        tenants: by device, pods (`namespace/name`) that the source saw holding it; a shared
            device has several. None where the source cannot tell at all.
        tenants_at: when it was asked for them; None for `at`.
        changed_tenants: what has changed of them; None where the source does not say.
        shares: now and then: what each pod (`namespace/name`) holds of the memory of a device that
            pods share, in bytes.
        divided: likewise: devices of which a pod holds a share by its name (`GPU-…::3`): they are
            sold in shares, whether or not other pods hold any.
        unmatched_series: series whose labels named no node of the cluster.
        unmatched_example: labels of one of them, for people; "" where there is none.
        own: where the source runs on the nodes: what it says besides, and of which nodes.
    """

    source: str
    at: float
    devices: tuple[DeviceInfo, ...]
    columns: Mapping[Signal, Column]
    measured_at: Column
    tenants: Mapping[DeviceKey, tuple[str, ...]] | None
    tenants_at: float | None = None
    changed_tenants: ChangedTenants | None = None
    shares: tuple[tuple[DeviceKey, str, int], ...] = ()
    divided: tuple[DeviceKey, ...] = ()
    unmatched_series: int = 0
    unmatched_example: str = ""
    own: Own | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Past readings that fill the windows once at start, oldest step first.

    Attributes:
        times: time of each step, seconds since the epoch.
        devices: identity of each device, in the order of the arrays' second axis.
        utilization: ratio per (step, device); NaN where missing.
        xid: last XID per (step, device); NaN where missing; None where it was not asked for.
    """

    times: Column
    devices: tuple[DeviceKey, ...]
    utilization: npt.NDArray[np.float64]
    xid: npt.NDArray[np.float64] | None = None
