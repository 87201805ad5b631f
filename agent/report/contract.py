"""The report of a node: the contract between agent and extender, and the output of `--json`.

Reports measurements, not scheduling decisions. Values are columns, one for each signal, because
both sides process columns, and names are then written once. A reader ignores unknown fields; a
change that old readers would misinterpret raises `VERSION`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from extender.runtime.decoding import MalformedError, decode_with

VERSION: Final = 1


class ReportError(ValueError):
    """A report cannot be decoded; the message says why."""


class Place(StrEnum):
    """Kind of location that a process runs in."""

    POD = "pod"
    HOST = "host"
    """Outside pods: on the host, or in a container that Kubernetes did not create."""
    UNKNOWN = "unknown"
    """The agent cannot see the host's processes (no hostPID), or the process has ended."""


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the report; fields with default values are omitted when encoded."""


class Tenant(_Record, frozen=True, kw_only=True):
    """A container that holds a device, from the kubelet.

    Attributes:
        pod: name of the pod.
        container: name of the container.
        uid: UID of the pod, "" if unknown (the kubelet does not report it).
        replicas: names of the shares that the container holds, () if the device is not shared.
    """

    namespace: str
    pod: str
    container: str = ""
    uid: str = ""
    replicas: tuple[str, ...] = ()


class Process(_Record, frozen=True, kw_only=True):
    """A process that uses a device, from the driver.

    Attributes:
        pid: process id in the host's namespace, not in the container's.
        name: command of the process, "" if unknown.
        memory_bytes: GPU memory of the process, None if the driver does not report it.
        utilization_ratio: recent share of the device's time, 0 to 1, None if unknown.
        place: kind of location that the process runs in.
        uid: UID of the pod, "" outside pods or if unknown.
        namespace: namespace of the pod, "" outside pods or if unknown.
        pod: name of the pod, "" outside pods or if unknown.
        container: name of the container, its id if the name is unknown; outside pods, the last part
            of the process's cgroup, such as `docker-….scope`.
        started_at: start of the process, seconds since the epoch by the node's clock, None if
            unknown.
    """

    pid: int
    name: str = ""
    memory_bytes: int | None = None
    utilization_ratio: float | None = None
    place: Place = Place.UNKNOWN
    uid: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    started_at: float | None = None


class Foreign(_Record, frozen=True, kw_only=True):
    """Use of a device that no pod accounts for; all zero if there is none.

    Attributes:
        memory_bytes: foreign memory in use.
        utilization_ratio: foreign activity, 0 to 1, None if unknown.
        pids: known foreign processes.
    """

    memory_bytes: int = 0
    utilization_ratio: float | None = None
    pids: tuple[int, ...] = ()


class Verdict(_Record, frozen=True, kw_only=True):
    """The agent's evaluation of a device by its own settings; for display.

    Attributes:
        is_idle: None if unknown.
        reason: why the device is idle, is not idle, or is unknown.
        action: health action from `health.*` settings; `excluded` if the device works, but another
            device excludes its node; "" for a healthy device.
        cause: the most severe sign of ill health, "" for a healthy device.
        stress_ratio: heat or throttling, 0 to 1; lowers the device's score without making it
            unhealthy.
        stress_cause: cause of the stress, "" without stress.
    """

    is_idle: bool | None = None
    reason: str = ""
    action: str = ""
    cause: str = ""
    stress_ratio: float = 0.0
    stress_cause: str = ""


class Problem(_Record, frozen=True, kw_only=True):
    """Cause of missing data.

    Attributes:
        code: NVML's name of the error (`DriverNotLoaded`), or the agent's (`Hung`); a metric label.
        text: what failed, the cause, and the remedy.
    """

    code: str
    text: str


class Device(_Record, frozen=True, kw_only=True):
    """A card, or a MIG instance; a card with instances is not listed itself.

    A card with MIG enabled and no instance is listed: its health counts, although no pod can use
    it.

    Attributes:
        uuid: UUID of the card; for an instance, of its parent card.
        gpu_instance_id: "" for a whole card.
        mig_uuids: UUIDs of the MIG devices, one for each compute instance; () for a whole card.
        mig_profile: profile of the instance (`1g.10gb`), "" for a whole card, `none` for a card
            with MIG enabled and no instance.
        index: the driver's index of the card; may change on reboot.
        model: product name from the driver.
        pci_bus_id: PCI address of the card in NVML's format (`00000000:1A:00.0`).
        numa_node: NUMA node of the card, None if unknown.
        nvlink_peers: UUIDs of the cards at the other end of the NVLinks; `switch` for an NVSwitch.
        activity_source: source of the utilization: `gpm`, `samples`, `rates`, `processes`, or "".
        age_seconds: age of the signals at the report's time, None if never measured.
        xid_age_seconds: age of the XID error at the report's time, None without one.
        allocated_to: containers that hold the device, None if the kubelet does not answer.
        used_by: processes that use the device, None if the driver does not list them.
        foreign: use that no pod accounts for, None if unknown.
        replicas: shares that the kubelet offers of the device, 1 for a whole one; None if unknown.
        verdict: the agent's evaluation.
        problem: why signals are missing or stale, None if all is well.
    """

    uuid: str
    gpu_instance_id: str = ""
    mig_uuids: tuple[str, ...] = ()
    mig_profile: str = ""
    index: int | None = None
    model: str = ""
    pci_bus_id: str = ""
    numa_node: int | None = None
    nvlink_peers: tuple[str, ...] = ()
    activity_source: str = ""
    age_seconds: float | None = None
    xid_age_seconds: float | None = None
    allocated_to: tuple[Tenant, ...] | None = None
    used_by: tuple[Process, ...] | None = None
    foreign: Foreign | None = None
    replicas: int | None = None
    verdict: Verdict | None = None
    problem: Problem | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the device; equals `extender.core.devices.readings.DeviceKey`."""
        return self.uuid, self.gpu_instance_id


