"""NVML through pynvml: the one module that imports it. Units are converted at this edge."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pynvml

from agent.backend import (
    Call,
    Card,
    Code,
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
from agent.nvml_gpm import GpmMeter
from agent.nvml_library import Library, number, text
from agent.nvml_reads import READS

SYS_PCI: Final = Path("/sys/bus/pci/devices")

SWITCH: Final = "switch"
"""Stands for the other end of an NVLink that is no card."""

_NO_INSTANCE: Final = 0xFFFFFFFF
_XID_EVENTS: Final = 0x8
_UTILIZATION_SAMPLES: Final = 1
_NOTHING_NEW: Final = frozenset({Code.NotFound, Code.NoData, Code.Success})
"""How calls for what is new since a time say that nothing is; success is what pynvml raises where
sizing the answer already succeeds."""

_PROCESS_LISTS: Final = {
    ProcessList.COMPUTE: "nvmlDeviceGetComputeRunningProcesses",
    ProcessList.MPS: "nvmlDeviceGetMPSComputeRunningProcesses",
    ProcessList.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses",
}


class Nvml:
    """NVML as a backend; events are waited for by a thread of their own.

    Args:
        module: pynvml, or what stands in for it.
        sys_pci: where the kernel lists PCI devices.
    """

    def __init__(self, module: Any = pynvml, sys_pci: Path = SYS_PCI) -> None:
        self._nvml = Library(module)
        self._sys_pci = sys_pci
        self._meters: dict[tuple[str, int | None], GpmMeter] = {}
        self._layouts: dict[str, list[tuple[str, int]] | None] = {}

    def start(self) -> None:
        """Load and initialize NVML."""
        self._nvml.forget()
        self._nvml.ask("nvmlInit")

    def stop(self) -> None:
        """Shut NVML down; what cannot be given back any more is gone with the driver."""
        self._meters.clear()  # NVML frees the samples when it shuts down
        self._nvml.ask("nvmlShutdown")

    def driver_version(self) -> str:
        """Return the driver's version."""
        return text(self._nvml.ask("nvmlSystemGetDriverVersion"))

    def count(self) -> int:
        """Return how many cards there are."""
        return int(self._nvml.ask("nvmlDeviceGetCount"))

    def card(self, index: int) -> Card:
        """Return a card by its index."""
        handle = self._nvml.ask("nvmlDeviceGetHandleByIndex", index)
        uuid = text(self._nvml.ask("nvmlDeviceGetUUID", handle))
        minor = self._nvml.ask_supported("nvmlDeviceGetMinorNumber", uuid, handle)
        gpm = self._nvml.ask_supported("nvmlGpmQueryDeviceSupport", uuid, handle)
        return Card(
            handle=handle,
            index=index,
            minor=None if minor is None else int(minor),
            uuid=uuid,
            model=text(self._nvml.ask("nvmlDeviceGetName", handle)),
            pci_bus_id=text(self._nvml.ask("nvmlDeviceGetPciInfo", handle).busId),
            has_gpm=gpm is not None and bool(gpm.isSupportedDevice),
        )

    def instances(self, card: Card) -> tuple[Instance, ...] | None:
        """Return the MIG devices of a card, None where MIG is off."""
        found = self._instances(card)
        layout = None if found is None else [(one.uuid, one.gpu_instance_id) for one in found]
        if layout != self._layouts.get(card.uuid, layout):
            # Samples from before are of other instances.
            for key in [key for key in self._meters if key[0] == card.uuid]:
                self._meters.pop(key).close()
        self._layouts[card.uuid] = layout
        return found

    def _instances(self, card: Card) -> tuple[Instance, ...] | None:
        mode = self._nvml.ask_supported("nvmlDeviceGetMigMode", card.uuid, card.handle)
        if mode is None or not mode[0]:
            return None
        found = []
        for index in range(int(self._nvml.ask("nvmlDeviceGetMaxMigDeviceCount", card.handle))):
            try:
                handle = self._nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", card.handle, index)
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
        profile = text(self._nvml.ask("nvmlDeviceGetName", handle)).rpartition(" MIG ")[2]
        compute, dot, rest = profile.partition(".")
        return Instance(
            handle=handle,
            uuid=text(self._nvml.ask("nvmlDeviceGetUUID", handle)),
            gpu_instance_id=int(self._nvml.ask("nvmlDeviceGetGpuInstanceId", handle)),
            profile=rest if dot and compute.endswith("c") else profile,
        )

    def topology(self, card: Card, cards: Sequence[Card]) -> Topology:
        """Return what a card hangs on."""
        by_bus_id = {other.pci_bus_id.lower(): other.uuid for other in cards}
        peers: dict[str, None] = {}
        for link in range(self._nvml.module.NVML_NVLINK_MAX_LINKS):
            try:
                if not self._nvml.ask("nvmlDeviceGetNvLinkState", card.handle, link):
                    continue
                remote = self._nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", card.handle, link)
            except NvmlError:
                break  # no more links, or none at all
            peers[by_bus_id.get(text(remote.busId).lower(), SWITCH)] = None
        return Topology(numa_node=self._numa_node(card), nvlink_peers=tuple(peers))

    def _numa_node(self, card: Card) -> int | None:
        address = card.pci_bus_id.lower()[
            -len("0000:00:00.0") :
        ]  # the kernel writes a short domain
        try:
            node = int((self._sys_pci / address / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def read(self, call: Call, handle: Handle) -> Values:
        """Return what a call says of a card or an instance."""
        return READS[call](self._nvml, handle)

    def read_gpm(self, card: Card, gpu_instance_id: int | None) -> Values:
        """Return activity since the last such call; nothing the first time."""
        key = (card.uuid, gpu_instance_id)
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = GpmMeter(self._nvml, card.handle, gpu_instance_id)
        return meter.read()

    def samples(self, card: Card, since_microseconds: int) -> tuple[Sample, ...]:
        """Return the driver's samples of utilization after a time, oldest first."""
        try:
            value_type, samples = self._nvml.ask(
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
        """Return the processes of a card or an instance."""
        try:
            lines = self._nvml.ask(_PROCESS_LISTS[which], handle)
        except NvmlError as error:
            if error.code is not Code.InsufficientSize:
                raise
            # More processes started between sizing the answer and asking for it.
            lines = self._nvml.ask(_PROCESS_LISTS[which], handle)
        return tuple(
            ProcessUse(
                pid=int(line.pid),
                memory_bytes=None if line.usedGpuMemory is None else int(line.usedGpuMemory),
                gpu_instance_id=(
                    None if line.gpuInstanceId == _NO_INSTANCE else int(line.gpuInstanceId)
                ),
            )
            for line in lines
        )

    def process_rates(self, card: Card, since_microseconds: int) -> tuple[ProcessRate, ...]:
        """Return what processes did after a time; those that did nothing are absent."""
        try:
            lines = self._nvml.ask(
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

    def events(self, card: Card) -> "NvmlEvents":
        """Begin to wait for the events of a card."""
        return NvmlEvents(self._nvml, card)


class NvmlEvents:
    """XID errors as they happen.

    Args:
        nvml: the library.
        card: whose: a set of its own, for one card that fails must not cost the others theirs.
    """

    def __init__(self, nvml: Library, card: Card) -> None:
        self._nvml = nvml
        self._uuid = card.uuid
        self._set = nvml.ask("nvmlEventSetCreate")
        try:
            nvml.ask("nvmlDeviceRegisterEvents", card.handle, _XID_EVENTS, self._set)
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> XidEvent | None:
        """Return the next event, None where none came in that time."""
        try:
            data = self._nvml.ask("nvmlEventSetWait_v2", self._set, int(seconds * 1000))
        except NvmlError as error:
            if error.code is Code.Timeout:
                return None
            raise
        if not data.eventType & _XID_EVENTS:
            return None
        instance = int(data.gpuInstanceId)
        return XidEvent(
            uuid=self._uuid,
            gpu_instance_id=None if instance == _NO_INSTANCE else instance,
            xid=int(data.eventData),
        )

    def close(self) -> None:
        """Free the event set."""
        self._nvml.ask("nvmlEventSetFree", self._set)
