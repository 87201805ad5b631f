"""Read one card and its MIG instances; handle failed and unsupported calls."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from agent.gpu.backend import (
    LINK_ERRORS,
    LINK_RECOVERIES,
    UNSUPPORTED_CODES,
    Backend,
    Call,
    Card,
    Code,
    DeviceReading,
    Extra,
    Handle,
    Instance,
    NvmlError,
    ProcessList,
    ProcessRate,
    ProcessUse,
    Topology,
    Values,
)
from agent.gpu.worker import CallTracker
from agent.report.contract import Process
from extender.core.devices.readings import GROWTH_SECONDS, NO_INSTANCES, REMAPPED_SECONDS, Signal

_T = TypeVar("_T")

_GPM, _SAMPLES, _RATES, _PROCESSES, _NONE = "gpm", "samples", "rates", "processes", ""
"""Sources of a device's utilization, best first: GPM, the driver's samples, single readings,
process utilization, none."""

SESSION_CODES: Final = frozenset(
    {Code.Uninitialized, Code.DriverNotLoaded, Code.LibraryNotFound, Code.LibRmVersionMismatch}
)
"""Errors of the whole NVML session, not of one card."""

LOST_CODES: Final = frozenset({Code.GpuIsLost, Code.GpuNotFound})

_LAYOUT_CODES: Final = frozenset({Code.InvalidArgument, Code.NotFound, Code.Unknown})
"""Errors of instance handles after a change of the MIG layout."""

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
"""Signals of a card whose error demands a reset; 1 is the recovery action "reset"."""

_MEAN_OF_RATES: Final = 10
"""Number of utilization readings to average where the driver keeps no samples."""

_MEAN_SECONDS: Final = 15.0
"""Maximum age of a reading in that average; older readings may be of a load that has ended."""

_MAX_RATIO: Final = 1.1

_COUNTERS: Final[Mapping[str, tuple[str, ...]]] = {
    Signal.PCIE_REPLAY_RATE: (Extra.PCIE_REPLAYS,),
    Signal.NVLINK_REPLAY_RATE: (Extra.NVLINK_REPLAYS,),
    Signal.NVLINK_RECOVERY_RATE: (Extra.NVLINK_RECOVERIES, *LINK_RECOVERIES),
    Signal.NVLINK_CRC_RATE: (Extra.NVLINK_CRC_FLITS, Extra.NVLINK_CRC_DATA, *LINK_ERRORS),
}
"""Counters of each rate; of several counters the fastest-growing one counts, as for DCGM.

Totals since the driver was loaded say little about a GPU's present health; their growth does.
"""

_MIN_SECONDS: Final = 60.0
"""Minimum interval of a rate: one error within a second must not look like many per minute."""
_MICROSECONDS: Final = 1_000_000


class _CounterRates:
    """Growth rates of one card's error counters over the last minutes."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, Values]] = deque()

    def rates(self, values: Values, now: float) -> dict[str, float]:
        """Add a reading and return the growth of each counter per second.

        Returns {} until there are two readings.

        Args:
            values: values read, including counters.
            now: seconds since the epoch.
        """
        names = {name for counters in _COUNTERS.values() for name in counters} & values.keys()
        if not names:
            return {}  # the counters could not be read
        self._history.append((now, {name: values[name] for name in names}))
        while len(self._history) > 2 and self._history[1][0] <= now - GROWTH_SECONDS:  # noqa: PLR2004 - it and one before
            self._history.popleft()
        at, before = self._history[0]
        if any(values[name] < before.get(name, 0.0) for name in names) or now < at:
            self._history = deque([self._history[-1]])  # driver reloaded, or clock set back
            return {}
        if now == at:
            return {}
        seconds = max(now - at, _MIN_SECONDS)
        return {
            rate: max((values[name] - before[name]) / seconds for name in known)
            for rate, counters in _COUNTERS.items()
            if (known := [name for name in counters if name in names and name in before])
        }