class Report(_Record, frozen=True, kw_only=True, tag_field="version", tag=VERSION):
    """All data of a node's agent at one time; encoded with the field `version`.

    Attributes:
        node: name of the node from the agent's settings; the extender trusts only the agent's
            token.
        agent_version: version of the program.
        started_at: start of the agent, seconds since the epoch by the node's clock.
        sequence: number of the report since the start; orders reports with the same `started_at`.
        at: end of the pass, seconds since the epoch by the node's clock.
        sent_at: time of sending by the node's clock, 0 if not sent. `sent_at - at` is the report's
            age, independent of the reader's clock.
        driver_version: "" without a driver.
        topology_policy: policy of the kubelet's Topology Manager, "" if unknown.
        topology_scope: its scope, "" if unknown.
        devices: the node's devices; a device that has disappeared stays, with its problem.
        signals: by name of `readings.Signal`, one value for each device in base
            units, None where missing.
        problem: why devices or current values are missing, None if all is well.
        tenants_problem: why the holders of devices are unknown, None if they are known.
        processes_problem: why the pods of processes are unknown, None if they are known.
    """

    node: str
    agent_version: str = ""
    started_at: float = 0.0
    sequence: int = 0
    at: float
    sent_at: float = 0.0
    driver_version: str = ""
    topology_policy: str = ""
    topology_scope: str = ""
    devices: tuple[Device, ...] = ()
    signals: Mapping[str, tuple[float | None, ...]] = {}
    problem: Problem | None = None
    tenants_problem: Problem | None = None
    processes_problem: Problem | None = None

    def signals_of(self, row: int) -> dict[str, float]:
        """Return the measured values of one device by name of the signal."""
        return {
            name: value
            for name, column in self.signals.items()
            if (value := column[row]) is not None
        }


_ENCODER: Final = msgspec.json.Encoder()


def encode(report: Report, sent_at: float | None = None) -> bytes:
    """Encode a report as JSON.

    Args:
        sent_at: time of sending, seconds since the epoch; None if the report is not sent.
    """
    if sent_at is not None:
        report = msgspec.structs.replace(report, sent_at=sent_at)
    return _ENCODER.encode(report)


# --- updates to the extender ----------------------------------------------------------------------

PATH: Final = "/v1/agent-reports"
"""URL path at which an agent requests a stream of updates."""

UPGRADE: Final = "idlegpu-reports"
"""Protocol name in the Upgrade header; the stream carries messages with a length prefix."""

LENGTH_BYTES: Final = 4
"""Size of the length prefix, big-endian."""

MAX_UPDATE_BYTES: Final = 1 << 18
"""Size limit of an update: 16 cards with 7 instances and all signals take 40 KiB."""

AGE: Final = "age_seconds"
XID_AGE: Final = "xid_age_seconds"
FOREIGN_MEMORY: Final = "foreign_memory_bytes"
FOREIGN_UTILIZATION: Final = "foreign_utilization_ratio"
MEAN: Final = "mean_utilization_ratio"
MEAN_SQUARE: Final = "mean_square_utilization_ratio"
"""Rows of an update besides signals: age of each device's values and of its XID at the report's
time; foreign use; mean activity and mean square since the previous update."""


class LayoutDevice(_Record, frozen=True, kw_only=True):
    """A device in a layout; fields as in `Device`."""

    uuid: str
    gpu_instance_id: str = ""
    index: int | None = None
    model: str = ""
    mig_profile: str = ""
    replicas: int | None = None
    numa_node: int | None = None
    nvlink_peers: tuple[str, ...] = ()


