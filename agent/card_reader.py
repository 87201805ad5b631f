"""Reads one card and its MIG instances: what each call says, what fails, what is not supported."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Final, TypeVar

from agent import reading
from agent.backend import (
    Backend,
    Call,
    Card,
    Code,
    Extra,
    Handle,
    Instance,
    NvmlError,
    ProcessList,
    ProcessUse,
    Topology,
    Values,
)
from agent.growth import Growth, Remapped
from agent.process_rates import ProcessRates
from agent.reading import DeviceReading
from agent.report import Process
from agent.worker import Lane
from extender.core.readings import Signal

T = TypeVar("T")

SESSION_CODES: Final = frozenset(
    {Code.Uninitialized, Code.DriverNotLoaded, Code.LibraryNotFound, Code.LibRmVersionMismatch}
)
"""The whole library is cut off, not this card."""

LOST_CODES: Final = frozenset({Code.GpuIsLost, Code.GpuNotFound})

_NEVER: Final = frozenset(
    {Code.NotSupported, Code.FunctionNotFound, Code.ArgumentVersionMismatch, Code.Deprecated}
)
_LAYOUT_CODES: Final = frozenset({Code.InvalidArgument, Code.NotFound, Code.Unknown})
"""What handles of instances answer once the layout has changed."""

_FAST: Final = (Call.POWER, Call.TEMPERATURE, Call.CLOCK_EVENTS)
_SLOW: Final = (
    Call.POWER_LIMIT,
    Call.FIELDS,
    Call.REMAPPED_ROWS,
    Call.SRAM,
    Call.FABRIC,
    Call.NVLINKS,
    Call.NVLINK_ERRORS,
    Call.CLOCKS,
    Call.CODECS,
    Call.ENERGY,
)
RESET_REQUIRED: Final[Values] = MappingProxyType({Signal.RECOVERY_ACTION: 1.0})
"""What an error that asks for a reset says of its card, as the driver numbers recovery actions."""

_MEAN_OF_RATES: Final = 10
"""Where the driver keeps no samples, so many readings stand for them."""

_MEAN_SECONDS: Final = 15.0
"""Older ones say nothing of now: they may be of a load that ended hours ago."""

_MICROSECONDS: Final = 1_000_000
_LARGEST_RATIO: Final = 1.1


class CardReader:
    """What is known of a card; used by the worker's thread.

    Args:
        backend: the library.
        card: the card.
        topology: what it hangs on.
        instances: its MIG devices, None where MIG is off.
        failures: counts failed calls by call and error, for all cards.

    """

    def __init__(
        self,
        backend: Backend,
        card: Card,
        topology: Topology,
        instances: Sequence[Instance] | None,
        failures: Counter[tuple[str, str]],
    ) -> None:
        self.card = card
        self.topology = topology
        self.instances = instances
        self._backend = backend
        self._failures = failures
        self._unsupported: set[tuple[str, int | None]] = set()
        self._suspects: set[tuple[str, int | None]] = set()
        self._cleared: set[tuple[str, int | None]] = set()
        self._slow: dict[Call, Values] = {}
        self._signs: dict[str, Values] = {}
        self._graphics: dict[int | None, tuple[ProcessUse, ...]] = {}
        self._rates = ProcessRates()
        self._samples_since = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MEAN_OF_RATES)
        self._last_error: NvmlError | None = None
        self._answers = 0
        self._most_links = 0.0
        self._growth = Growth()
        self._grown: Values = {}
        self._remapped = Remapped()

    @property
    def is_outdated(self) -> bool:
        """Whether calls failed as they do once the layout has changed."""
        return bool(self._suspects)

    def renew(self, card: Card, instances: Sequence[Instance] | None) -> None:
        """Take fresh handles of the same card and layout.

        What failed was no sign of another layout, then. Where it fails with these handles, too, it
        is left alone but for a try whenever what changes slowly is read.
        """
        self.card, self.instances = card, instances
        self._cleared |= self._suspects
        self._suspects.clear()

    def read(
        self, lane: Lane, now: float, *, is_slow: bool, with_rates: bool
    ) -> tuple[DeviceReading, ...]:
        """Read the card.

        Args:
            lane: makes the calls.
            now: seconds since the epoch.
            is_slow: also what costs more and changes slowly.
            with_rates: also what each process does.

        Raises:
            NvmlError: the card cannot be read at all.
        """
        self._answers, self._last_error = 0, None
        if is_slow:
            self._unsupported -= self._cleared
        values: dict[str, float] = {}
        for call in _FAST:
            values.update(self._read(lane, call) or {})
        if is_slow:
            self._read_slow(lane, now)
        for kept in self._slow.values():
            values.update(kept)
        values.update(self._grown)
        devices: tuple[DeviceReading, ...]
        if self.instances is None:
            devices = (self._read_whole(lane, now, values, (is_slow, with_rates)),)
        else:
            devices = tuple(self._read_instances(lane, now, values, is_slow=is_slow))
        if not self._answers and self._last_error is not None:
            raise self._last_error
        return devices

    def _read_slow(self, lane: Lane, now: float) -> None:
        for call in _SLOW if Call.THRESHOLDS in self._slow else (*_SLOW, Call.THRESHOLDS):
            values = self._read(lane, call)
            if values is None:
                self._slow.pop(call, None)
            else:
                self._slow[call] = values
        counted = {**self._slow.get(Call.FIELDS, {}), **self._slow.get(Call.NVLINK_ERRORS, {})}
        self._grown = {
            **self._growth.rates(counted, now),
            **self._remapped.lately(self._slow.get(Call.REMAPPED_ROWS, {}), now),
        }
        if Call.NVLINKS in self._slow:
            # Links that were never up may lead nowhere; one that was up has failed.
            up = self._slow[Call.NVLINKS][Extra.NVLINKS_UP]
            self._most_links = max(self._most_links, up)
            self._slow[Call.NVLINKS] = {
                Extra.NVLINKS_UP: up,
                Signal.NVLINKS_DOWN: self._most_links - up,
            }

    def _read_whole(
        self, lane: Lane, now: float, shared: Values, due: tuple[bool, bool]
    ) -> DeviceReading:
        is_slow, with_rates = due
        card = self.card
        values = {**shared, **(self._read(lane, Call.MEMORY) or {})}
        processes = self._processes(lane, [card.handle], None, is_slow=is_slow)
        if with_rates:
            lines = self._try(
                lane,
                "process_rates",
                None,
                self._backend.process_rates,
                card,
                self._rates.since(now),
            )
            if lines is not None:
                self._rates.update(lines)
        if processes is not None:
            processes = self._rates.apply(processes)
        gpm = self._read_gpm(lane, None)
        source = (
            reading.GPM
            if Signal.GRAPHICS_ACTIVE in gpm
            else self._utilization(lane, now, values, processes)
        )
        return self._reading({**values, **gpm, **self._signed()}, source, processes, now)

    def _read_instances(
        self, lane: Lane, now: float, shared: Values, *, is_slow: bool
    ) -> Iterable[DeviceReading]:
        by_id: dict[int, list[Instance]] = {}
        for instance in self.instances or ():
            by_id.setdefault(instance.gpu_instance_id, []).append(instance)
        for number, members in by_id.items():
            handles = [member.handle for member in members]
            memory = self._read(lane, Call.MEMORY, handles[0], number) or {}
            processes = self._processes(lane, handles, number, is_slow=is_slow)
            gpm = self._read_gpm(lane, number)
            source = reading.GPM if Signal.GRAPHICS_ACTIVE in gpm else reading.NONE
            yield self._reading(
                {**shared, **memory, **gpm, **self._signed()}, source, processes, now, members
            )

    def _reading(
        self,
        values: Values,
        source: str,
        processes: tuple[Process, ...] | None,
        now: float,
        members: Sequence[Instance] = (),
    ) -> DeviceReading:
        return DeviceReading(
            card=self.card,
            topology=self.topology,
            gpu_instance_id=str(members[0].gpu_instance_id) if members else "",
            mig_uuids=tuple(member.uuid for member in members),
            mig_profile=members[0].profile if members else "",
            values=values,
            source=source,
            processes=processes,
            measured_at=now,
        )

    def _utilization(
        self,
        lane: Lane,
        now: float,
        values: dict[str, float],
        processes: Sequence[Process] | None,
    ) -> str:
        """Read utilization where the card does not count it, and say what told it.

        One reading is an alias of the load, so the mean of many counts; and where processes say
        that they were busier than that, or nothing else tells, they are right. A process that is
        merely there is no activity: a model that waits for work is idle.
        """
        values.update(self._read(lane, Call.RATES) or {})
        since = self._samples_since or int((now - 1) * _MICROSECONDS)
        samples = self._try(lane, "samples", None, self._backend.samples, self.card, since) or ()
        ratios = [sample.ratio for sample in samples if 0 <= sample.ratio <= _LARGEST_RATIO]
        source = reading.NONE
        if ratios:
            self._samples_since = samples[-1].at_microseconds
            values[Signal.GPU_UTILIZATION] = min(sum(ratios) / len(ratios), 1.0)
            source = reading.SAMPLES
        elif Signal.GPU_UTILIZATION in values:
            self._recent.append((now, values[Signal.GPU_UTILIZATION]))
            ratios = [ratio for at, ratio in self._recent if 0 <= now - at <= _MEAN_SECONDS]
            values[Signal.GPU_UTILIZATION] = sum(ratios) / len(ratios)
            source = reading.RATES
        by_processes = min(
            sum(process.utilization_ratio or 0.0 for process in processes or ()), 1.0
        )
        if by_processes > values.get(Signal.GPU_UTILIZATION, 0.0):
            values[Signal.GPU_UTILIZATION] = by_processes
            source = source or reading.PROCESSES
        return source

    def _processes(
        self, lane: Lane, handles: Sequence[Handle], instance: int | None, *, is_slow: bool
    ) -> tuple[Process, ...] | None:
        """Return the processes of a device, None where the driver does not list them."""
        compute = self._list(lane, ProcessList.COMPUTE, handles, instance)
        lines = [*(compute or ()), *(self._list(lane, ProcessList.MPS, handles, instance) or ())]
        if is_slow:
            listed = self._list(lane, ProcessList.GRAPHICS, handles, instance)
            self._graphics[instance] = listed or ()
        if compute is None:
            return None
        known = {line.pid: line.memory_bytes for line in self._graphics.get(instance, ())}
        for line in lines:
            known[line.pid] = max(known.get(line.pid) or 0, line.memory_bytes or 0) or (
                line.memory_bytes
            )
        return tuple(Process(pid=pid, memory_bytes=known[pid]) for pid in sorted(known))

    def _list(
        self, lane: Lane, which: ProcessList, handles: Sequence[Handle], instance: int | None
    ) -> tuple[ProcessUse, ...] | None:
        lists = [
            self._try(lane, which.value, instance, self._backend.processes, which, handle)
            for handle in handles
        ]
        known = [lines for lines in lists if lines is not None]
        return tuple(line for lines in known for line in lines) if known else None

    def _read_gpm(self, lane: Lane, instance: int | None) -> Values:
        if not self.card.has_gpm:
            return {}
        values = self._try(
            lane, Call.GPM.value, instance, self._backend.read_gpm, self.card, instance
        )
        return {
            name: min(value, 1.0) if name.endswith("_ratio") else value
            for name, value in (values or {}).items()
        }

    def _read(
        self, lane: Lane, call: Call, handle: Handle | None = None, instance: int | None = None
    ) -> Values | None:
        """Return what a call says of the card or an instance, None where it fails."""
        target = self.card.handle if handle is None else handle
        return self._try(lane, call.value, instance, self._backend.read, call, target)

    def _try(
        self,
        lane: Lane,
        name: str,
        instance: int | None,
        function: Callable[..., T],
        *arguments: object,
    ) -> T | None:
        """Make a call, unless it is known to be in vain; None where it fails for itself.

        Raises:
            NvmlError: the card or the whole library is cut off.
        """
        if (name, instance) in self._unsupported:
            return None
        try:
            answer = lane.call(self.card.uuid, name, function, *arguments)
        except NvmlError as error:
            self._failed(error, name, instance)
            return None
        self._answers += 1
        self._signs.pop(name, None)
        return answer

    def _failed(self, error: NvmlError, name: str, instance: int | None) -> None:
        self._failures[name, error.code.name] += 1
        if error.code in SESSION_CODES or error.code in LOST_CODES:
            raise error
        if error.code in _NEVER:
            self._unsupported.add((name, instance))
            return
        self._last_error = error
        if error.code is Code.CorruptedInforom:
            self._signs[name] = {Signal.INFOROM_CORRUPTED: 1.0}
        elif error.code is Code.ResetRequired:
            self._signs[name] = RESET_REQUIRED
        elif instance is not None and error.code in _LAYOUT_CODES:
            known = self._unsupported if (name, instance) in self._cleared else self._suspects
            known.add((name, instance))

    def _signed(self) -> Values:
        """Return what failed calls say of the card."""
        return {name: value for signs in self._signs.values() for name, value in signs.items()}
