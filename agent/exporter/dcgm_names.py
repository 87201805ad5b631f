"""Metrics under dcgm-exporter's names, for existing dashboards and alerts.

Names, units and labels follow dcgm-exporter up to 4.8; see `extender.sources.prometheus.dcgm`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from agent.exporter.metrics import tenants_of
from agent.gpu.backend import LINK_COUNTERS, DeviceReading, Extra, Values
from agent.report.contract import Device
from agent.sampler import LatestReport
from extender.core.devices.readings import Signal

_PER_MIB: Final = 1 / (1 << 20)
_PERCENT: Final = 100.0


@dataclass(frozen=True, slots=True)
class _Metric:
    """A metric of dcgm-exporter.

    Attributes:
        sources: signals or extras that provide the value, best first.
        factor: factor from the base unit to the metric's unit.
        is_shared: repeat the sample for each holder of a shared device.
    """

    name: str
    sources: tuple[str, ...]
    factor: float
    text: str
    is_shared: bool = False


_METRICS: Final = (
    _Metric("DCGM_FI_DEV_SM_CLOCK", (Extra.SM_CLOCK,), 1e-6, "SM clock frequency (in MHz)."),
    _Metric(
        "DCGM_FI_DEV_MEM_CLOCK", (Extra.MEMORY_CLOCK,), 1e-6, "Memory clock frequency (in MHz)."
    ),
    _Metric(
        "DCGM_FI_DEV_MEMORY_TEMP", (Signal.MEMORY_TEMPERATURE,), 1, "Memory temperature (in C)."
    ),
    _Metric("DCGM_FI_DEV_GPU_TEMP", (Signal.TEMPERATURE,), 1, "GPU temperature (in C)."),
    _Metric("DCGM_FI_DEV_POWER_USAGE", (Signal.POWER,), 1, "Power draw (in W)."),
    _Metric("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", (Signal.POWER_LIMIT,), 1, "Power limit (in W)."),
    _Metric(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        (Extra.ENERGY,),
        1e3,
        "Total energy consumption since the driver was loaded (in mJ).",
    ),
    _Metric(
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", (Extra.PCIE_REPLAYS,), 1, "Total number of PCIe retries."
    ),
    _Metric(
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        (Extra.NVLINK_CRC_FLITS,),
        1,
        "Total number of NVLink flow-control CRC errors.",
    ),
    _Metric(
        "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
        (Extra.NVLINK_CRC_DATA,),
        1,
        "Total number of NVLink data CRC errors.",
    ),
    _Metric(
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        (Extra.NVLINK_REPLAYS,),
        1,
        "Total number of NVLink retries.",
    ),
    _Metric(
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        (Extra.NVLINK_RECOVERIES,),
        1,
        "Total number of NVLink recovery errors.",
    ),
    *(_Metric(one.dcgm, (one.name,), 1, one.text) for one in LINK_COUNTERS.values()),
    _Metric(
        "DCGM_FI_DEV_GPU_UTIL",
        (Signal.GRAPHICS_ACTIVE, Signal.GPU_UTILIZATION),
        _PERCENT,
        "GPU utilization (in %).",
        is_shared=True,
    ),
    _Metric(
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        (Signal.MEMORY_COPY_UTILIZATION, Signal.DRAM_ACTIVE),
        _PERCENT,
        "Memory utilization (in %).",
        is_shared=True,
    ),
    _Metric(
        "DCGM_FI_DEV_ENC_UTIL", (Extra.ENCODER_UTILIZATION,), _PERCENT, "Encoder utilization (%)."
    ),
    _Metric(
        "DCGM_FI_DEV_DEC_UTIL", (Extra.DECODER_UTILIZATION,), _PERCENT, "Decoder utilization (%)."
    ),
    _Metric("DCGM_FI_DEV_XID_ERRORS", (Signal.XID,), 1, "Value of the last XID error encountered."),
    _Metric(
        "DCGM_FI_DEV_FB_FREE",
        (Signal.MEMORY_FREE,),
        _PER_MIB,
        "Framebuffer memory free (in MiB).",
        is_shared=True,
    ),
    _Metric(
        "DCGM_FI_DEV_FB_USED",
        (Signal.MEMORY_USED,),
        _PER_MIB,
        "Framebuffer memory used (in MiB).",
        is_shared=True,
    ),
    _Metric(
        "DCGM_FI_DEV_FB_RESERVED",
        (Signal.MEMORY_RESERVED,),
        _PER_MIB,
        "Framebuffer memory reserved (in MiB).",
    ),
    _Metric(
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        (Signal.UNCORRECTABLE_REMAPPED_ROWS,),
        1,
        "Number of remapped rows for uncorrectable errors.",
    ),
    _Metric(
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        (Extra.CORRECTABLE_REMAPPED_ROWS,),
        1,
        "Number of remapped rows for correctable errors.",
    ),
    _Metric(
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        (Signal.ROW_REMAP_FAILURE,),
        1,
        "Whether remapping of rows has failed.",
    ),
    _Metric(
        "DCGM_FI_DEV_ROW_REMAP_PENDING",
        (Signal.ROW_REMAP_PENDING,),
        1,
        "Whether a remapped row waits for a reset.",
    ),
    _Metric(
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        (Signal.ECC_DOUBLE_BIT_VOLATILE,),
        1,
        "Total number of double-bit volatile ECC errors.",
    ),
    _Metric(
        "DCGM_FI_DEV_RETIRED_SBE",
        (Signal.RETIRED_PAGES_SINGLE_BIT,),
        1,
        "Total number of retired pages due to single-bit errors.",
    ),
    _Metric(
        "DCGM_FI_DEV_RETIRED_DBE",
        (Signal.RETIRED_PAGES_DOUBLE_BIT,),
        1,
        "Total number of retired pages due to double-bit errors.",
    ),
    _Metric(
        "DCGM_FI_DEV_RETIRED_PENDING",
        (Signal.RETIRED_PAGES_PENDING,),
        1,
        "Total number of pages pending retirement.",
    ),
    _Metric(
        "DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
        (Signal.CLOCK_EVENT_REASONS,),
        1,
        "Current clock event reasons (bit mask).",
    ),
    _Metric(
        "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION",
        (Signal.RECOVERY_ACTION,),
        1,
        "Recovery action that the driver requests.",
    ),
    _Metric(
        "DCGM_FI_DEV_FABRIC_MANAGER_STATUS",
        (Signal.FABRIC_MANAGER_STATUS,),
        1,
        "Status of the fabric manager.",
    ),
    _Metric(
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        (Signal.GRAPHICS_ACTIVE,),
        1,
        "Ratio of time the graphics engine is active.",
        is_shared=True,
    ),
    _Metric(
        "DCGM_FI_PROF_SM_ACTIVE",
        (Signal.SM_ACTIVE,),
        1,
        "Ratio of cycles an SM has at least one warp assigned.",
        is_shared=True,
    ),
    _Metric(
        "DCGM_FI_PROF_SM_OCCUPANCY",
        (Extra.SM_OCCUPANCY,),
        1,
        "Ratio of warps resident on an SM.",
        is_shared=True,
    ),
    _Metric(
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        (Signal.TENSOR_ACTIVE,),
        1,
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        is_shared=True,
    ),
    _Metric(
        "DCGM_FI_PROF_DRAM_ACTIVE",
        (Signal.DRAM_ACTIVE,),
        1,
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        is_shared=True,
    ),
    _Metric(
        "DCGM_FI_PROF_PCIE_TX_BYTES",
        (Extra.PCIE_SENT,),
        1,
        "The rate of data transmitted over the PCIe bus (in bytes per second).",
    ),
    _Metric(
        "DCGM_FI_PROF_PCIE_RX_BYTES",
        (Extra.PCIE_RECEIVED,),
        1,
        "The rate of data received over the PCIe bus (in bytes per second).",
    ),
)

_LABELS: Final = (
    "gpu",
    "UUID",
    "pci_bus_id",
    "device",
    "modelName",
    "GPU_I_PROFILE",
    "GPU_I_ID",
    "Hostname",
    "DCGM_FI_DRIVER_VERSION",
    "container",
    "namespace",
    "pod",
    "vgpu",
)
_INSTANCE: Final = _LABELS.index("GPU_I_ID")
"""Index of the instance label; the profile's label precedes it."""