class _RemappedRows:
    """Number of rows of one card that were remapped within the last day."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, float]] = deque()
        self._since = 0.0

    def recent(self, values: Values, now: float) -> dict[str, float]:
        """Add a reading and return the rows remapped within a day; {} while the number is unknown.

        An increase counts at once. Zero is reported only after a day of readings.

        Args:
            values: values read, including the number of remapped rows.
            now: seconds since the epoch.
        """
        rows = values.get(Signal.UNCORRECTABLE_REMAPPED_ROWS)
        if rows is None:
            return {}
        if not self._changes or rows < self._changes[-1][1] or now < self._changes[-1][0]:
            # Start over: first reading, row count reset, or clock set back.
            self._changes, self._since = deque([(now, rows)]), now
        elif rows > self._changes[-1][1]:
            self._changes.append((now, rows))
        while len(self._changes) > 1 and self._changes[1][0] <= now - REMAPPED_SECONDS:
            self._changes.popleft()
        added = rows - self._changes[0][1]
        is_known = added > 0 or now - self._since >= REMAPPED_SECONDS
        return {Signal.ROWS_REMAPPED_LATELY: added} if is_known else {}


class _ProcessRates:
    """Latest utilization of the processes of one card; idle processes have no entry."""

    def __init__(self) -> None:
        self._since = 0
        self._ratios: dict[int, float] = {}

    def since(self, now: float) -> int:
        """Return the time after which samples are new, in microseconds since the epoch."""
        return _new_since(self._since, now)

    def update(self, lines: Sequence[ProcessRate]) -> None:
        """Replace the rates by those of new samples; a process without new samples is idle."""
        self._since = max((line.at_microseconds for line in lines), default=self._since)
        by_pid: defaultdict[int, list[float]] = defaultdict(list)
        for line in lines:
            by_pid[line.pid].append(min(max(line.utilization_ratio, 0.0), 1.0))
        self._ratios = {pid: sum(ratios) / len(ratios) for pid, ratios in by_pid.items()}

    def apply(self, processes: Iterable[Process]) -> tuple[Process, ...]:
        """Return the processes with their rates.

        Rates of other pids are driver errors, and are ignored.
        """
        return tuple(
            process
            if process.pid not in self._ratios
            else msgspec.structs.replace(process, utilization_ratio=self._ratios[process.pid])
            for process in processes
        )


def _new_since(newest: int, now: float) -> int:
    """Return the time after which samples are new, in microseconds since the epoch.

    At first, and after a sample from the future, this is the last second. From time 0 the driver
    would return every sample since it was loaded, including those of ended processes. After a time
    in the future, as when the clock was set back, it would return none.

    Args:
        newest: time of the newest sample so far, 0 before the first.
        now: seconds since the epoch.
    """
    return newest if 0 < newest <= now * _MICROSECONDS else int((now - 1) * _MICROSECONDS)


def _finite(values: Values) -> Values:
    """Return the values that are finite numbers: a malformed answer counts as missing."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


