"""The interface to the driver's library, and the values read through it.

`agent.gpu.nvml` implements the interface with NVML.

Calls block, and a call to a lost GPU may never return: make them only in a thread of
`agent.gpu.worker`. A "card" is a physical GPU; an "instance" is a MIG device on a card.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final, Protocol

from agent.report.contract import Problem, Process
from extender.core.devices.readings import Signal

Values = Mapping[str, float]
"""Measured values in base units, by name of `readings.Signal` or of `Extra`."""

Handle = object
"""The library's handle of a card or a MIG device; invalid after a MIG layout or driver change."""

SWITCH: Final = "switch"
"""NVLink peer id of an NVSwitch, in place of a card's UUID."""


class Code(IntEnum):
    """NVML error codes that the agent distinguishes, by NVML's names."""

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


UNSUPPORTED_CODES: Final = frozenset(
    {Code.FunctionNotFound, Code.ArgumentVersionMismatch, Code.NotSupported, Code.Deprecated}
)
"""Errors of a call that the driver or the card does not support, until the driver is upgraded."""


class NvmlError(Exception):
    """An NVML call failed.

    Attributes:
        call: name of the call.
        code: NVML's error code; `Code.Unknown` for a number that `Code` does not list.
        text: NVML's error message.
    """

    def __init__(self, call: str, code: int, text: str = "") -> None:
        try:
            self.code = Code(code)
        except ValueError:
            self.code = Code.Unknown
        self.call = call
        self.text = text or self.code.name
        super().__init__(f"{call}: {self.text} ({code})")

    @classmethod
    def from_exception(cls, call: str, error: Exception) -> "NvmlError":
        """Convert any exception of a call to an `NvmlError`.

        The bindings fail to parse answers of newer drivers (IndexError, AttributeError). Such a
        failure must cost only that value of that card, and name its cause.
        """
        if isinstance(error, cls):
            return error
        return cls(call, Code.Unknown, f"{type(error).__name__}: {error}")


class Extra(StrEnum):
    """Values that are exported but used in no decision; each name ends in its unit."""

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
    # NVLink 5 and later; see `agent.gpu.backend`.
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
    """Reads of a card or MIG device by one or a few NVML calls; the value is the metric label."""

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
    """The driver's process lists; a process can be in more than one."""

    COMPUTE = "compute_processes"
    MPS = "mps_processes"
    GRAPHICS = "graphics_processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A physical GPU as the driver lists it.

    Attributes:
        handle: the library's handle; a new one for each listing.
        index: the driver's index.
        minor: minor number of the device file (3 for `/dev/nvidia3`), None if unknown.
        uuid: UUID of the card.
        model: product name from the driver, "" if unknown.
        pci_bus_id: PCI address in NVML's format (`00000000:1A:00.0`), "" if unknown.
        has_gpm: whether the card supports GPM, its own activity counters (Hopper and later).
        has_mig: whether MIG is enabled.
        unread: errors of the values above that could not be read in this listing.
    """

    handle: Handle = field(compare=False)
    index: int
    minor: int | None = None
    uuid: str
    model: str
    pci_bus_id: str
    has_gpm: bool
    has_mig: bool = False
    unread: tuple[NvmlError, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A MIG device. MIG devices on the same GPU instance share its memory and engines.

    Attributes:
        handle: the library's handle; a new one for each listing.
        uuid: MIG UUID, which is also the kubelet's name for the device.
        gpu_instance_id: id of the GPU instance that the MIG device is on.
        profile: profile of that GPU instance (`1g.10gb`).
    """

    handle: Handle = field(compare=False)
    uuid: str
    gpu_instance_id: int
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """An entry of a process list.

    Attributes:
        pid: process id in the host's namespace.
        memory_bytes: GPU memory of the process, None if the driver does not report it.
        gpu_instance_id: GPU instance that the process runs on, None on a card without MIG.
    """

    pid: int
    memory_bytes: int | None
    gpu_instance_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRate:
    """Utilization of a process over one sample period of the driver.

    Attributes:
        pid: process id in the host's namespace; the driver sometimes lists pids that never existed.
        at_microseconds: end of the sample period, microseconds since the epoch.
        utilization_ratio: SM utilization from the driver; may exceed 1.
    """

    pid: int
    at_microseconds: int
    utilization_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An entry of the driver's utilization buffer.

    Attributes:
        at_microseconds: end of the sample period, microseconds since the epoch.
        ratio: share of the sample period in which a kernel ran.
    """

    at_microseconds: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """An XID error from the driver.

    Attributes:
        uuid: UUID of the card.
        gpu_instance_id: the GPU instance affected, None for the whole card.
        xid: the XID number.
    """

    uuid: str
    gpu_instance_id: int | None
    xid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """NUMA node and NVLink peers of a card; both are fixed by the hardware.

    Attributes:
        numa_node: NUMA node of the card's PCI slot, None if unknown.
        nvlink_peers: UUIDs of the cards at the other end of the NVLinks, `switch` for an NVSwitch.
        unread: why the NVLink peers are unknown, () if they are known.
    """

    numa_node: int | None
    nvlink_peers: tuple[str, ...]
    unread: tuple[NvmlError, ...] = ()


class EventSource(Protocol):
    """The event queue of one card; used by one thread."""

    def wait(self, seconds: float) -> XidEvent | None:
        """Wait for the next event and return it; None if none arrives within `seconds`.

        Raises:
            NvmlError: waiting failed.
        """

    def close(self) -> None:
        """Free the library's resources."""