class Layout(_Record, frozen=True, kw_only=True):
    """Meaning of the rows and columns of an update's values.

    Attributes:
        driver_version, topology_policy, topology_scope: as in the report.
        devices: device of each column.
        rows: name of each row: a `readings.Signal`, or one of the constants above.
    """

    driver_version: str = ""
    topology_policy: str = ""
    topology_scope: str = ""
    devices: tuple[LayoutDevice, ...] = ()
    rows: tuple[str, ...] = ()


class Holders(_Record, frozen=True, kw_only=True):
    """Pods of each device as (namespace, name, UID or ""); None if unknown."""

    pods: tuple[tuple[tuple[str, str, str], ...] | None, ...] = ()


MAX_PROCESSES: Final = 64
"""Limit of foreign processes in an update: with their names they take 20 KiB."""

MAX_DEVICE_PROCESSES: Final = 4
"""Limit of foreign processes of one device: those with the most memory."""

MAX_NAME: Final = 128
"""Longest name in a foreign process, in characters."""


class ForeignProcess(_Record, frozen=True, kw_only=True):
    """A process that uses a device although its pod, if it has one, does not hold the device.

    Attributes:
        device: number of the device in the layout.
        pid: process id in the host's namespace.
        name: command without arguments, "" if unknown.
        memory_bytes: GPU memory of the process, rounded up; None if unknown.
        started_at: start of the process, seconds since the epoch by the node's clock, None if
            unknown.
        pod: `namespace/name` of the pod, its UID if the name is unknown, "" outside Kubernetes.
        container: as in `Process`.
    """

    device: int
    pid: int
    name: str = ""
    memory_bytes: int | None = None
    started_at: float | None = None
    pod: str = ""
    container: str = ""


class Update(_Record, frozen=True, kw_only=True, tag_field="version", tag=VERSION):
    """A report as sent to the extender; omits what the connection has already carried.

    Attributes:
        node, started_at, sequence, at: as in the report.
        sent_at: time of sending, seconds since the epoch by the node's clock.
        is_news: the report may change a decision; False for a heartbeat.
        layout: None if unchanged.
        holders: None if unchanged.
        values: little-endian doubles, row by row, one for each device; NaN where missing.
        shares: sent periodically: device number in the layout, UID of a pod on that shared device,
            and memory of the pod's processes in bytes.
        foreign: processes on devices with foreign use, at most `MAX_PROCESSES`; None if unchanged.
            A layout without `foreign` means that there are none.
    """

    node: str
    started_at: float = 0.0
    sequence: int = 0
    at: float
    sent_at: float
    is_news: bool = False
    layout: Layout | None = None
    holders: Holders | None = None
    values: bytes = b""
    shares: tuple[tuple[int, str, int], ...] = ()
    foreign: tuple[ForeignProcess, ...] | None = None


class Farewell(_Record, frozen=True, kw_only=True):
    """Last message of the extender before it ends a connection, with the reason."""

    reason: str = ""


class _Envelope(msgspec.Struct):
    """Fields common to all versions of an update."""

    version: int


_UPDATE_ENCODER: Final = msgspec.msgpack.Encoder()
_UPDATE_DECODER: Final = msgspec.msgpack.Decoder(Update)
_UPDATE_ENVELOPE: Final = msgspec.msgpack.Decoder(_Envelope)
_FAREWELL_DECODER: Final = msgspec.msgpack.Decoder(Farewell)


def frame(message: Update | Farewell) -> bytes:
    """Encode a message with its length prefix."""
    content = _UPDATE_ENCODER.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def decode_update(content: bytes | bytearray | memoryview) -> Update:
    """Decode an update without its length prefix; ignore unknown fields.

    Raises:
        ReportError: the content is not an update, or has an unsupported version.
    """
    try:
        return decode_with(_UPDATE_DECODER.decode, content)
    except MalformedError as error:
        raise ReportError(_what_is_wrong(content, error)) from error


def _what_is_wrong(content: bytes | bytearray | memoryview, error: Exception) -> str:
    try:
        version = decode_with(_UPDATE_ENVELOPE.decode, content).version
    except MalformedError:
        return f"cannot read update: {error}"
    if version == VERSION:
        return f"cannot read update: {error}"
    return (
        f"update of version {version}: must be version {VERSION}: "
        "agents and extender must be of the same release"
    )


def decode_farewell(content: bytes) -> str:
    """Decode the reason of a farewell; "" if it cannot be decoded."""
    try:
        return decode_with(_FAREWELL_DECODER.decode, content).reason
    except MalformedError:
        return ""
