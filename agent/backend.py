"""What the agent asks of a driver's library; `agent.nvml` asks NVML, tests ask scripts.

Calls block, and one to a lost card may never return: only `agent.worker` makes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

Values = Mapping[str, float]
"""What was read, in base units: by name of `extender.core.readings.Signal`, or of `Extra`."""

Handle = object
"""What the library knows a card or an instance by; dies when the layout or the driver changes."""


class Code(IntEnum):
    """NVML's error codes that the agent tells apart; the names are NVML's."""

    Success = 0
    Uninitialized = 1
    InvalidArgument = 2
    NotSupported = 3
    NoPermission = 4
    NotFound = 6
    InsufficientSize = 7
    DriverNotLoaded = 9
    Timeout = 10
    LibraryNotFound = 12
    FunctionNotFound = 13
    CorruptedInforom = 14
    GpuIsLost = 15
    ResetRequired = 16
    OperatingSystem = 17
    LibRmVersionMismatch = 18
    InUse = 19
    Memory = 20
    NoData = 21
    InsufficientResources = 23
    ArgumentVersionMismatch = 25
    Deprecated = 26
    NotReady = 27
    GpuNotFound = 28
    InvalidState = 29
    Unknown = 999


class NvmlError(Exception):
    """A call failed.

    Attributes:
        call: which.
        code: NVML's number; one that `Code` lacks counts as `Code.Unknown`.
        text: NVML's words.
    """

    def __init__(self, call: str, code: int, text: str = "") -> None:
        try:
            self.code = Code(code)
        except ValueError:
            self.code = Code.Unknown
        self.call = call
        self.text = text or self.code.name
        super().__init__(f"{call}: {self.text} ({code})")


class Extra(StrEnum):
    """What is read besides the signals of a decision; the value names the unit."""

    SM_OCCUPANCY = "sm_occupancy_ratio"
    SM_CLOCK = "sm_clock_hertz"
    MEMORY_CLOCK = "memory_clock_hertz"
    ENERGY = "energy_joules_total"
    ENCODER_UTILIZATION = "encoder_utilization_ratio"
    DECODER_UTILIZATION = "decoder_utilization_ratio"
    PCIE_REPLAYS = "pcie_replays_total"
    NVLINK_REPLAYS = "nvlink_replays_total"
    NVLINK_RECOVERIES = "nvlink_recoveries_total"
    NVLINK_CRC_FLITS = "nvlink_crc_flit_errors_total"
    NVLINK_CRC_DATA = "nvlink_crc_data_errors_total"
    # Since NVLink 5; see `agent.nvlink5`.
    NVLINK_MALFORMED = "nvlink_malformed_packets_total"
    NVLINK_OVERRUNS = "nvlink_buffer_overruns_total"
    NVLINK_RECEIVE_ERRORS = "nvlink_receive_errors_total"
    NVLINK_REMOTE_ERRORS = "nvlink_receive_remote_errors_total"
    NVLINK_GENERAL_ERRORS = "nvlink_receive_general_errors_total"
    NVLINK_INTEGRITY_ERRORS = "nvlink_local_integrity_errors_total"
    NVLINK_DISCARDS = "nvlink_transmit_discards_total"
    NVLINK_RECOVERIES_GOOD = "nvlink_successful_recoveries_total"
    NVLINK_RECOVERIES_FAILED = "nvlink_failed_recoveries_total"
    NVLINK_RECOVERIES_BEGUN = "nvlink_recovery_events_total"
    NVLINK_EFFECTIVE_ERRORS = "nvlink_effective_errors_total"
    NVLINK_SYMBOL_ERRORS = "nvlink_symbol_errors_total"
    PCIE_SENT = "pcie_sent_bytes_per_second"
    PCIE_RECEIVED = "pcie_received_bytes_per_second"
    NVLINK_SENT = "nvlink_sent_bytes_per_second"
    NVLINK_RECEIVED = "nvlink_received_bytes_per_second"
    CORRECTABLE_REMAPPED_ROWS = "correctable_remapped_rows"
    TEMPERATURE_MEMORY_MAX = "memory_temperature_max_celsius"
    NVLINKS_UP = "nvlinks_up"


class Call(StrEnum):
    """What is read of a card or an instance by one or few calls; the value names it in metrics."""

    RATES = "utilization_rates"
    GPM = "gpm"
    MEMORY = "memory"
    POWER = "power"
    TEMPERATURE = "temperature"
    CLOCK_EVENTS = "clock_event_reasons"
    CLOCKS = "clocks"
    POWER_LIMIT = "power_limit"
    FIELDS = "field_values"
    REMAPPED_ROWS = "remapped_rows"
    SRAM = "sram_ecc"
    FABRIC = "fabric"
    NVLINKS = "nvlinks"
    NVLINK_ERRORS = "nvlink_errors"
    CODECS = "codec_utilization"
    ENERGY = "energy"
    THRESHOLDS = "temperature_thresholds"


class ProcessList(StrEnum):
    """The driver's lists of processes; one process may stand in several."""

    COMPUTE = "compute_processes"
    MPS = "mps_processes"
    GRAPHICS = "graphics_processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card as the driver lists it.

    Attributes:
        handle: what the library knows it by; a new one each time.
        index: the driver's index.
        minor: number of its device file (`/dev/nvidia3`), None where unknown.
        uuid: its identity.
        model: as the driver writes it.
        pci_bus_id: as NVML writes it (`00000000:1A:00.0`).
        has_gpm: whether it counts activity itself (Hopper and later).
    """

    handle: Handle = field(compare=False)
    index: int
    minor: int | None = None
    uuid: str
    model: str
    pci_bus_id: str
    has_gpm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A MIG device; several on one GPU instance share its memory and engines.

    Attributes:
        handle: what the library knows it by; a new one each time.
        uuid: as the kubelet names it.
        gpu_instance_id: number of the GPU instance that it is on.
        profile: profile of that GPU instance (`1g.10gb`).
    """

    handle: Handle = field(compare=False)
    uuid: str
    gpu_instance_id: int
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """A line of a process list.

    Attributes:
        pid: on the machine.
        memory_bytes: None where the driver does not say.
        gpu_instance_id: None on a whole card.
    """

    pid: int
    memory_bytes: int | None
    gpu_instance_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRate:
    """What a process did lately.

    Attributes:
        pid: on the machine; the driver sometimes lists pids that never were.
        at_microseconds: end of the driver's sample, since the epoch.
        utilization_ratio: as the driver says, which may be beyond 1.
    """

    pid: int
    at_microseconds: int
    utilization_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample of the driver's buffer of utilization.

    Attributes:
        at_microseconds: since the epoch.
        ratio: share of the time before it in which a kernel ran.
    """

    at_microseconds: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """A fault of the driver, as it happened.

    Attributes:
        uuid: of the card.
        gpu_instance_id: None where it concerns the whole card.
        xid: its number.
    """

    uuid: str
    gpu_instance_id: int | None
    xid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What a card hangs on; changes only with the machine.

    Attributes:
        numa_node: None where unknown.
        nvlink_peers: UUIDs of cards at the other ends of its links, `switch` for an NVSwitch.
    """

    numa_node: int | None
    nvlink_peers: tuple[str, ...]


