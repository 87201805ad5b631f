"""NVML through pynvml, the only module that imports it. Converts all values to base units."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import pynvml

from agent.gpu.backend import (
    SWITCH,
    Call,
    Card,
    Code,
    Extra,
    Handle,
    Instance,
    NvmlError,
    ProcessList,
    ProcessRate,
    ProcessUse,
    Sample,
    Topology,
    Values,
    XidEvent,
)
from agent.gpu.nvml_calls import NO_SUCH_LINK, READS, Library, number, text
from extender.core.devices.readings import LARGEST_XID, Signal

_T = TypeVar("_T")

_SYS_PCI: Final = Path("/sys/bus/pci/devices")

_NO_INSTANCE: Final = 0xFFFFFFFF
_XID_EVENTS: Final = 0x8
_MAX_CARDS: Final = 1024  # far above any node; bounds the loops if an answer is wrong
_UTILIZATION_SAMPLES: Final = 1
_NOTHING_NEW: Final = frozenset({Code.NotFound, Code.NoData, Code.Success})
"""Errors of calls that return data since a time, when there is none. pynvml raises Success if the
sizing call already succeeds."""

_PROCESS_LISTS: Final = {
    ProcessList.COMPUTE: "nvmlDeviceGetComputeRunningProcesses",
    ProcessList.MPS: "nvmlDeviceGetMPSComputeRunningProcesses",
    ProcessList.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses",
}
_MIB: Final = float(1 << 20)
_MOST_BYTES: Final = 1 << 50  # of a process: drivers answer nearly 2**64 for "not available"
_METRICS: Final[Mapping[int, tuple[str, float]]] = {
    1: (Signal.GRAPHICS_ACTIVE, 0.01),
    2: (Signal.SM_ACTIVE, 0.01),
    3: (Extra.SM_OCCUPANCY, 0.01),
    5: (Signal.TENSOR_ACTIVE, 0.01),
    10: (Signal.DRAM_ACTIVE, 0.01),
    20: (Extra.PCIE_SENT, _MIB),
    21: (Extra.PCIE_RECEIVED, _MIB),
    60: (Extra.NVLINK_RECEIVED, _MIB),
    61: (Extra.NVLINK_SENT, _MIB),
}
"""Signal or extra of each GPM metric id, with the factor to its base unit."""


class _GpmMeter:
    """The last two GPM samples of a card or a GPU instance.

    GPM, the GPU's own activity counters, exists on Hopper and later.

    Args:
        gpu_instance_id: None for the whole card.
    """

    def __init__(self, nvml: Library, handle: Handle, gpu_instance_id: int | None) -> None:
        self._nvml = nvml
        self._handle = handle
        self._gpu_instance_id = gpu_instance_id
        self._older: Any = None
        self._spare: Any = None

    def read(self) -> Values:
        """Take a sample and return the activity since the previous one; {} on the first call.

        Raises:
            NvmlError: no sample could be taken; the next call counts as the first again.
        """
        sample = self._spare if self._spare is not None else self._nvml.call("nvmlGpmSampleAlloc")
        older, self._older, self._spare = self._older, None, sample
        try:
            if self._gpu_instance_id is None:
                self._nvml.call("nvmlGpmSampleGet", self._handle, sample)
            else:
                self._nvml.call("nvmlGpmMigSampleGet", self._handle, self._gpu_instance_id, sample)
        except BaseException:  # a binding that does not fit the driver raises anything
            if older is not None:
                self._nvml.call("nvmlGpmSampleFree", older)
            raise
        self._older, self._spare = sample, older
        return {} if older is None else self._between(older, sample)

    def _between(self, older: Any, newer: Any) -> Values:
        module = self._nvml.module
        arguments = module.c_nvmlGpmMetricsGet_t()
        arguments.version = module.NVML_GPM_METRICS_GET_VERSION
        arguments.sample1, arguments.sample2 = older, newer
        arguments.numMetrics = len(_METRICS)
        for at, metric in enumerate(_METRICS):
            arguments.metrics[at].metricId = metric
        answer = self._nvml.call("nvmlGpmMetricsGet", arguments)
        values: dict[str, float] = {}
        for at, (name, factor) in enumerate(_METRICS.values()):
            item = answer.metrics[at]
            if item.nvmlReturn == Code.Success and item.value >= 0:  # false for NaN, too
                values[name] = item.value * factor
        return values

    def close(self) -> None:
        """Free both GPM samples."""
        for sample in (self._older, self._spare):
            if sample is not None:
                self._nvml.call("nvmlGpmSampleFree", sample)
        self._older = self._spare = None


class Nvml:
    """NVML as a `Backend`; separate threads wait for its events.

    Args:
        module: pynvml, or a test's substitute.
        sys_pci: the kernel's directory of PCI devices.
    """

    def __init__(self, module: Any = pynvml, sys_pci: Path = _SYS_PCI) -> None:
        self._nvml = Library(module)
        self._sys_pci = sys_pci
        self._meters: dict[tuple[str, int | None], _GpmMeter] = {}
        self._layouts: dict[str, list[tuple[str, int]] | None] = {}
        self._fixed: dict[tuple[str, str], Any] = {}
        self._starts = 0

    def start(self) -> None:
        """Load and initialize NVML."""
        self._nvml.reset()
        self._fixed.clear()
        self._nvml.call("nvmlInit")
        self._starts += 1

    def stop(self) -> None:
        """Shut NVML down, once for each start."""
        self._meters.clear()  # NVML frees the samples when it shuts down
        # NVML counts initializations and holds the driver open until each is undone. An abandoned
        # `start` may have succeeded later, so count every one.
        starts, self._starts = self._starts, 0
        for _ in range(starts):
            self._nvml.call("nvmlShutdown")

    def driver_version(self) -> str:
        """Return the driver's version."""
        return text(self._nvml.call("nvmlSystemGetDriverVersion"))

    def count(self) -> int:
        """Return the number of cards.

        Raises:
            ValueError: the number is out of range.
        """
        count = int(self._nvml.call("nvmlDeviceGetCount"))
        if not 0 <= count <= _MAX_CARDS:
            raise ValueError(f"the driver reports {count} cards: must be 0 to {_MAX_CARDS}")
        return count

    def card(self, index: int) -> Card:
        """Return the card at an index.

        Raises:
            ValueError: the card has no UUID.
        """
        handle = self._nvml.call("nvmlDeviceGetHandleByIndex", index)
        uuid = text(self._nvml.call("nvmlDeviceGetUUID", handle))
        if not uuid:
            raise ValueError(f"the driver reports no UUID of GPU {index}")
        unread: list[NvmlError] = []

        def read(name: str, parse: Callable[[Any], _T]) -> _T | None:
            return self._read_fixed(unread, name, uuid, handle, parse)

        return Card(
            handle=handle,
            index=index,
            minor=read("nvmlDeviceGetMinorNumber", int),
            uuid=uuid,
            model=read("nvmlDeviceGetName", text) or "",
            pci_bus_id=read("nvmlDeviceGetPciInfo", lambda pci: text(pci.busId)) or "",
            has_gpm=read("nvmlGpmQueryDeviceSupport", lambda gpm: gpm.isSupportedDevice == 1)
            or False,
            has_mig=read("nvmlDeviceGetMigMode", lambda mode: mode[0] == 1) or False,
            unread=tuple(unread),
        )

    def _read_fixed(
        self,
        unread: list[NvmlError],
        name: str,
        uuid: str,
        handle: Handle,
        parse: Callable[[Any], _T],
    ) -> _T | None:
        """Return a fixed value of a card, or its last known value if it cannot be read.

        Otherwise one malformed answer would look like another card or layout.
        """
        try:
            answer = self._nvml.call_supported(name, uuid, handle)
            self._fixed[name, uuid] = None if answer is None else parse(answer)
        except Exception as error:  # noqa: BLE001 - a malformed answer costs this value, not the card
            unread.append(NvmlError.from_exception(name, error))
        value: _T | None = self._fixed.get((name, uuid))
        return value

    def instances(self, card: Card) -> tuple[Instance, ...] | None:
        """Return the MIG devices of a card, None if MIG is disabled."""
        found = self._instances(card)
        layout = None if found is None else [(one.uuid, one.gpu_instance_id) for one in found]
        if layout != self._layouts.get(card.uuid, layout):
            # The samples are of the previous instances.
            for key in [key for key in self._meters if key[0] == card.uuid]:
                self._meters.pop(key).close()
        self._layouts[card.uuid] = layout
        return found

    def _instances(self, card: Card) -> tuple[Instance, ...] | None:
        if not card.has_mig:
            return None
        found = []
        most = int(self._nvml.call("nvmlDeviceGetMaxMigDeviceCount", card.handle))
        for index in range(min(most, _MAX_CARDS)):
            try:
                handle = self._nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", card.handle, index)
            except NvmlError as error:
                if error.code is Code.NotFound:
                    continue  # a gap
                if error.code is Code.InvalidArgument:
                    break
                raise
            found.append(self._instance(handle))
        return tuple(found)

    def _instance(self, handle: Handle) -> Instance:
        # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb": a compute instance on a 3g.20gb GPU instance.
        profile = text(self._nvml.call("nvmlDeviceGetName", handle)).rpartition(" MIG ")[2]
        compute, dot, rest = profile.partition(".")
        gpu_instance_id = int(self._nvml.call("nvmlDeviceGetGpuInstanceId", handle))
        if not 0 <= gpu_instance_id < _NO_INSTANCE:
            raise ValueError(f"the driver reports the GPU instance {gpu_instance_id}")
        return Instance(
            handle=handle,
            uuid=text(self._nvml.call("nvmlDeviceGetUUID", handle)),
            gpu_instance_id=gpu_instance_id,
            profile=rest if dot and compute.endswith("c") else profile,
        )

    def topology(self, card: Card, cards: Sequence[Card]) -> Topology:
        """Return the NUMA node and NVLink peers of a card."""
        unread: tuple[NvmlError, ...] = ()
        peers: tuple[str, ...] = ()
        try:
            peers = self._nvlink_peers(card, cards)
        except Exception as error:  # noqa: BLE001 - a malformed answer costs this value, not the card
            unread = (NvmlError.from_exception("nvlink_peers", error),)
        return Topology(numa_node=self._numa_node(card), nvlink_peers=peers, unread=unread)

    def _nvlink_peers(self, card: Card, cards: Sequence[Card]) -> tuple[str, ...]:
        by_bus_id = {other.pci_bus_id.lower(): other.uuid for other in cards}
        peers: dict[str, None] = {}
        for link in range(self._nvml.module.NVML_NVLINK_MAX_LINKS):
            try:
                if not self._nvml.call("nvmlDeviceGetNvLinkState", card.handle, link):
                    continue
                remote = self._nvml.call("nvmlDeviceGetNvLinkRemotePciInfo", card.handle, link)
            except NvmlError as error:
                if error.code in NO_SUCH_LINK:
                    break  # no more links, or none at all
                raise
            peer = by_bus_id.get(text(remote.busId).lower(), SWITCH)
            if peer is SWITCH and "" in by_bus_id:
                raise LookupError("the peer may be a card whose PCI address is unknown")
            peers[peer] = None
        return tuple(peers)

    def _numa_node(self, card: Card) -> int | None:
        # The kernel writes the PCI domain with 4 digits, NVML with 8.
        address = card.pci_bus_id.lower()[-len("0000:00:00.0") :]
        try:
            node = int((self._sys_pci / address / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def read(self, call: Call, handle: Handle) -> Values:
        """Read values of a card or MIG device by one `Call`."""
        return READS[call](self._nvml, handle)

    def read_gpm(self, card: Card, gpu_instance_id: int | None) -> Values:
        """Return GPM activity since the previous call; {} on the first call."""
        key = (card.uuid, gpu_instance_id)
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = _GpmMeter(self._nvml, card.handle, gpu_instance_id)
        return meter.read()

    def samples(self, card: Card, since_microseconds: int) -> tuple[Sample, ...]:
        """Return the driver's utilization samples that are newer than a time, oldest first."""
        try:
            value_type, samples = self._nvml.call(
                "nvmlDeviceGetSamples", card.handle, _UTILIZATION_SAMPLES, since_microseconds
            )
        except NvmlError as error:
            if error.code in _NOTHING_NEW:
                return ()
            raise
        found = (
            Sample(
                at_microseconds=int(sample.timeStamp),
                ratio=number(sample.sampleValue, value_type) / 100,
            )
            for sample in samples
        )
        return tuple(sorted(found, key=lambda sample: sample.at_microseconds))

    def processes(self, which: ProcessList, handle: Handle) -> tuple[ProcessUse, ...]:
        """Return the entries of one process list of a card or MIG device."""
        try:
            lines = self._nvml.call(_PROCESS_LISTS[which], handle)
        except NvmlError as error:
            if error.code is not Code.InsufficientSize:
                raise
            # More processes started between the sizing call and the call for the list.
            lines = self._nvml.call(_PROCESS_LISTS[which], handle)
        return tuple(
            ProcessUse(
                pid=int(line.pid),
                memory_bytes=_known_bytes(line.usedGpuMemory),
                gpu_instance_id=(
                    None if line.gpuInstanceId == _NO_INSTANCE else int(line.gpuInstanceId)
                ),
            )
            for line in lines
        )

    def process_rates(self, card: Card, since_microseconds: int) -> tuple[ProcessRate, ...]:
        """Return process utilization since a time; idle processes are not listed."""
        try:
            lines = self._nvml.call(
                "nvmlDeviceGetProcessUtilization", card.handle, since_microseconds
            )
        except NvmlError as error:
            if error.code in _NOTHING_NEW:
                return ()
            raise
        return tuple(
            ProcessRate(
                pid=int(line.pid),
                at_microseconds=int(line.timeStamp),
                utilization_ratio=line.smUtil / 100,
            )
            for line in lines
        )

    def events(self, card: Card) -> "_NvmlEvents":
        """Register for the XID events of a card and return their source."""
        return _NvmlEvents(self._nvml, card)


class _NvmlEvents:
    """Event set for the XID errors of one card.

    Each card has its own set, so that a failing card does not block the events of others.
    """

    def __init__(self, nvml: Library, card: Card) -> None:
        self._nvml = nvml
        self._uuid = card.uuid
        self._set = nvml.call("nvmlEventSetCreate")
        try:
            nvml.call("nvmlDeviceRegisterEvents", card.handle, _XID_EVENTS, self._set)
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> XidEvent | None:
        """Wait for the next XID event and return it; None if none arrives within `seconds`.

        Raises:
            NvmlError: waiting failed.
            ValueError: the event has no valid XID.
        """
        try:
            data = self._nvml.call("nvmlEventSetWait_v2", self._set, int(seconds * 1000))
        except NvmlError as error:
            if error.code is Code.Timeout:
                return None
            raise
        if not data.eventType & _XID_EVENTS:
            return None
        instance, xid = int(data.gpuInstanceId), int(data.eventData)
        if xid > LARGEST_XID:
            raise ValueError(f"the driver reports XID {xid}: must be at most {LARGEST_XID}")
        return XidEvent(
            uuid=self._uuid, gpu_instance_id=None if instance == _NO_INSTANCE else instance, xid=xid
        )

    def close(self) -> None:
        """Free the event set."""
        self._nvml.call("nvmlEventSetFree", self._set)


def _known_bytes(used: int | None) -> int | None:
    """Return the memory of a process, None if the driver does not know it."""
    return None if used is None or not 0 <= used <= _MOST_BYTES else int(used)