_NO_HOLDER: Final = ("", "", "", "")

_ONE_PER_CARD: Final = frozenset(
    {Signal.POWER, Signal.POWER_LIMIT, Extra.ENERGY, Signal.TEMPERATURE, Signal.MEMORY_TEMPERATURE}
)


class DcgmCollector(Collector):
    """Exports the latest report under dcgm-exporter's names.

    A device with one holder has the holder's labels on all samples. On a shared device, samples of
    utilization and memory repeat for each holder with the device's value, as with dcgm-exporter's
    `--kubernetes-virtual-gpus`; other samples (power, temperature) appear once, so that sums are
    right. Power, energy and temperature of a card with MIG instances appear once, although
    dcgm-exporter repeats them; health appears with each instance, as in dcgm-exporter. Stale values
    are left out, because Prometheus would take them for current ones.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, latest: LatestReport, clock: Callable[[], float]) -> None:
        self._latest = latest
        self._clock = clock

    @override
    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metric families that have samples."""
        report = self._latest.report
        if report is None:
            return
        rows = []
        xids = report.signals.get(Signal.XID, (None,) * len(report.devices))
        fresh = self._latest.are_fresh(self._clock())
        rows_of_report = zip(
            report.devices, self._latest.node_reading.devices, fresh, xids, strict=True
        )
        for device, reading, is_fresh, xid in rows_of_report:
            measured = reading.values if is_fresh else {}
            values = measured if xid is None else {**measured, Signal.XID: xid}
            labels = _labels(device, reading, (report.node, report.driver_version))
            rows.append((labels, _holders(device), values))
        for metric in _METRICS:
            family = GaugeMetricFamily(metric.name, metric.text, labels=_LABELS)
            samples: dict[tuple[str, ...], float] = {}
            for labels, holders, values in rows:
                value = _value(metric, values)
                if value is None:
                    continue
                if labels[_INSTANCE] and not _ONE_PER_CARD.isdisjoint(metric.sources):
                    samples[*_card_labels(labels), *_NO_HOLDER] = value
                    continue
                for holder in holders if metric.is_shared or len(holders) == 1 else (_NO_HOLDER,):
                    samples[*labels, *holder] = value
            for names, value in samples.items():
                family.add_metric(names, value)
            if family.samples:
                yield family


def _value(metric: _Metric, values: Values) -> float | None:
    known = (values[name] for name in metric.sources if name in values)
    value = next(known, None)
    return None if value is None else value * metric.factor


def _labels(device: Device, reading: DeviceReading, where: tuple[str, str]) -> tuple[str, ...]:
    index = str(reading.card.index)
    return (
        index,
        device.uuid,
        device.pci_bus_id,
        f"nvidia{index}",
        device.model,
        device.mig_profile,
        device.gpu_instance_id,
        *where,
    )


def _card_labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of an instance's card: profile and instance id are empty."""
    return (*labels[: _INSTANCE - 1], "", "", *labels[_INSTANCE + 1 :])


def _holders(device: Device) -> tuple[tuple[str, str, str, str], ...]:
    """Return (container, namespace, pod, share) of each holder.

    A free device returns one tuple of empty labels.
    """
    holders = tuple(
        (one.container, one.namespace, one.pod, replica)
        for one in tenants_of(device)
        for replica in one.replicas or ("",)
    )
    return holders or (_NO_HOLDER,)