class EventSource(Protocol):
    """Events of cards as they happen; used by a thread of its own."""

    def wait(self, seconds: float) -> XidEvent | None:
        """Return the next event, None where none came in that time.

        Raises:
            NvmlError: it cannot be waited for.
        """

    def close(self) -> None:
        """Free what the library holds."""


class Backend(Protocol):
    """The library; each call may raise `NvmlError`, and none may be made before `start`.

    What the driver does not say of something is left out of what a call returns.
    """

    def start(self) -> None:
        """Load and initialize the library."""

    def stop(self) -> None:
        """Let go of the driver, so that it can be upgraded."""

    def driver_version(self) -> str:
        """Return the driver's version."""

    def count(self) -> int:
        """Return how many cards there are."""

    def card(self, index: int) -> Card:
        """Return a card by its index."""

    def instances(self, card: Card) -> tuple[Instance, ...] | None:
        """Return the MIG devices of a card, None where MIG is off."""

    def topology(self, card: Card, cards: Sequence[Card]) -> Topology:
        """Return what a card hangs on; `cards` are all of them."""

    def read(self, call: Call, handle: Handle) -> Values:
        """Return what a call says of a card or an instance; `GPM` is asked by `read_gpm`."""

    def read_gpm(self, card: Card, gpu_instance_id: int | None) -> Values:
        """Return activity since the last such call; nothing the first time."""

    def samples(self, card: Card, since_microseconds: int) -> tuple[Sample, ...]:
        """Return the driver's samples of utilization after a time, oldest first."""

    def processes(self, which: ProcessList, handle: Handle) -> tuple[ProcessUse, ...]:
        """Return the processes of a card or an instance."""

    def process_rates(self, card: Card, since_microseconds: int) -> tuple[ProcessRate, ...]:
        """Return what processes did after a time; those that did nothing are absent."""

    def events(self, card: Card) -> EventSource:
        """Begin to wait for the events of a card."""
