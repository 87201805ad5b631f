"""Values read in one pass over the cards, before they are evaluated."""

from dataclasses import dataclass, field
from typing import Final

from agent.gpu.backend import Card, Extra, Topology, Values
from agent.report.contract import Problem, Process
from extender.core.devices.readings import Signal

GPM, SAMPLES, RATES, PROCESSES, NONE = "gpm", "samples", "rates", "processes", ""
"""Sources of a device's utilization, best first: GPM, the driver's samples, single readings,
process utilization, none."""

INSTANCE_SIGNALS: Final = frozenset(
    {
        Signal.MEMORY_USED,
        Signal.MEMORY_FREE,
        Signal.MEMORY_RESERVED,
        Signal.MEMORY_TOTAL,
        Signal.GRAPHICS_ACTIVE,
        Signal.SM_ACTIVE,
        Signal.TENSOR_ACTIVE,
        Signal.DRAM_ACTIVE,
        Extra.SM_OCCUPANCY,
        Extra.PCIE_SENT,
        Extra.PCIE_RECEIVED,
        Extra.NVLINK_SENT,
        Extra.NVLINK_RECEIVED,
    }
)
"""Signals measured per MIG instance; all others (power, temperature, health) are the card's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """Values of one device: a card, or a MIG instance.

    Attributes:
        card: the card, or the instance's card.
        topology: NUMA node and NVLink peers of the card.
        gpu_instance_id: "" for a whole card.
        mig_uuids: UUIDs of the MIG devices on the instance.
        mig_profile: "" for a whole card, `NO_INSTANCES` for a card with MIG enabled and no
            instance.
        values: values read, including the card's values for an instance.
        source: source of the utilization.
        processes: processes on the device, None if the driver lists none.
        measured_at: seconds since the epoch, None if never measured.
        problem: why values are missing or stale, None if all is well.
    """

    card: Card
    topology: Topology
    gpu_instance_id: str = ""
    mig_uuids: tuple[str, ...] = ()
    mig_profile: str = ""
    values: Values = field(default_factory=dict)
    source: str = NONE
    processes: tuple[Process, ...] | None = None
    measured_at: float | None = None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """Values of all devices of the node in one pass.

    Attributes:
        driver_version: "" without a driver.
        devices: every device, including devices that have disappeared.
        problem: why devices or values are missing, None if all is well.
        needs_restart: the process has lost access to the GPUs for good, and a new container may
            regain it. Hung calls do not count.
    """

    driver_version: str = ""
    devices: tuple[DeviceReading, ...] = ()
    problem: Problem | None = None
    needs_restart: bool = False