class Backend(Protocol):
    """The driver's library. Every call may raise `NvmlError`; call `start` first.

    Returned values omit what the driver does not report.
    """

    def start(self) -> None:
        """Load and initialize the library."""

    def stop(self) -> None:
        """Shut the library down, so that the driver can be upgraded."""

    def driver_version(self) -> str:
        """Return the driver's version."""

    def count(self) -> int:
        """Return the number of cards."""

    def card(self, index: int) -> Card:
        """Return the card at an index; `Card.unread` lists the values that cannot be read."""

    def instances(self, card: Card) -> tuple[Instance, ...] | None:
        """Return the MIG devices of a card, None if MIG is disabled."""

    def topology(self, card: Card, cards: Sequence[Card]) -> Topology:
        """Return the NUMA node and NVLink peers of a card; `cards` lists all cards of the node."""

    def read(self, call: Call, handle: Handle) -> Values:
        """Read values of a card or MIG device by one `Call`; for `Call.GPM` use `read_gpm`."""

    def read_gpm(self, card: Card, gpu_instance_id: int | None) -> Values:
        """Return GPM activity since the previous call; {} on the first call."""

    def samples(self, card: Card, since_microseconds: int) -> tuple[Sample, ...]:
        """Return the driver's utilization samples that are newer than a time, oldest first."""

    def processes(self, which: ProcessList, handle: Handle) -> tuple[ProcessUse, ...]:
        """Return the entries of one process list of a card or MIG device."""

    def process_rates(self, card: Card, since_microseconds: int) -> tuple[ProcessRate, ...]:
        """Return process utilization since a time; idle processes are not listed."""

    def events(self, card: Card) -> EventSource:
        """Register for the XID events of a card and return their source."""


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
        source: source of the utilization: `gpm`, `samples`, `rates`, `processes`, or "".
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
    source: str = ""
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


@dataclass(frozen=True, slots=True)
class _LinkCounter:
    """An error counter of a link.

    Attributes:
        name: the agent's name of the counter.
        dcgm: DCGM's name, up to DCGM 4.8.
    """

    name: Extra
    dcgm: str
    text: str


LINK_COUNTERS: Final[Mapping[int, _LinkCounter]] = {
    206: _LinkCounter(
        Extra.NVLINK_MALFORMED,
        "DCGM_FI_DEV_NVLINK_COUNT_RX_MALFORMED_PACKET_ERRORS",
        "Malformed packets received over NVLink.",
    ),
    207: _LinkCounter(
        Extra.NVLINK_OVERRUNS,
        "DCGM_FI_DEV_NVLINK_COUNT_RX_BUFFER_OVERRUN_ERRORS",
        "Packets received over NVLink and dropped for lack of buffer space.",
    ),
    208: _LinkCounter(
        Extra.NVLINK_RECEIVE_ERRORS,
        "DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS",
        "Packets with errors received over NVLink.",
    ),
    209: _LinkCounter(
        Extra.NVLINK_REMOTE_ERRORS,
        "DCGM_FI_DEV_NVLINK_COUNT_RX_REMOTE_ERRORS",
        "Packets received over NVLink that the sender marked as bad.",
    ),
    210: _LinkCounter(
        Extra.NVLINK_GENERAL_ERRORS,
        "DCGM_FI_DEV_NVLINK_COUNT_RX_GENERAL_ERRORS",
        "Packets with a wrong header received over NVLink.",
    ),
    211: _LinkCounter(
        Extra.NVLINK_INTEGRITY_ERRORS,
        "DCGM_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
        "Times that local NVLink errors exceeded their threshold.",
    ),
    212: _LinkCounter(
        Extra.NVLINK_DISCARDS,
        "DCGM_FI_DEV_NVLINK_COUNT_TX_DISCARDS",
        "Packets with errors dropped before they were sent over NVLink.",
    ),
    213: _LinkCounter(
        Extra.NVLINK_RECOVERIES_GOOD,
        "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",
        "Recoveries of NVLinks that succeeded.",
    ),
    214: _LinkCounter(
        Extra.NVLINK_RECOVERIES_FAILED,
        "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
        "Recoveries of NVLinks that failed.",
    ),
    215: _LinkCounter(
        Extra.NVLINK_RECOVERIES_BEGUN,
        "DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
        "Recoveries of NVLinks, successful or not.",
    ),
    # 216 to 218 are withdrawn bit error rates; 220 and 222 are not counters.
    219: _LinkCounter(
        Extra.NVLINK_EFFECTIVE_ERRORS,
        "DCGM_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS",
        "Errors left after correction in packets received over NVLink.",
    ),
    221: _LinkCounter(
        Extra.NVLINK_SYMBOL_ERRORS,
        "DCGM_FI_DEV_NVLINK_COUNT_RX_SYMBOL_ERRORS",
        "Errors in symbols received over NVLink.",
    ),
}
"""Error counters of NVLink 5 and later by NVML field id, read per link.

Earlier generations of NVLink have other counters.
"""

LINK_RECOVERIES: Final = tuple(LINK_COUNTERS[field].name for field in (213, 214, 215))
LINK_ERRORS: Final = tuple(
    counter.name for counter in LINK_COUNTERS.values() if counter.name not in LINK_RECOVERIES
)
