"""Prometheus metrics of the devices and of the agent itself, built from the latest report.

Each scrape builds the metrics again. Unreadable and stale devices have no samples, because
Prometheus would take old values for current ones. Values of a card (power, temperature, health)
appear once per card, not per MIG instance.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from agent.gpu.backend import INSTANCE_SIGNALS, LINK_COUNTERS, DeviceReading, Extra
from agent.report.contract import Device, Report, Tenant
from agent.sampler import Sampler
from extender.core.devices.readings import Signal

PREFIX: Final = "idlegpu_agent_"

_DEVICE_LABELS: Final = ("uuid", "gpu_instance_id", "gpu", "namespace", "pod", "container")
_IDENTITY: Final = _DEVICE_LABELS[:3]

_HELP: Final[Mapping[str, str]] = {
    Signal.GPU_UTILIZATION: "Share of time in which a kernel ran: mean of the driver's samples.",
    Signal.GRAPHICS_ACTIVE: "Share of time in which compute or graphics was busy, by GPM.",
    Signal.SM_ACTIVE: "Share of the SMs that were busy, by GPM.",
    Signal.TENSOR_ACTIVE: "Share of time in which tensor cores were busy, by GPM.",
    Signal.DRAM_ACTIVE: "Share of the memory bandwidth that was used, by GPM.",
    Signal.MEMORY_COPY_UTILIZATION: "Share of time in which memory was read or written.",
    Signal.MEMORY_USED: "Memory in use, without the memory that the driver reserves.",
    Signal.MEMORY_FREE: "Free memory.",
    Signal.MEMORY_RESERVED: "Memory that the driver reserves.",
    Signal.MEMORY_TOTAL: "Total memory.",
    Signal.POWER: "Power draw.",
    Signal.POWER_LIMIT: "Enforced power limit.",
    Signal.TEMPERATURE: "Temperature of the chip.",
    Signal.MEMORY_TEMPERATURE: "Temperature of the memory.",
    Signal.CLOCK_EVENT_REASONS: "Bit mask of NVML's clock event reasons.",
    Signal.ROW_REMAP_FAILURE: "Whether remapping of a memory row failed.",
    Signal.ROW_REMAP_PENDING: "Whether a remapped memory row waits for a reset.",
    Signal.UNCORRECTABLE_REMAPPED_ROWS: "Memory rows remapped for uncorrectable errors.",
    Signal.ROWS_REMAPPED_LATELY: "Memory rows remapped for uncorrectable errors in the last day.",
    Signal.ECC_DOUBLE_BIT_VOLATILE: "Uncorrectable memory errors since the last reset.",
    Signal.RETIRED_PAGES_PENDING: "Whether memory pages wait to be retired.",
    Signal.RETIRED_PAGES_SINGLE_BIT: "Memory pages retired for correctable errors.",
    Signal.RETIRED_PAGES_DOUBLE_BIT: "Memory pages retired for uncorrectable errors.",
    Signal.RECOVERY_ACTION: "Recovery action, by NVML's number; 0 for none.",
    Signal.FABRIC_MANAGER_STATUS: "State of the NVLink fabric, by DCGM's number; 3 is good.",
    Signal.SRAM_THRESHOLD_EXCEEDED: "Whether SRAM errors exceed their threshold.",
    Signal.FABRIC_HEALTH: "Health of the NVLink fabric: 1 good, 2 unhealthy, 3 limited.",
    Signal.NVLINKS_DOWN: "NVLinks down, of those once up or up on cards of the same model.",
    Signal.INFOROM_CORRUPTED: "Whether the infoROM is damaged.",
    Signal.PCIE_REPLAY_RATE: "PCIe replays per second, over the last 5 minutes.",
    Signal.NVLINK_REPLAY_RATE: "NVLink replays per second, over the last 5 minutes.",
    Signal.NVLINK_RECOVERY_RATE: "NVLink recoveries per second, over the last 5 minutes.",
    Signal.NVLINK_CRC_RATE: "NVLink CRC and other errors per second, over the last 5 minutes.",
    Signal.TEMPERATURE_SHUTDOWN: "Temperature at which the card shuts down.",
    Extra.SM_OCCUPANCY: "Resident warps as a share of the maximum, by GPM.",
    Extra.SM_CLOCK: "Clock of the SMs.",
    Extra.MEMORY_CLOCK: "Clock of the memory.",
    Extra.ENERGY: "Energy used since the driver was loaded.",
    Extra.ENCODER_UTILIZATION: "Share of time in which the video encoder was busy.",
    Extra.DECODER_UTILIZATION: "Share of time in which the video decoder was busy.",
    Extra.PCIE_REPLAYS: "PCIe replays.",
    Extra.NVLINK_REPLAYS: "NVLink replays.",
    Extra.NVLINK_RECOVERIES: "Recoveries of NVLinks from errors.",
    Extra.NVLINK_CRC_FLITS: "CRC errors in NVLink flow control units.",
    Extra.NVLINK_CRC_DATA: "CRC errors in NVLink data.",
    Extra.PCIE_SENT: "Data sent over PCIe, by GPM.",
    Extra.PCIE_RECEIVED: "Data received over PCIe, by GPM.",
    Extra.NVLINK_SENT: "Data sent over NVLink, by GPM.",
    Extra.NVLINK_RECEIVED: "Data received over NVLink, by GPM.",
    Extra.CORRECTABLE_REMAPPED_ROWS: "Memory rows remapped for correctable errors.",
    Signal.TEMPERATURE_SLOWDOWN: "Temperature at which the card lowers its clocks.",
    Extra.TEMPERATURE_MEMORY_MAX: "Highest allowed temperature of the memory.",
    Extra.NVLINKS_UP: "NVLinks that are up.",
    **{counter.name: counter.text for counter in LINK_COUNTERS.values()},
}

Family = GaugeMetricFamily | CounterMetricFamily


def tenants_of(device: Device) -> tuple[Tenant, ...]:
    """Return the holders of a device; () if unknown."""
    return device.allocated_to or ()


class AgentCollector(Collector):
    """Exports the latest report and metrics of the agent itself.

    Args:
        sampler: the agent's main loop.
        clock: seconds since the epoch.
    """

    def __init__(self, sampler: Sampler, clock: Callable[[], float]) -> None:
        self._sampler = sampler
        self._clock = clock

    @override
    def collect(self) -> Iterator[Family]:
        """Yield all metric families."""
        yield from self._agent_metrics()
        report = self._sampler.latest.report
        if report is None:
            return
        latest = self._sampler.latest
        fresh = latest.are_fresh(self._clock())
        yield from _signals(report, latest.node_reading.devices, fresh)
        yield from _states(report, fresh)
        yield from _tenants(report, fresh)
        yield from _info(report)

    def _agent_metrics(self) -> Iterator[Family]:
        sampler = self._sampler
        report = sampler.latest.report
        yield _counter("passes", "Passes over the GPUs.", [((), sampler.passes)])
        yield _counter(
            "pass_seconds", "Total duration of the passes.", [((), sampler.pass_seconds)]
        )
        yield _counter(
            "library_seconds",
            "Time spent in the driver's library.",
            [((), sampler.library_seconds)],
        )
        yield _counter(
            "call_failures",
            "Failed calls of the driver's library, by error.",
            [(key, count) for key, count in list(sampler.session.failures.items())],
            ("call", "error"),
        )
        yield _counter(
            "hung_calls",
            "Calls that did not return within their limit and were abandoned.",
            [((call,), count) for call, count in sampler.hung.items()],
            ("call",),
        )
        yield _counter(
            "xid_errors",
            "XID errors since the agent started.",
            [((uuid, str(xid)), count) for (uuid, xid), count in sampler.xids.counts.items()],
            ("uuid", "xid"),
        )
        yield _gauge(
            "watches_xids",
            "Whether the agent receives the XID errors of a card.",
            [((uuid,), not problem) for uuid, problem in sampler.watcher.problems.items()],
            ("uuid",),
        )
        if report is None:
            return
        problem = report.problem.code if report.problem is not None else ""
        yield _gauge(
            "reads_gpus",
            "Whether the GPUs can be read; if not, the label problem has the cause.",
            [((problem,), not problem)],
            ("problem",),
        )
        yield _gauge(
            "report_age_seconds",
            "Time since the last pass ended.",
            [((), max(self._clock() - report.at, 0.0))],
        )


def _signals(
    report: Report, readings: Iterable[DeviceReading], fresh: Iterable[bool]
) -> Iterator[Family]:
    rows = [
        (_labels_of(device), reading)
        for device, reading, is_fresh in zip(report.devices, readings, fresh, strict=True)
        if is_fresh
    ]
    for name, text in _HELP.items():
        values = {
            labels if name in INSTANCE_SIGNALS else _card_labels(labels): reading.values[name]
            for labels, reading in rows
            if name in reading.values
        }
        if not values:
            continue
        make = _counter if name.endswith("_total") else _gauge
        yield make(name.removesuffix("_total"), text, values.items(), _DEVICE_LABELS)


def _card_labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the card's labels: a card's values appear once, so that sums are right."""
    uuid, instance, index, *_ = labels
    return (uuid, "", index, "", "", "") if instance else labels