class CardReader:
    """Reads one card and keeps its state between passes; used by the worker's thread.

    Args:
        topology: NUMA node and NVLink peers of the card.
        instances: its MIG devices, None if MIG is disabled.
        failures: counter of failed calls by call and error, shared by all cards.

    Attributes:
        max_links: highest number of NVLinks that were up at one time.
        expected_links: number of NVLinks that are up on other cards of the same model.
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
        self._suspect_calls: set[tuple[str, int | None]] = set()
        self._verified_calls: set[tuple[str, int | None]] = set()
        self._slow: dict[Call, Values] = {}
        self._signals_by_failed_call: dict[str, Values] = {}
        self._graphics: dict[int | None, tuple[ProcessUse, ...]] = {}
        self._rates = _ProcessRates()
        self._samples_since = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MEAN_OF_RATES)
        self._last_error: NvmlError | None = None
        self._answers = 0
        self.max_links = 0.0
        self.expected_links = 0.0
        self._counter_rates = _CounterRates()
        self._derived: Values = {}
        self._remapped_rows = _RemappedRows()

    @property
    def has_stale_handles(self) -> bool:
        """Whether calls failed in a way that indicates a change of the MIG layout."""
        return bool(self._suspect_calls)

    def refresh_handles(self, card: Card, instances: Sequence[Instance] | None) -> None:
        """Replace the handles after the MIG layout was found unchanged.

        The failed calls then had another cause. A call that fails again with the new handles is
        skipped, and retried only in slow reads.
        """
        self.card, self.instances = card, instances
        self._verified_calls |= self._suspect_calls
        self._suspect_calls.clear()

    def read(
        self, tracker: CallTracker, now: float, *, is_slow: bool, with_rates: bool
    ) -> tuple[DeviceReading, ...]:
        """Read the card.

        Args:
            tracker: makes the calls.
            now: seconds since the epoch.
            is_slow: also read slow-changing values, whose calls cost more.
            with_rates: also read the utilization of each process.

        Raises:
            NvmlError: no call for the card succeeded.
        """
        self._answers, self._last_error = 0, None
        if is_slow:
            self._unsupported -= self._verified_calls
        values: dict[str, float] = {}
        for call in _FAST:
            values.update(self._read(tracker, call) or {})
        if is_slow:
            self._read_slow(tracker, now)
        for slow_values in self._slow.values():
            values.update(slow_values)
        values.update(self._derived)
        if Extra.NVLINKS_UP in values:
            # A link that was never up may be unconnected. A link that was up, or that is up on
            # another card of the model, has failed.
            most = max(self.max_links, self.expected_links)
            values[Signal.NVLINKS_DOWN] = max(most - values[Extra.NVLINKS_UP], 0.0)
        devices: tuple[DeviceReading, ...]
        if self.instances is None:
            devices = (self._read_whole(tracker, now, values, (is_slow, with_rates)),)
        elif not self.instances:
            devices = (self._read_without_instances(now, values),)
        else:
            devices = tuple(self._read_instances(tracker, now, values, is_slow=is_slow))
        if not self._answers and self._last_error is not None:
            raise self._last_error
        return devices

    def _read_slow(self, tracker: CallTracker, now: float) -> None:
        for call in _SLOW if Call.THRESHOLDS in self._slow else (*_SLOW, Call.THRESHOLDS):
            values = self._read(tracker, call)
            if values is None:
                self._slow.pop(call, None)
            else:
                self._slow[call] = values
        counters = {**self._slow.get(Call.FIELDS, {}), **self._slow.get(Call.NVLINK_ERRORS, {})}
        self._derived = {
            **self._counter_rates.rates(counters, now),
            **self._remapped_rows.recent(self._slow.get(Call.REMAPPED_ROWS, {}), now),
        }
        links = self._slow.get(Call.NVLINKS, {})
        self.max_links = max(self.max_links, links.get(Extra.NVLINKS_UP, 0.0))

    def _read_whole(
        self, tracker: CallTracker, now: float, shared: Values, due: tuple[bool, bool]
    ) -> DeviceReading:
        is_slow, with_rates = due
        card = self.card
        values = {**shared, **(self._read(tracker, Call.MEMORY) or {})}
        processes = self._read_processes(tracker, [card.handle], None, is_slow=is_slow)
        if with_rates:
            lines = self._call(
                tracker,
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
        gpm = self._read_gpm(tracker, None)
        source = (
            _GPM
            if Signal.GRAPHICS_ACTIVE in gpm
            else self._utilization(tracker, now, values, processes)
        )
        return self._reading({**values, **gpm, **self._error_signals()}, source, processes, now)

    def _read_without_instances(self, now: float, shared: Values) -> DeviceReading:
        """Read a card that has MIG enabled but no instance.

        No pod can run on the card, but its health counts.
        """
        reading = self._reading({**shared, **self._error_signals()}, _NONE, None, now)
        return replace(reading, mig_profile=NO_INSTANCES)

    def _read_instances(
        self, tracker: CallTracker, now: float, shared: Values, *, is_slow: bool
    ) -> Iterable[DeviceReading]:
        by_id: dict[int, list[Instance]] = {}
        for instance in self.instances or ():
            by_id.setdefault(instance.gpu_instance_id, []).append(instance)
        for number, members in by_id.items():
            handles = [member.handle for member in members]
            memory = self._read(tracker, Call.MEMORY, handles[0], number) or {}
            processes = self._read_processes(tracker, handles, number, is_slow=is_slow)
            gpm = self._read_gpm(tracker, number)
            source = _GPM if Signal.GRAPHICS_ACTIVE in gpm else _NONE
            yield self._reading(
                {**shared, **memory, **gpm, **self._error_signals()},
                source,
                processes,
                now,
                members,
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
        tracker: CallTracker,
        now: float,
        values: dict[str, float],
        processes: Sequence[Process] | None,
    ) -> str:
        """Read utilization of a card without GPM into `values`, and return its source.

        A single reading aliases with the load, so the mean of many counts. The processes' total
        replaces the mean if it is higher, or if there is no other source. A process without
        utilization is not activity: a model that waits for requests is idle.
        """
        values.update(self._read(tracker, Call.RATES) or {})
        since = _new_since(self._samples_since, now)
        samples = (
            self._call(tracker, "samples", None, self._backend.samples, self.card, since) or ()
        )
        ratios = [sample.ratio for sample in samples if 0 <= sample.ratio <= _MAX_RATIO]
        source = _NONE
        if ratios:
            self._samples_since = samples[-1].at_microseconds
            values[Signal.GPU_UTILIZATION] = min(sum(ratios) / len(ratios), 1.0)
            source = _SAMPLES
        elif Signal.GPU_UTILIZATION in values:
            self._recent.append((now, values[Signal.GPU_UTILIZATION]))
            ratios = [ratio for at, ratio in self._recent if 0 <= now - at <= _MEAN_SECONDS]
            values[Signal.GPU_UTILIZATION] = sum(ratios) / len(ratios)
            source = _RATES
        by_processes = min(
            sum(process.utilization_ratio or 0.0 for process in processes or ()), 1.0
        )
        if by_processes > values.get(Signal.GPU_UTILIZATION, 0.0):
            values[Signal.GPU_UTILIZATION] = by_processes
            source = source or _PROCESSES
        return source

    def _read_processes(
        self,
        tracker: CallTracker,
        handles: Sequence[Handle],
        instance: int | None,
        *,
        is_slow: bool,
    ) -> tuple[Process, ...] | None:
        """Return the processes of a device; None if the driver does not list compute processes."""
        compute = self._list_processes(tracker, ProcessList.COMPUTE, handles, instance)
        lines = [
            *(compute or ()),
            *(self._list_processes(tracker, ProcessList.MPS, handles, instance) or ()),
        ]
        if is_slow:
            listed = self._list_processes(tracker, ProcessList.GRAPHICS, handles, instance)
            self._graphics[instance] = listed or ()
        if compute is None:
            return None
        memory_by_pid = {line.pid: line.memory_bytes for line in self._graphics.get(instance, ())}
        for line in lines:
            memory_by_pid[line.pid] = (
                max(memory_by_pid.get(line.pid) or 0, line.memory_bytes or 0) or line.memory_bytes
            )
        return tuple(
            Process(pid=pid, memory_bytes=memory_by_pid[pid]) for pid in sorted(memory_by_pid)
        )

    def _list_processes(
        self,
        tracker: CallTracker,
        which: ProcessList,
        handles: Sequence[Handle],
        instance: int | None,
    ) -> tuple[ProcessUse, ...] | None:
        lists = [
            self._call(tracker, which.value, instance, self._backend.processes, which, handle)
            for handle in handles
        ]
        listed = [lines for lines in lists if lines is not None]
        return tuple(line for lines in listed for line in lines) if listed else None

    def _read_gpm(self, tracker: CallTracker, instance: int | None) -> Values:
        if not self.card.has_gpm:
            return {}
        values = self._call(
            tracker, Call.GPM.value, instance, self._backend.read_gpm, self.card, instance
        )
        return {
            name: min(value, 1.0) if name.endswith("_ratio") else value
            for name, value in _finite(values or {}).items()
        }

    def _read(
        self,
        tracker: CallTracker,
        call: Call,
        handle: Handle | None = None,
        instance: int | None = None,
    ) -> Values | None:
        """Return the values of one call for the card or an instance; None if the call fails."""
        target = self.card.handle if handle is None else handle
        values = self._call(tracker, call.value, instance, self._backend.read, call, target)
        return None if values is None else _finite(values)

    def _call(
        self,
        tracker: CallTracker,
        name: str,
        instance: int | None,
        function: Callable[..., _T],
        *arguments: object,
    ) -> _T | None:
        """Make a call unless it is known to be unsupported; None if it fails.

        Raises:
            NvmlError: the card is lost, or the whole session has failed.
        """
        if (name, instance) in self._unsupported:
            return None
        try:
            answer = tracker.call(self.card.uuid, name, function, *arguments)
        except NvmlError as error:
            self._failed(error, name, instance)
            return None
        self._answers += 1
        self._signals_by_failed_call.pop(name, None)
        return answer

    def _failed(self, error: NvmlError, name: str, instance: int | None) -> None:
        self._failures[name, error.code.name] += 1
        if error.code in SESSION_CODES or error.code in LOST_CODES:
            raise error
        if error.code in UNSUPPORTED_CODES:
            self._unsupported.add((name, instance))
            return
        self._last_error = error
        if error.code is Code.CorruptedInforom:
            self._signals_by_failed_call[name] = {Signal.INFOROM_CORRUPTED: 1.0}
        elif error.code is Code.ResetRequired:
            self._signals_by_failed_call[name] = RESET_REQUIRED
        elif instance is not None and error.code in _LAYOUT_CODES:
            calls = (
                self._unsupported
                if (name, instance) in self._verified_calls
                else self._suspect_calls
            )
            calls.add((name, instance))

    def _error_signals(self) -> Values:
        """Return the signals that failed calls imply, such as a required reset."""
        return {
            name: value
            for signs in self._signals_by_failed_call.values()
            for name, value in signs.items()
        }
