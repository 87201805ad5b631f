"""The report of a node: the contract between agent and extender, and what `--json` prints.

Says what was measured, never what to make of it elsewhere. Numbers stand in columns, one for each
signal, because both ends think in columns and names are then written once. A reader ignores fields
that it does not know; a change that old readers would misunderstand raises `VERSION`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from extender.decoding import MalformedError, decode_with

VERSION: Final = 1

MAX_BYTES: Final = 1 << 20
"""No honest report is larger: 16 cards of 7 instances with a dozen processes each take 200 KiB."""


class ReportError(ValueError):
    """A report that cannot be read; the message says what is wrong with it."""


class Place(StrEnum):
    """Where a process runs, as far as the agent can tell."""

    POD = "pod"
    HOST = "host"
    """In no pod: of the machine itself, or of a container that Kubernetes did not make."""
    UNKNOWN = "unknown"
    """The agent does not see the machine's processes (hostPID is not given), or it is gone."""


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the report; what has its default value is left out when it is written."""


class Tenant(_Record, frozen=True, kw_only=True):
    """A container that holds a device, as the kubelet says.

    Attributes:
        namespace: of its pod.
        pod: name of its pod.
        container: its name.
        uid: UID of its pod, "" where unknown (the kubelet's answer has none).
        replicas: names of the shares that it holds, () where the device is not shared.
    """

    namespace: str
    pod: str
    container: str = ""
    uid: str = ""
    replicas: tuple[str, ...] = ()


class Process(_Record, frozen=True, kw_only=True):
    """A process that uses a device, as the driver says.

    Attributes:
        pid: its number on the machine (not in its container).
        name: its command, "" where unknown.
        memory_bytes: what it holds of the device's memory, None where the driver does not say.
        utilization_ratio: its share of the device's time lately, 0 to 1, None where unknown.
        place: where it runs.
        uid: UID of its pod, "" where it is in none or that is unknown.
        namespace: of its pod, "" likewise.
        pod: name of its pod, "" likewise.
        container: name of its container, or its id where the name is unknown, "" likewise.
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


class Foreign(_Record, frozen=True, kw_only=True):
    """What is used of a device that no pod accounts for; all of it zero where there is nothing.

    Attributes:
        memory_bytes: memory of it.
        utilization_ratio: activity of it, 0 to 1, None where unknown.
        pids: processes of it that are known.
    """

    memory_bytes: int = 0
    utilization_ratio: float | None = None
    pids: tuple[int, ...] = ()


class Verdict(_Record, frozen=True, kw_only=True):
    """What the agent makes of a device, with its own settings; for people.

    Attributes:
        is_idle: None where it is not known.
        reason: why it is idle, is not, or is not known to be.
        action: what the signs of ill health mean, as `health.*` names it, "" where there are none.
        cause: the gravest of these signs, "" likewise.
        stress_ratio: how hot or throttled it is, 0 to 1: it counts less by that, and is not ill.
        stress_cause: why, "" where it is not.
    """

    is_idle: bool | None = None
    reason: str = ""
    action: str = ""
    cause: str = ""
    stress_ratio: float = 0.0
    stress_cause: str = ""


class Problem(_Record, frozen=True, kw_only=True):
    """Why something is not seen.

    Attributes:
        code: NVML's name for it (`DriverNotLoaded`), or ours (`Hung`): one of few, for metrics.
        text: what failed, why, and what to do.
    """

    code: str
    text: str


class Device(_Record, frozen=True, kw_only=True):
    """A card, or a MIG instance; a card with instances is not listed itself.

    Attributes:
        uuid: UUID of the card; of the parent card for an instance.
        gpu_instance_id: "" for a whole card.
        mig_uuids: UUIDs of its MIG devices, as the kubelet names them; one for each compute
            instance, () for a whole card.
        mig_profile: profile of the instance (`1g.10gb`), "" for a whole card.
        index: the driver's index of the card; may change when the machine starts anew.
        model: as the driver writes it.
        pci_bus_id: address of the card, as NVML writes it (`00000000:1A:00.0`).
        numa_node: NUMA node that the card hangs on, None where unknown.
        nvlink_peers: UUIDs of cards that it reaches over NVLink; `switch` for an NVSwitch.
        activity_source: what tells activity: `gpm`, `samples`, `rates`, `processes`, or "".
        age_seconds: of its signals at the report's time, None where they never were measured.
        xid_age_seconds: of its XID likewise, None where there is none.
        allocated_to: containers that hold it, None where the kubelet cannot be asked.
        used_by: processes that use it, None where the driver does not say.
        foreign: use that no pod accounts for, None where that cannot be told.
        verdict: what the agent makes of it.
        problem: why its signals are missing or old, None where nothing is wrong.
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
    verdict: Verdict | None = None
    problem: Problem | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the device: what `extender.core.readings.DeviceKey` holds."""
        return self.uuid, self.gpu_instance_id


class Report(_Record, frozen=True, kw_only=True, tag_field="version", tag=VERSION):
    """What a node's agent knows at one time; `version` is written before these.

    Attributes:
        node: name of the node, as the agent was told; the extender believes the agent's token.
        agent_version: of the program.
        started_at: when the agent started, seconds since the epoch by the node's clock.
        sequence: counts the agent's reports; with `started_at` it tells which of two is newer.
        at: when the pass that this says ended, by the node's clock.
        sent_at: when it was sent, by the node's clock: `sent_at - at` is its age, whatever the
            reader's clock says; 0 where it was not.
        driver_version: "" where there is no driver.
        devices: what the node has; a device that was seen and is gone stays with its problem.
        signals: by name of `extender.core.readings.Signal`, one value for each device in base
            units, None where missing.
        problem: why nothing is seen at all, or nothing new; None where all is well.
        tenants_problem: why it is not known who holds the devices, None where it is.
        processes_problem: why it is not known whose the processes are, None where it is.
    """

    node: str
    agent_version: str = ""
    started_at: float = 0.0
    sequence: int = 0
    at: float
    sent_at: float = 0.0
    driver_version: str = ""
    devices: tuple[Device, ...] = ()
    signals: Mapping[str, tuple[float | None, ...]] = {}
    problem: Problem | None = None
    tenants_problem: Problem | None = None
    processes_problem: Problem | None = None

    def signals_of(self, row: int) -> dict[str, float]:
        """Return what was measured of one device, by name of the signal."""
        return {
            name: value
            for name, column in self.signals.items()
            if (value := column[row]) is not None
        }


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Report)