def _states(report: Report, fresh: Iterable[bool]) -> Iterator[Family]:
    """Yield age, verdict and problem of each device."""
    rows = [(_labels_of(device), device) for device in report.devices]
    yield _gauge(
        "device_age_seconds",
        "Time since the device was measured, when the report was made.",
        [(labels, one.age_seconds) for labels, one in rows if one.age_seconds is not None],
        _DEVICE_LABELS,
    )
    verdicts = [(labels, one.verdict) for labels, one in rows if one.verdict is not None]
    yield _gauge(
        "device_idle",
        "Whether the device is idle; no sample if unknown.",
        [
            (labels, one.verdict.is_idle)
            for (labels, one), is_fresh in zip(rows, fresh, strict=True)
            if is_fresh and one.verdict is not None and one.verdict.is_idle is not None
        ],
        _DEVICE_LABELS,
    )
    yield _gauge(
        "device_unhealthy",
        "Always 1, for a device with ill health; the label action has the consequence for pods; "
        "excluded: another device of its node is at fault.",
        [((*labels, one.action), True) for labels, one in verdicts if one.action],
        (*_DEVICE_LABELS, "action"),
    )
    yield _gauge(
        "device_problem",
        "Always 1, for a device that cannot be read; the label has the cause.",
        [((*labels, one.problem.code), True) for labels, one in rows if one.problem is not None],
        (*_DEVICE_LABELS, "problem"),
    )
    xids = report.signals.get(Signal.XID, ())
    yield _gauge(
        "device_xid",
        "The most severe recent XID error; if none is recent, the last one.",
        [(row[0], xid) for row, xid in zip(rows, xids, strict=False) if xid is not None],
        _DEVICE_LABELS,
    )


