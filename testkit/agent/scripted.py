"""Scripted driver library with faults, layout changes and hung calls for tests."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.gpu.backend import (
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
from extender.core.devices.readings import Signal

GIB = 1 << 30

HEALTHY: dict[Call, Values] = {
    Call.RATES: {Signal.GPU_UTILIZATION: 0.0, Signal.MEMORY_COPY_UTILIZATION: 0.0},
    Call.MEMORY: {
        Signal.MEMORY_TOTAL: 80.0 * GIB,
        Signal.MEMORY_USED: 0.0,
        Signal.MEMORY_FREE: 79.5 * GIB,
        Signal.MEMORY_RESERVED: 0.5 * GIB,
    },
    Call.POWER: {Signal.POWER: 80.0},
    Call.TEMPERATURE: {Signal.TEMPERATURE: 40.0},
    Call.CLOCK_EVENTS: {Signal.CLOCK_EVENT_REASONS: 1.0},
    Call.CLOCKS: {"sm_clock_hertz": 1.98e9, "memory_clock_hertz": 3.2e9},
    Call.POWER_LIMIT: {Signal.POWER_LIMIT: 700.0},
    Call.FIELDS: {
        Signal.MEMORY_TEMPERATURE: 45.0,
        Signal.ECC_DOUBLE_BIT_VOLATILE: 0.0,
        Signal.RECOVERY_ACTION: 0.0,
        "pcie_replays_total": 0.0,
    },
    Call.REMAPPED_ROWS: {
        Signal.UNCORRECTABLE_REMAPPED_ROWS: 0.0,
        Signal.ROW_REMAP_PENDING: 0.0,
        Signal.ROW_REMAP_FAILURE: 0.0,
        "correctable_remapped_rows": 0.0,
    },
    Call.SRAM: {Signal.SRAM_THRESHOLD_EXCEEDED: 0.0},
    Call.FABRIC: {Signal.FABRIC_MANAGER_STATUS: 3.0, Signal.FABRIC_HEALTH: 1.0},
    Call.NVLINKS: {"nvlinks_up": 18.0},
    Call.NVLINK_ERRORS: {},
    Call.CODECS: {"encoder_utilization_ratio": 0.0, "decoder_utilization_ratio": 0.0},
    Call.ENERGY: {"energy_joules_total": 1000.0},
    Call.THRESHOLDS: {Signal.TEMPERATURE_SHUTDOWN: 95.0, Signal.TEMPERATURE_SLOWDOWN: 89.0},
}

IDLE_GPM: Values = {
    Signal.GRAPHICS_ACTIVE: 0.0,
    Signal.SM_ACTIVE: 0.0,
    Signal.TENSOR_ACTIVE: 0.0,
    Signal.DRAM_ACTIVE: 0.0,
}

GLOBAL = ""
"""Key of calls that are not about a single card."""


@dataclass
class ScriptedCard:
    """Card of the scripted library; tests may change every field at any time."""

    uuid: str
    minor: int | None = None
    model: str = "NVIDIA H100 80GB HBM3"
    gpm: Values | None = field(default_factory=lambda: dict(IDLE_GPM))
    values: dict[Call, Values] = field(default_factory=lambda: dict(HEALTHY))
    samples: list[Sample] = field(default_factory=list)
    processes: dict[ProcessList, tuple[ProcessUse, ...]] = field(default_factory=dict)
    rates: tuple[ProcessRate, ...] = ()
    instances: tuple[Instance, ...] | None = None
    topology: Topology = field(default_factory=lambda: Topology(numa_node=0, nvlink_peers=()))

    def set(self, call: Call, **values: float) -> None:
        """Set values that a call returns, each by the name of its signal (`POWER=300.0`)."""
        named: dict[str, float] = {Signal[name]: value for name, value in values.items()}
        self.values[call] = {**self.values[call], **named}


def migs(*members: tuple[int, str]) -> tuple[Instance, ...]:
    """Return MIG devices of (GPU instance id, profile) pairs."""
    return tuple(
        Instance(handle=f"{number}", uuid=f"MIG-{number}", gpu_instance_id=number, profile=profile)
        for number, profile in members
    )


class ScriptedBackend:
    """Scripted library; keys of `faults` and `hangs` are pairs: call, and card's UUID or GLOBAL."""

    def __init__(self, *cards: ScriptedCard, driver: str = "580.95.05") -> None:
        self.cards = list(cards)
        self.driver = driver
        self.faults: dict[tuple[str, str], Code] = {}
        self.hangs: set[tuple[str, str]] = set()
        self.released = threading.Event()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.is_started = False
        self.starts = 0
        self.events_waiting: list[tuple[str, XidEvent | Code]] = []
        self.event_came = threading.Condition()
        self.event_seconds = 0.05
        self.watched: set[str] = set()

    def _answer(self, call: str, uuid: str = GLOBAL) -> None:
        self.calls[call, uuid] += 1
        if (call, uuid) in self.hangs and not self.released.wait(60):
            raise AssertionError("the test did not release the hung call")
        code = self.faults.get((call, uuid))
        if code is not None:
            raise NvmlError(call, code)

    def _at(self, handle: Handle, call: str) -> ScriptedCard:
        card = next((one for one in self.cards if one.uuid == handle), None)
        if card is None:
            raise NvmlError(call, Code.InvalidArgument)
        return card

    def start(self) -> None:
        self._answer("start")
        self.is_started = True
        self.starts += 1

    def stop(self) -> None:
        self.is_started = False
        self._answer("stop")

    def driver_version(self) -> str:
        self._answer("driver_version")
        return self.driver

    def count(self) -> int:
        self._answer("count")
        return len(self.cards)

    def card(self, index: int) -> Card:
        card = self.cards[index]
        self._answer("card", card.uuid)
        return Card(
            handle=card.uuid,
            index=index,
            minor=card.minor,
            uuid=card.uuid,
            model=card.model,
            pci_bus_id=f"00000000:{index:02X}:00.0",
            has_gpm=card.gpm is not None,
        )

    def instances(self, card: Card) -> tuple[Instance, ...] | None:
        self._answer("instances", card.uuid)
        found = self._at(card.handle, "instances").instances
        if found is None:
            return None
        return tuple(
            Instance(
                handle=(card.uuid, one.handle),
                uuid=one.uuid,
                gpu_instance_id=one.gpu_instance_id,
                profile=one.profile,
            )
            for one in found
        )

    def topology(self, card: Card, cards: Sequence[Card]) -> Topology:
        del cards
        self._answer("topology", card.uuid)
        return self._at(card.handle, "topology").topology

    def _owner(self, handle: Handle, call: str) -> tuple[ScriptedCard, str]:
        """Return the card of a handle and its instance ID, "" for the card itself."""
        if not isinstance(handle, tuple):
            return self._at(handle, call), ""
        uuid, number = handle
        card = self._at(uuid, call)
        if number not in {one.handle for one in card.instances or ()}:
            raise NvmlError(call, Code.InvalidArgument)
        return card, number

    def read(self, call: Call, handle: Handle) -> Values:
        card, number = self._owner(handle, call)
        self._answer(call, card.uuid)
        if number and call is not Call.MEMORY:
            raise NvmlError(call, Code.NotSupported)
        return card.values[call]

    def read_gpm(self, card: Card, gpu_instance_id: int | None) -> Values:
        self._answer(Call.GPM, card.uuid)
        scripted = self._at(card.handle, Call.GPM)
        known = {one.gpu_instance_id for one in scripted.instances or ()}
        if gpu_instance_id is not None and gpu_instance_id not in known:
            raise NvmlError(Call.GPM, Code.InvalidArgument)
        return scripted.gpm or {}

    def samples(self, card: Card, since_microseconds: int) -> tuple[Sample, ...]:
        self._answer("samples", card.uuid)
        samples = self._at(card.handle, "samples").samples
        return tuple(one for one in samples if one.at_microseconds > since_microseconds)

    def processes(self, which: ProcessList, handle: Handle) -> tuple[ProcessUse, ...]:
        card, number = self._owner(handle, which)
        self._answer(which, card.uuid)
        lines = card.processes.get(which, ())
        return tuple(one for one in lines if not number or str(one.gpu_instance_id) == number)

    def process_rates(self, card: Card, since_microseconds: int) -> tuple[ProcessRate, ...]:
        self._answer("process_rates", card.uuid)
        rates = self._at(card.handle, "process_rates").rates
        return tuple(one for one in rates if one.at_microseconds > since_microseconds)

    def events(self, card: Card) -> "ScriptedEvents":
        self._answer("events", card.uuid)
        self.watched.add(card.uuid)
        return ScriptedEvents(self, card.uuid)

    def happen(self, event: XidEvent | Code, uuid: str = "GPU-0") -> None:
        """Deliver an event of a card, or make the wait for it fail."""
        with self.event_came:
            self.events_waiting.append((event.uuid if isinstance(event, XidEvent) else uuid, event))
            self.event_came.notify_all()


class ScriptedEvents:
    """Event set that returns the events of the test."""

    def __init__(self, backend: ScriptedBackend, uuid: str) -> None:
        self._backend = backend
        self._uuid = uuid

    def wait(self, seconds: float) -> XidEvent | None:
        self._backend._answer("wait", self._uuid)
        waiting = self._backend.events_waiting
        with self._backend.event_came:
            mine = next((one for one in waiting if one[0] == self._uuid), None)
            if mine is None:
                self._backend.event_came.wait(min(seconds, self._backend.event_seconds))
                mine = next((one for one in waiting if one[0] == self._uuid), None)
            if mine is None:
                return None
            waiting.remove(mine)
            event = mine[1]
        if isinstance(event, Code):
            raise NvmlError("wait", event)
        return event

    def close(self) -> None:
        self._backend.watched.discard(self._uuid)
