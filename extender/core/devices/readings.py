"""Readings of one source at one time, before they are merged with other sources."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

from extender.core.devices.topology import Place

Column = npt.NDArray[np.float64]
"""One number per device; NaN for a missing value (the only use of NaN here)."""

DeviceKey = NewType("DeviceKey", tuple[str, str])
"""Identity of a device: (UUID of the card, GPU instance id or "" for the whole card)."""


GROWTH_SECONDS = 300.0
"""Period over which the rate of link errors is measured."""

REMAPPED_SECONDS = 86_400.0
"""Period over which newly remapped memory rows are counted."""

LARGEST_XID = 1000
"""Larger numbers are no XIDs: NVIDIA's are in the low hundreds."""


class Signal(StrEnum):
    """Measured quantities of a device; each value names its unit."""

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
    """Bit mask of NVML's current clocks event reasons."""
    XID = "xid"
    """Number of the last XID error; sticky, 0 for none."""
    ROW_REMAP_FAILURE = "row_remap_failure"
    ROW_REMAP_PENDING = "row_remap_pending"
    UNCORRECTABLE_REMAPPED_ROWS = "uncorrectable_remapped_rows"
    ROWS_REMAPPED_LATELY = "uncorrectable_rows_remapped_in_a_day"
    """Growth of `UNCORRECTABLE_REMAPPED_ROWS` over the last `REMAPPED_SECONDS`."""
    ECC_DOUBLE_BIT_VOLATILE = "ecc_double_bit_volatile_errors"
    RETIRED_PAGES_PENDING = "retired_pages_pending"
    RETIRED_PAGES_SINGLE_BIT = "retired_pages_single_bit"
    RETIRED_PAGES_DOUBLE_BIT = "retired_pages_double_bit"
    RECOVERY_ACTION = "recovery_action"
    FABRIC_MANAGER_STATUS = "fabric_manager_status"
    HEALTH_STATUS = "health_status"
    """DCGM's health verdict: 0 pass, 10 warn, 20 fail."""
    PCIE_REPLAY_RATE = "pcie_replays_per_second"
    """Rate of a counter over the last `GROWTH_SECONDS`, like the next three."""
    NVLINK_REPLAY_RATE = "nvlink_replays_per_second"
    NVLINK_RECOVERY_RATE = "nvlink_recoveries_per_second"
    NVLINK_CRC_RATE = "nvlink_crc_errors_per_second"
    SRAM_THRESHOLD_EXCEEDED = "sram_threshold_exceeded"
    FABRIC_HEALTH = "fabric_health"
    """NVML's summary of fabric health: 1 healthy, 2 unhealthy, 3 limited capacity."""
    NVLINKS_DOWN = "nvlinks_down"
    """Number of NVLinks down that were up before, or that are up on other cards of its model and
    node."""
    INFOROM_CORRUPTED = "inforom_corrupted"
    TEMPERATURE_SHUTDOWN = "temperature_shutdown_celsius"
    """Temperature at which the card shuts down."""
    TEMPERATURE_SLOWDOWN = "temperature_slowdown_celsius"
    """Temperature from which the card reduces its clocks."""
    PROCESSES = "processes"
    """Number of processes on the device, of any owner."""


NO_INSTANCES = "none"
"""MIG profile of a card with MIG enabled and no instance: no pod can get it."""

GROWING = frozenset(
    {
        Signal.PCIE_REPLAY_RATE,
        Signal.NVLINK_REPLAY_RATE,
        Signal.NVLINK_RECOVERY_RATE,
        Signal.NVLINK_CRC_RATE,
    }
)
"""Signals that are rates of a counter."""

_NVML_ONLY = frozenset(
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
"""Signals that only the node agent reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Static properties of a device from one source.

    Attributes:
        node: name of the node, already matched against the cluster's nodes.
        uuid: UUID of the card; of the parent card for a MIG instance.
        gpu_instance_id: "" for a whole card.
        index: the source's index of the card on its node, None if not reported.
        model: model name as reported (`NVIDIA H100 80GB HBM3`), "" if unknown.
        mig_profile: profile of the instance (`1g.10gb`), "" for a whole card, `NO_INSTANCES` for
            a card with MIG enabled and no instance.
        driver_version: "" if unknown.
        place: position of the device in its node, None if not reported.
    """

    node: str
    uuid: str
    gpu_instance_id: str = ""
    index: int | None = None
    model: str = ""
    mig_profile: str = ""
    driver_version: str = ""
    place: Place | None = None

    @property
    def key(self) -> DeviceKey:
        """Identity of the device."""
        return DeviceKey((self.uuid, self.gpu_instance_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Device holders of one node: the pods on each device, reported by a source on that node.

    Attributes:
        at: time of the report, seconds since the epoch.
        pods: pods (`namespace/name`) by device; no pod holds a device that is not listed.
        uids: UID by pod, if known to the source.
    """

    at: float
    pods: Mapping[DeviceKey, tuple[str, ...]]
    uids: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """Additional data from a source that runs on the nodes themselves, such as the node agent.

    Attributes:
        nodes: the reporting nodes; the answer is complete for them, and has no other nodes.
        news: nodes with a change that may change a decision.
        holders: device holders by node; None if the source cannot report them.
        mean: mean utilization of each device since the source last reported it, NaN if not
            reported. The window stores it instead of the latest value.
        mean_square: mean of the squared utilization over the same time.
        is_foreign: whether the source sees a process outside Kubernetes on the device.
        xid_age: seconds from the XID to `measured_at`, NaN if unknown.
        devices: number of devices that the source sees on all nodes.
        replicas: shares per device offered by the kubelet, by node and by MIG profile in the
            spelling of resource names; without entries that the source cannot report.
        foreign_bytes: memory of each device in use by processes outside Kubernetes, NaN if unknown;
            None if unknown for all.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignProcess:
    """A process that uses a device without holding it, as the agent's contract describes it."""

    pid: int
    name: str
    memory_bytes: int | None
    started_at: float | None
    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class ChangedTenants:
    """Difference between the tenants of an answer and those of an earlier one.

    Attributes:
        since: the tenants of the earlier answer, the identical object.
        devices: devices whose pods differ.
    """

    since: Mapping[DeviceKey, tuple[str, ...]]
    devices: Collection[DeviceKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """One answer of one source, complete for every device that it sees.

    Attributes:
        source: the source's name ("prometheus").
        at: time of the query, seconds since the epoch.
        devices: the devices, in the order of the columns.
        columns: by signal, one value per device; NaN if missing.
        measured_at: per device, time of measurement (scrape time less the exporter's collection
            interval), seconds since the epoch; NaN if nothing was measured.
        tenants: by device, pods (`namespace/name`) that hold it; several on a shared device. None
            if the source cannot report tenants.
        tenants_at: time of the tenants' query; None for `at`.
        changed_tenants: difference to earlier tenants; None if the source does not report it.
        shares: occasionally, memory of a shared device used by each pod: (device, `namespace/name`,
            bytes).
        divided: occasionally, devices of which a pod holds a share by its id (`GPU-…::3`).
            They are offered in shares, even if only one share is held.
        unmatched_series: number of series whose labels match no node of the cluster.
        unmatched_example: labels of one such series, for users; "" if there is none.
        own: additional data from a source that runs on the nodes.
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
        utilization: ratio per (step, device); NaN if missing.
        xid: last XID per (step, device); NaN if missing; None if not queried.
    """

    times: Column
    devices: tuple[DeviceKey, ...]
    utilization: npt.NDArray[np.float64]
    xid: npt.NDArray[np.float64] | None = None