class _Envelope(msgspec.Struct):
    """What every version of the report has."""

    version: int


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)


def encode(report: Report, sent_at: float | None = None) -> bytes:
    """Write a report as JSON.

    Args:
        report: the report.
        sent_at: the time of sending, seconds since the epoch; None where it is not sent.
    """
    if sent_at is not None:
        report = msgspec.structs.replace(report, sent_at=sent_at)
    return _ENCODER.encode(report)


def decode(content: bytes) -> Report:
    """Read a report; fields that are not known are ignored.

    Raises:
        ReportError: it is none, or of a version that this program does not understand.
    """
    if len(content) > MAX_BYTES:
        raise ReportError(f"report of {len(content)} bytes: must be at most {MAX_BYTES} bytes")
    try:
        version = decode_with(_ENVELOPE.decode, content).version
        if version != VERSION:
            raise ReportError(
                f"report of version {version}: must be version {VERSION}: "
                "agents and extender must be of the same release"
            )
        report = decode_with(_DECODER.decode, content)
    except MalformedError as error:
        raise ReportError(f"cannot read report: {error}") from error
    for name, column in report.signals.items():
        if len(column) != len(report.devices):
            raise ReportError(
                f"cannot read report: $.signals.{name} has {len(column)} values: "
                f"must be one for each of {len(report.devices)} devices"
            )
    return report


# --- what is sent to the extender -----------------------------------------------------------------

PATH: Final = "/v1/agent-reports"
"""Where an agent asks the extender for a stream of updates."""

UPGRADE: Final = "idlegpu-reports"
"""What the connection speaks once that is granted: messages, each after its length."""

LENGTH_BYTES: Final = 4
"""Of the length, big-endian."""

MAX_UPDATE_BYTES: Final = 1 << 18
"""No honest update is larger: 16 cards of 7 instances with all signals take 40 KiB."""

AGE: Final = "age_seconds"
XID_AGE: Final = "xid_age_seconds"
FOREIGN_MEMORY: Final = "foreign_memory_bytes"
FOREIGN_UTILIZATION: Final = "foreign_utilization_ratio"
MEAN: Final = "mean_utilization_ratio"
MEAN_SQUARE: Final = "mean_square_utilization_ratio"
"""Rows of an update besides signals: the age of each device's values and of its XID at the report's
time; use that no pod accounts for; activity and its square, on average since last sent."""


class Part(_Record, frozen=True, kw_only=True):
    """What a device is; the fields are those of `Device`."""

    uuid: str
    gpu_instance_id: str = ""
    index: int | None = None
    model: str = ""
    mig_profile: str = ""


class Layout(_Record, frozen=True, kw_only=True):
    """What the numbers of an update stand for.

    Attributes:
        driver_version: "" where there is no driver.
        devices: what each column is of.
        rows: what each row is: names of `extender.core.readings.Signal`, and those above.
    """

    driver_version: str = ""
    devices: tuple[Part, ...] = ()
    rows: tuple[str, ...] = ()


class Holders(_Record, frozen=True, kw_only=True):
    """Pods on each device: (namespace, name, UID or ""); None where it is not known."""

    pods: tuple[tuple[tuple[str, str, str], ...] | None, ...] = ()


class Update(_Record, frozen=True, kw_only=True, tag_field="version", tag=VERSION):
    """What the extender is told of a report; what it was told before on the connection is left out.

    Attributes:
        node, started_at, sequence, at: as the report has them.
        sent_at: when it was sent, by the node's clock.
        is_news: it may change a decision; else it only says that all is as before.
        layout: None where it is as before.
        holders: None where they are as before.
        values: little-endian doubles, row by row, one for each device; NaN where missing.
        problem: why nothing is seen, or nothing new; "" where all is well.
        shares: now and then: place of a shared device in the layout, UID of a pod on it, and the
            memory in bytes that its processes hold there.
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
    problem: str = ""
    shares: tuple[tuple[int, str, int], ...] = ()


class Farewell(_Record, frozen=True, kw_only=True):
    """Why the extender ends a connection: its last words on it."""

    reason: str = ""


_UPDATE_ENCODER: Final = msgspec.msgpack.Encoder()
_UPDATE_DECODER: Final = msgspec.msgpack.Decoder(Update)
_UPDATE_ENVELOPE: Final = msgspec.msgpack.Decoder(_Envelope)
_FAREWELL_DECODER: Final = msgspec.msgpack.Decoder(Farewell)


def frame(message: Update | Farewell) -> bytes:
    """Write a message with its length before it."""
    content = _UPDATE_ENCODER.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def decode_update(content: bytes | bytearray | memoryview) -> Update:
    """Read an update without its length; fields that are not known are ignored.

    Raises:
        ReportError: it is none, or of a version that this program does not understand.
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
    """Return the reason of a farewell, "" where it cannot be read."""
    try:
        return decode_with(_FAREWELL_DECODER.decode, content).reason
    except MalformedError:
        return ""
