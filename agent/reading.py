"""What one pass over the cards found, before anything is made of it."""

from dataclasses import dataclass, field

from agent.backend import Card, Topology, Values
from agent.report import Problem, Process

GPM, SAMPLES, RATES, PROCESSES, NONE = "gpm", "samples", "rates", "processes", ""
"""What tells the activity of a device, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """What was read of a device: a card, or a MIG instance.

    Attributes:
        card: the card that it is, or is on.
        topology: what the card hangs on.
        gpu_instance_id: "" for a whole card.
        mig_uuids: UUIDs of its MIG devices.
        mig_profile: "" for a whole card.
        values: what was read, what belongs to its card included.
        source: what tells its activity.
        processes: None where the driver does not say.
        measured_at: seconds since the epoch, None where it never was.
        problem: why values are missing or old.
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
class Pass:
    """What one pass found.

    Attributes:
        driver_version: "" where there is no driver.
        devices: every device that is there, or was and is gone.
        problem: why nothing, or not everything, is seen.
        needs_restart: what was seen before is lost to this process for good, or calls of it hang
            and no card can be read.
    """

    driver_version: str = ""
    devices: tuple[DeviceReading, ...] = ()
    problem: Problem | None = None
    needs_restart: bool = False