def _tenants(report: Report, fresh: Iterable[bool]) -> Iterator[Family]:
    """Yield holders, users and foreign use of each device."""
    yield _gauge(
        "device_tenant",
        "Always 1, for a container that holds the device or a share of it.",
        [
            ((*_identity(device), one.namespace, one.pod, one.container, replica), True)
            for device in report.devices
            for one in tenants_of(device)
            for replica in one.replicas or ("",)
        ],
        (*_DEVICE_LABELS, "replica"),
    )
    measured = [one for one, is_fresh in zip(report.devices, fresh, strict=True) if is_fresh]
    used: dict[tuple[str, ...], int] = {}
    for device in measured:
        for process in device.used_by or ():
            labels = (
                *_identity(device),
                process.namespace,
                process.pod,
                process.container,
                process.place.value,
            )
            used[labels] = used.get(labels, 0) + (process.memory_bytes or 0)
    yield _gauge(
        "process_memory_bytes",
        "Memory of processes, by pod or other location.",
        list(used.items()),
        (*_DEVICE_LABELS, "place"),
    )
    yield _gauge(
        "foreign_memory_bytes",
        "Memory in use that no pod accounts for; no sample if unknown.",
        [
            (_identity(device), device.foreign.memory_bytes)
            for device in measured
            if device.foreign is not None
        ],
        _IDENTITY,
    )


def _info(report: Report) -> Iterator[Family]:
    labels = ("model", "mig_profile", "pci_bus_id", "numa_node", "driver_version")
    yield _gauge(
        "device_info",
        "Always 1; the labels describe the device.",
        [
            (
                (
                    *_identity(device),
                    device.model,
                    device.mig_profile,
                    device.pci_bus_id,
                    "" if device.numa_node is None else str(device.numa_node),
                    report.driver_version,
                ),
                True,
            )
            for device in report.devices
        ],
        (*_IDENTITY, *labels),
    )


def _identity(device: Device) -> tuple[str, str, str]:
    index = "" if device.index is None else str(device.index)
    return device.uuid, device.gpu_instance_id, index


def _labels_of(device: Device) -> tuple[str, ...]:
    """Return the labels of a device, with its holder if it has exactly one."""
    holders = {(one.namespace, one.pod, one.container) for one in tenants_of(device)}
    return (*_identity(device), *(holders.pop() if len(holders) == 1 else ("", "", "")))


_Samples = Iterable[tuple[Iterable[str], float]]


def _gauge(name: str, text: str, samples: _Samples, labels: tuple[str, ...] = ()) -> Family:
    return _fill(GaugeMetricFamily(PREFIX + name, text, labels=labels), samples)


def _counter(name: str, text: str, samples: _Samples, labels: tuple[str, ...] = ()) -> Family:
    return _fill(CounterMetricFamily(PREFIX + name, text, labels=labels), samples)


def _fill(family: Family, samples: _Samples) -> Family:
    for labels, value in samples:
        family.add_metric(tuple(labels), float(value))
    return family
