"""Render the metrics of one node in dcgm-exporter's exposition format."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from simulation.devices import DeviceView, TenantView
from simulation.models import MIB
from simulation.nodes import ExporterBuild, NodeSpec

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_DRIVER_LABEL: Final = "DCGM_FI_DRIVER_VERSION"

_XID_TEXTS: Final = {
    0: "No Error",
    13: "Graphics Engine Exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "Preemptive cleanup, due to previous errors",
    48: "Double Bit ECC Error",
    63: "ECC page retirement or row remapping recording event",
    64: "ECC page retirement or row remapper recording failure",
    74: "NVLink Error",
    79: "GPU has fallen off the bus",
    94: "Contained ECC error",
    95: "Uncontained ECC error",
}

_PROCESS_FIELDS: Final = frozenset({"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"})
"""Fields that builds from 4.8.2 on split by pod on shared devices."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric family as dcgm-exporter prints it.

    Attributes:
        name: metric name.
        type: gauge or counter.
        help: HELP text.
        read: returns its value for a device; None if the device lacks the field.
        is_float: whether values have six decimals; otherwise they are integers.
        is_default: whether the exporter's default list contains the field.
    """

    name: str
    type: str = "gauge"
    help: str
    read: Callable[[DeviceView], float | None]
    is_float: bool = False
    is_default: bool = True


def _whole(read: Callable[[DeviceView], float | None]) -> Callable[[DeviceView], float | None]:
    """Return a reader that skips MIG instances, which lack the field."""
    return lambda device: None if device.profile else read(device)


def _percent(ratio: float) -> int:
    return round(100 * ratio)


def _mib(memory_bytes: int) -> int:
    return memory_bytes // MIB


def _free_mib(device: DeviceView) -> float:
    return device.memory_mib - device.reserved_mib - _mib(device.memory_used_bytes)


def _of_rows(value: Callable[[DeviceView], int]) -> Callable[[DeviceView], float | None]:
    return lambda device: value(device) if device.model.has_row_remap else None


def _nvlink(device: DeviceView) -> float | None:
    return device.utilization * 400_000 if device.model.has_nvlink else None


def _memory_celsius(device: DeviceView) -> float | None:
    return device.memory_temperature_celsius if device.model.has_hbm else None


_FAMILIES: Final = (
    Family(
        name="DCGM_FI_DEV_SM_CLOCK",
        help="SM clock frequency (in MHz).",
        read=lambda device: device.sm_clock_mhz,
    ),
    Family(
        name="DCGM_FI_DEV_MEM_CLOCK",
        help="Memory clock frequency (in MHz).",
        read=lambda device: device.model.memory_clock_mhz,
    ),
    Family(name="DCGM_FI_DEV_MEMORY_TEMP", help="Memory temperature (in C).", read=_memory_celsius),
    Family(
        name="DCGM_FI_DEV_GPU_TEMP",
        help="GPU temperature (in C).",
        read=lambda device: device.temperature_celsius,
    ),
    Family(
        name="DCGM_FI_DEV_POWER_USAGE",
        help="Power draw (in W).",
        read=lambda device: device.power_watts,
        is_float=True,
    ),
    Family(
        name="DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        type="counter",
        help="Total energy consumption since boot (in mJ).",
        read=lambda device: device.energy_joules * 1000,
    ),
    Family(
        name="DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        type="counter",
        help="Total number of PCIe retries.",
        read=lambda _: 0,
    ),
    Family(
        name="DCGM_FI_DEV_GPU_UTIL",
        help="GPU utilization (in %).",
        read=_whole(lambda device: _percent(device.utilization)),
    ),
    Family(
        name="DCGM_FI_DEV_MEM_COPY_UTIL",
        help="Memory utilization (in %).",
        read=_whole(lambda device: _percent(0.5 * device.utilization)),
    ),
    Family(
        name="DCGM_FI_DEV_ENC_UTIL", help="Encoder utilization (in %).", read=_whole(lambda _: 0)
    ),
    Family(
        name="DCGM_FI_DEV_DEC_UTIL", help="Decoder utilization (in %).", read=_whole(lambda _: 0)
    ),
    Family(
        name="DCGM_FI_DEV_XID_ERRORS",
        help="Value of the last XID error encountered.",
        read=lambda device: device.xid,
    ),
    Family(name="DCGM_FI_DEV_FB_FREE", help="Framebuffer memory free (in MiB).", read=_free_mib),
    Family(
        name="DCGM_FI_DEV_FB_USED",
        help="Framebuffer memory used (in MiB).",
        read=lambda device: _mib(device.memory_used_bytes),
    ),
    Family(
        name="DCGM_FI_DEV_FB_RESERVED",
        help="Framebuffer memory reserved (in MiB).",
        read=lambda device: device.reserved_mib,
    ),
    Family(
        name="DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        type="counter",
        help="Total number of NVLink bandwidth counters for all lanes.",
        read=_whole(_nvlink),
    ),
    Family(name="DCGM_FI_DEV_VGPU_LICENSE_STATUS", help="vGPU License status", read=lambda _: 0),
    Family(
        name="DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        type="counter",
        help="Number of remapped rows for uncorrectable errors",
        read=_of_rows(lambda device: device.uncorrectable_remapped_rows),
    ),
    Family(
        name="DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        type="counter",
        help="Number of remapped rows for correctable errors",
        read=_of_rows(lambda _: 0),
    ),
    Family(
        name="DCGM_FI_DEV_ROW_REMAP_FAILURE",
        help="Whether remapping of rows has failed",
        read=_of_rows(lambda device: device.row_remap_failure),
    ),
    Family(
        name="DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        help="Ratio of time the graphics engine is active.",
        read=lambda device: device.utilization,
        is_float=True,
    ),
    Family(
        name="DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        help="Ratio of cycles the tensor (HMMA) pipe is active.",
        read=lambda device: 0.45 * device.utilization,
        is_float=True,
    ),
    Family(
        name="DCGM_FI_PROF_DRAM_ACTIVE",
        help=("Ratio of cycles the device memory interface is active sending or receiving data."),
        read=lambda device: 0.5 * device.utilization,
        is_float=True,
    ),
    Family(
        name="DCGM_FI_PROF_PCIE_TX_BYTES",
        help=(
            "The rate of data transmitted over the PCIe bus - including both protocol headers "
            "and data payloads - in bytes per second."
        ),
        read=_whole(lambda device: 8e8 * device.utilization),
    ),
    Family(
        name="DCGM_FI_PROF_PCIE_RX_BYTES",
        help=(
            "The rate of data received over the PCIe bus - including both protocol headers "
            "and data payloads - in bytes per second."
        ),
        read=_whole(lambda device: 2e9 * device.utilization),
    ),
    Family(
        name="DCGM_FI_DEV_FB_TOTAL",
        help="Total framebuffer memory (in MiB).",
        read=lambda device: device.memory_mib,
        is_default=False,
    ),
    Family(
        name="DCGM_FI_DEV_POWER_MGMT_LIMIT",
        help="Current power limit (in W).",
        read=lambda device: device.model.max_watts,
        is_float=True,
        is_default=False,
    ),
    Family(
        name="DCGM_FI_DEV_ROW_REMAP_PENDING",
        help="Whether remapping of rows is pending",
        read=_of_rows(lambda device: device.row_remap_pending),
        is_default=False,
    ),
    Family(
        name="DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
        help="Current clock event reasons (bitmask)",
        read=lambda device: device.clock_event_reasons,
        is_default=False,
    ),
    Family(
        name="DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        type="counter",
        help="Total number of double-bit volatile ECC errors.",
        read=lambda device: device.double_bit_errors,
        is_default=False,
    ),
    Family(
        name="DCGM_FI_PROF_SM_ACTIVE",
        help="The ratio of cycles an SM has at least 1 warp assigned.",
        read=lambda device: 0.9 * device.utilization,
        is_float=True,
        is_default=False,
    ),
)

EXTRA_FIELDS: Final = frozenset(family.name for family in _FAMILIES if not family.is_default)
"""Names of the fields that are off by default."""


def render(spec: NodeSpec, devices: Sequence[DeviceView]) -> str:
    """Render the scrape of a node.

    Args:
        spec: the node, with its driver and exporter.
        devices: the devices to render.

    Returns:
        The exposition, without families that have no sample.
    """
    heads = [(device, _head(spec, device)) for device in devices]
    lines: list[str] = []
    for family in _FAMILIES:
        if not _is_exported(family, spec.exporter):
            continue
        rows = [row for device, head in heads for row in _rows(family, device, head, spec.exporter)]
        if rows:
            lines.append(f"# HELP {family.name} {family.help}")
            lines.append(f"# TYPE {family.name} {family.type}")
            lines += rows
    return "\n".join(lines) + "\n" if lines else ""


def _is_exported(family: Family, build: ExporterBuild) -> bool:
    if family.name in build.omitted_fields:
        return False
    return family.is_default or family.name in build.extra_fields


def _head(spec: NodeSpec, device: DeviceView) -> str:
    """Render the labels with which every series of a device begins."""
    pairs = [
        ("gpu", str(device.index)),
        ("UUID", device.uuid),
        ("pci_bus_id", device.pci_bus_id),
        ("device", f"nvidia{device.index}"),
        ("modelName", device.model.name),
    ]
    if device.profile:
        pairs += [("GPU_I_PROFILE", device.profile), ("GPU_I_ID", device.gpu_instance_id)]
    pairs.append((spec.exporter.hostname_label, spec.hostname or spec.name))
    if _DRIVER_LABEL not in spec.exporter.omitted_fields:
        pairs.append((_DRIVER_LABEL, spec.driver_version))
    return _text(pairs)


def _rows(family: Family, device: DeviceView, head: str, build: ExporterBuild) -> Iterator[str]:
    """Yield the sample lines of one family for one device."""
    is_split = build.has_virtual_gpus and device.is_shared
    for tenant, value in _values(family, device, build):
        if value is None or (device.xid == 0 and _is_xid(family) and not build.has_zero_xid):
            continue
        attributes = _tenant_labels(tenant, has_replica=is_split) if tenant else {}
        if _is_xid(family):
            xid = int(value)
            attributes |= {"err_code": str(xid), "err_msg": _XID_TEXTS.get(xid, "Unknown Error")}
        labels = ",".join(filter(None, (head, _text(sorted(attributes.items())))))
        number = f"{value:f}" if family.is_float else f"{int(value)}"
        yield f"{family.name}{{{labels}}} {number}"


def _values(
    family: Family, device: DeviceView, build: ExporterBuild
) -> Iterator[tuple[TenantView | None, float | None]]:
    """Yield the pod and the value of each series of a family."""
    value = family.read(device)
    if not build.has_pods or not device.tenants:
        yield None, value
    elif not (build.has_virtual_gpus and device.is_shared):
        yield device.tenants[-1], value  # without sharing a device has only the last pod's label
    elif build.has_process_values and family.name in _PROCESS_FIELDS:
        yield None, value
        for tenant in device.tenants:
            yield tenant, None if value is None else _process_value(family, tenant)
    else:
        for tenant in device.tenants:
            yield tenant, value


def _process_value(family: Family, tenant: TenantView) -> float:
    if family.name == "DCGM_FI_DEV_GPU_UTIL":
        return _percent(tenant.load.utilization)
    return _mib(tenant.load.memory_bytes)


def _tenant_labels(tenant: TenantView, *, has_replica: bool) -> dict[str, str]:
    labels = {
        "container": tenant.pod.container,
        "namespace": tenant.pod.namespace,
        "pod": tenant.pod.name,
    }
    return labels | ({"vgpu": str(tenant.replica)} if has_replica else {})


def _is_xid(family: Family) -> bool:
    return family.name == "DCGM_FI_DEV_XID_ERRORS"


def _text(pairs: Sequence[tuple[str, str]]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in pairs)
