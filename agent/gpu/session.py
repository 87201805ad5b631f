"""Read all cards in one pass: start NVML, list the cards, read each, recover from failures.

Describe driver errors for operators: the failed operation, the cause, and the remedy.

Runs in the worker's thread. After a hang the next thread continues with the same session.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from agent.gpu.backend import (
    SWITCH,
    Backend,
    Card,
    Code,
    DeviceReading,
    Instance,
    NodeReading,
    NvmlError,
    Topology,
)
from agent.gpu.card_reader import LOST_CODES, RESET_REQUIRED, SESSION_CODES, CardReader
from agent.gpu.events import XidWatcher
from agent.gpu.worker import CallTracker
from agent.report.contract import Problem

_HUNG: Final = "Hung"
_GONE: Final = "Gone"
_NO_GPU: Final = "NoGpu"

_RESTART: Final = "this container must restart, and does so once /healthz has failed long enough"

_RESET: Final = (
    "drain the node, the agent too, because an open GPU cannot be reset (kubectl "
    "label node NODE idlegpu.io/agent=false, and remove the label afterwards), and run "
    "nvidia-smi --gpu-reset"
)

_CAUSES: Final[Mapping[Code, str]] = {
    Code.Uninitialized: "NVML lost its connection to the driver: the agent starts it again",
    Code.NoPermission: "the container may not open the GPU: give it the devices "
    "(NVIDIA_VISIBLE_DEVICES=all), and for MIG run it privileged; if it had access before, "
    f"{_RESTART}",
    Code.DriverNotLoaded: "the NVIDIA kernel module is not loaded: load it (modprobe nvidia), "
    "or wait for the GPU operator to load it",
    Code.LibraryNotFound: "the NVIDIA driver library (libnvidia-ml.so.1) is missing: install "
    "the driver; in a container use runtimeClassName: nvidia with NVIDIA_VISIBLE_DEVICES=all "
    "and NVIDIA_DRIVER_CAPABILITIES=utility",
    Code.FunctionNotFound: "the driver is too old for this call: upgrade it",
    Code.CorruptedInforom: f"the GPU's infoROM is damaged: {_RESET}; if it stays, replace the card",
    Code.GpuIsLost: "the GPU has fallen off the bus: drain the node and restart the machine",
    Code.ResetRequired: f"the GPU must be reset: {_RESET}",
    Code.OperatingSystem: "the operating system refuses access to the GPU, as after `systemctl "
    f"daemon-reload` on the host, which takes the devices from containers: {_RESTART}",
    Code.LibRmVersionMismatch: "the driver was upgraded under this process, and its library "
    f"does not fit the new kernel module: {_RESTART}",
    Code.InUse: "another program uses the GPU exclusively (profiling, or a change of its MIG "
    "layout): wait until that program ends",
    Code.GpuNotFound: "the driver does not list the GPU any more: see dmesg for XID errors",
    Code.Timeout: "the GPU did not answer in time: see dmesg for XID errors",
    Code.NotReady: "the driver is still starting",
    Code.Unknown: "the driver gives no cause; if it persists, the container has lost its "
    f"devices: {_RESTART}",
}

_NEEDS_RESTART: Final = frozenset(
    {Code.LibRmVersionMismatch, Code.Unknown, Code.OperatingSystem, Code.NoPermission}
)
"""Errors that only a new container fixes, if the GPU was readable before."""

_NO_CARD: Final = ""
_UNKNOWN_TOPOLOGY: Final = Topology(numa_node=None, nvlink_peers=())

_RELIST_SECONDS: Final = 0.5
"""Delay until cards and instances are listed again after an instance failed."""


def problem_of(error: NvmlError, what: str) -> Problem:
    """Describe a failed NVML call.

    Args:
        what: the operation that failed, such as `cannot start NVML`.
    """
    cause = _CAUSES.get(error.code, f"{error.call} failed: see dmesg for driver errors")
    return Problem(code=error.code.name, text=f"{what}: {error.text}: {cause}")


def hung_problem(call: str, seconds: float) -> Problem:
    """Describe a call that did not return within `seconds`."""
    return Problem(
        code=_HUNG,
        text=f"{call} did not return within {seconds:g} s: the driver hangs, as with a GPU that "
        "has fallen off the bus: see dmesg; if it persists, drain the node and restart the machine "
        "(a new container does not help)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Intervals of reads, in seconds.

    Attributes:
        slow_seconds: interval of slow-changing values, whose calls cost more, and of layout checks.
        process_seconds: interval of process utilization.
        start_limit_seconds: time limit for starting NVML.
        retry_seconds: longest wait before NVML is started again.
    """

    slow_seconds: float = 10.0
    process_seconds: float = 5.0
    start_limit_seconds: float = 60.0
    retry_seconds: float = 30.0


class Session:
    """State of the driver and its cards between passes.

    Args:
        watcher: waits for the events of the listed cards.
        cadence: intervals of reads; None for the defaults.
        clock: seconds since the epoch.

    Attributes:
        failures: counter of failed calls by call and error.
    """

    def __init__(
        self,
        backend: Backend,
        watcher: XidWatcher,
        *,
        cadence: Cadence | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures: Counter[tuple[str, str]] = Counter()
        self._backend = backend
        self._watcher = watcher
        self._cadence = cadence or Cadence()
        self._clock = clock
        self._monotonic = monotonic
        self._driver_version = ""
        self._is_started = False
        self._has_worked = False
        self._problem: Problem | None = None
        self._needs_restart = False
        self._start_at = 0.0
        self._backoff = 1.0
        self._readers: dict[str, CardReader] = {}
        self._last: dict[str, tuple[DeviceReading, ...]] = {}
        self._slow_at = 0.0
        self._is_slow_requested = False
        self._processes_at = 0.0
        self._hang_problems: dict[str, Problem] = {}
        self._node_hang_problem: Problem | None = None
        self._lost: set[str] = set()

    def read(self, tracker: CallTracker, skipped: Collection[str]) -> NodeReading:
        """Make one pass and return its values.

        Args:
            tracker: makes the calls.
            skipped: UUIDs of cards with a hung call; "" if a call that concerns no card hangs.
        """
        self._hang_problems = {
            name: problem for name, problem in self._hang_problems.items() if name in skipped
        }
        can_start = _NO_CARD not in skipped and self._monotonic() >= self._start_at
        try:
            if self._is_started or can_start:
                self._read_all(tracker, skipped)
        except NvmlError as error:
            self._disconnect(tracker, error)
        self._update_hang_problem(skipped)
        if self._is_started and not skipped and self._is_nothing_readable():
            self._shut_down(tracker)
        return self.last_reading()

    def _is_nothing_readable(self) -> bool:
        """Return whether every card has a problem, so that NVML must be started again."""
        devices = [device for devices in self._last.values() for device in devices]
        return all(device.problem is not None for device in devices)

    def _read_all(self, tracker: CallTracker, skipped: Collection[str]) -> None:
        if not self._is_started:
            self._start(tracker)
        now = self._monotonic()
        if self._is_slow_requested:
            self._is_slow_requested, self._slow_at = False, now
        is_slow = now >= self._slow_at and _NO_CARD not in skipped
        with_rates = now >= self._processes_at
        if is_slow:
            self._find_cards(tracker, skipped)
        for uuid, reader in self._readers.items():
            if uuid not in skipped:
                self._read_card(tracker, reader, is_slow=is_slow, with_rates=with_rates)
        # Set due times last: after a hang, the next thread repeats the interrupted read.
        if is_slow:
            self._set_expected_links()
            self._slow_at = now + self._cadence.slow_seconds
        if with_rates:
            self._processes_at = now + self._cadence.process_seconds
        if any(
            one.has_stale_handles for uuid, one in self._readers.items() if uuid not in self._lost
        ):
            self._slow_at = min(self._slow_at, now + _RELIST_SECONDS)
        self._update_needs_restart()

    def request_slow_read(self) -> None:
        """Also read slow-changing values in the next pass. Safe to call from any thread."""
        self._is_slow_requested = True

    def last_reading(self) -> NodeReading:
        """Return the latest values of all devices."""
        return NodeReading(
            driver_version=self._driver_version,
            devices=tuple(device for devices in self._last.values() for device in devices),
            problem=self._problem or self._node_hang_problem,
            # A thread that hangs in the driver outlives the container, so a restart does not help,
            # and would remove the agent that reports the hang.
            needs_restart=self._needs_restart and not self._hang_problems,
        )

    def mark_hung(self, uuid: str, problem: Problem) -> None:
        """Set the problem of a card whose call hangs; for "", of the whole node."""
        self._hang_problems[uuid] = problem
        if uuid in self._last:
            self._last[uuid] = tuple(
                replace(device, problem=problem) for device in self._last[uuid]
            )
        else:
            self._problem = problem

    def _start(self, tracker: CallTracker) -> None:
        """Start NVML, and set the time of the next attempt in case of failure."""
        self._start_at = self._monotonic() + self._backoff
        self._backoff = min(self._backoff * 2, self._cadence.retry_seconds)
        limit = self._cadence.start_limit_seconds
        tracker.call(_NO_CARD, "nvmlInit", self._backend.start, limit_seconds=limit)
        self._is_started = True
        self._readers.clear()
        self._slow_at = self._processes_at = 0.0

    def _find_cards(self, tracker: CallTracker, skipped: Collection[str]) -> None:
        """List the cards and instances; keep the readers of unchanged cards."""
        if not self._driver_version:
            self._driver_version = self._read_driver_version(tracker)
        count = tracker.call(_NO_CARD, "nvmlDeviceGetCount", self._backend.count)
        self._problem = next(
            (p for name, p in self._hang_problems.items() if name not in self._last), None
        )
        unopened: dict[str, Problem] = {}
        by_uuid: dict[str, Card] = {}
        for index in range(count):
            card = self._open(tracker, index, skipped, unopened)
            if card is not None and by_uuid.setdefault(card.uuid, card) is not card:
                unopened[f"GPU {index}"] = _twice_problem(card)
        cards = list(by_uuid.values())
        found = {card.uuid for card in cards} | set(skipped)
        self._watcher.watch(cards, unchanged=skipped)
        for card in cards:
            if card.uuid not in skipped:
                self._update_reader(tracker, card, cards)
        self._mark_missing(self._last.keys() - found, unopened)
        if not count:
            self._problem = Problem(
                code=_NO_GPU,
                text="the driver lists no GPU: does this node have one, and may the "
                "container use it (NVIDIA_VISIBLE_DEVICES=all)?",
            )

    def _read_driver_version(self, tracker: CallTracker) -> str:
        """Return the driver's version; "" if it cannot be read."""
        name = "nvmlSystemGetDriverVersion"
        try:
            return tracker.call(_NO_CARD, name, self._backend.driver_version)
        except NvmlError as error:
            self._count_unread((error,))
            return ""

    def _open(
        self,
        tracker: CallTracker,
        index: int,
        skipped: Collection[str],
        unopened: dict[str, Problem],
    ) -> Card | None:
        """Open a card; return None and record the problem if that fails."""
        known = next((r.card.uuid for r in self._readers.values() if r.card.index == index), None)
        subject = known or f"GPU {index}"
        if subject in skipped:
            return None
        try:
            card = tracker.call(subject, "nvmlDeviceGetHandleByIndex", self._backend.card, index)
            self._count_unread(card.unread)
            return card
        except NvmlError as error:
            self.failures[error.call, error.code.name] += 1
            if error.code in SESSION_CODES:
                raise
            unopened[subject] = problem_of(error, f"cannot open GPU {index}")
            return None

    def _count_unread(self, errors: Iterable[NvmlError]) -> None:
        """Count errors of optional values; raise an error of the card or of the session."""
        for error in errors:
            if error.code in SESSION_CODES or error.code in LOST_CODES:
                raise error
            self.failures[error.call, error.code.name] += 1

    def _mark_missing(self, missing: Collection[str], unopened: Mapping[str, Problem]) -> None:
        """Set the problem of cards that disappeared, and of new cards that cannot be opened."""
        for uuid in missing:
            # The missing card may be any of those that cannot be opened.
            problem = (
                unopened.get(uuid) or next(iter(unopened.values()), None) or _missing_problem(uuid)
            )
            if uuid not in unopened:
                self._readers.pop(uuid, None)
            self._mark_unreadable(uuid, problem)
        new_cards = [problem for name, problem in unopened.items() if name not in self._last]
        if new_cards:
            self._problem = new_cards[0]

    def _update_reader(self, tracker: CallTracker, card: Card, cards: list[Card]) -> None:
        """Keep a card's reader, or create one for a new card or layout."""
        known = self._readers.get(card.uuid)
        self._last.setdefault(card.uuid, (DeviceReading(card=card, topology=_UNKNOWN_TOPOLOGY),))
        try:
            instances = tracker.call(card.uuid, "instances", self._backend.instances, card)
            if known is not None and self._can_reuse(known, card, instances):
                known.refresh_handles(card, instances)
                if known.topology.unread:
                    known.topology = self._read_topology(tracker, card, cards)
                return
            topology = self._read_topology(tracker, card, cards)
        except NvmlError as error:
            self.failures[error.call, error.code.name] += 1
            if error.code in SESSION_CODES:
                raise
            self._mark_unreadable(card.uuid, problem_of(error, f"cannot read GPU {card.index}"))
            return
        self._readers[card.uuid] = CardReader(
            self._backend, card, topology, instances, self.failures
        )

    def _read_topology(self, tracker: CallTracker, card: Card, cards: list[Card]) -> Topology:
        """Read the topology; unknown if the call fails, which affects no other value."""
        try:
            topology = tracker.call(card.uuid, "topology", self._backend.topology, card, cards)
        except NvmlError as error:
            topology = replace(_UNKNOWN_TOPOLOGY, unread=(error,))
        self._count_unread(topology.unread)
        return topology

    def _can_reuse(
        self, reader: CardReader, card: Card, instances: tuple[Instance, ...] | None
    ) -> bool:
        """Return whether a reader still fits its card, and the card is not lost."""
        fits = (reader.card, reader.instances) == (card, instances)
        return fits and card.uuid not in self._lost

    def _read_card(
        self, tracker: CallTracker, reader: CardReader, *, is_slow: bool, with_rates: bool
    ) -> None:
        card = reader.card
        try:
            devices = reader.read(tracker, self._clock(), is_slow=is_slow, with_rates=with_rates)
        except NvmlError as error:
            if error.code in SESSION_CODES:
                raise
            self._mark_unreadable(card.uuid, problem_of(error, f"cannot read GPU {card.index}"))
            return
        self._last[card.uuid] = devices
        self._lost.discard(card.uuid)

    def _mark_unreadable(self, uuid: str, problem: Problem) -> None:
        """Set the problem of a card that cannot be read, and drop its values."""
        devices = _without_values(self._last.get(uuid, ()), problem)
        if problem.code == Code.ResetRequired.name:  # the error itself is a current reading
            devices = (
                replace(device, values=RESET_REQUIRED, measured_at=self._clock())
                for device in devices
            )
        self._last[uuid] = tuple(devices)
        self._lost.add(uuid)

    def _set_expected_links(self) -> None:
        """Set the number of NVLinks that each card should have: that of other cards of its model.

        Without an NVSwitch, a PCIe card without links may have no NVLink bridge, which is optional;
        an SXM card is linked by its board. Cards with MIG enabled have no active links.
        """
        by_model: dict[str, list[CardReader]] = {}
        for reader in self._readers.values():
            if reader.instances is None and reader.card.model:
                by_model.setdefault(reader.card.model, []).append(reader)
        for model, siblings in by_model.items():
            most = max(one.max_links for one in siblings)
            is_linked = _is_sxm(model) or any(
                SWITCH in one.topology.nvlink_peers for one in siblings
            )
            for one in siblings:
                one.expected_links = most if one.max_links or is_linked else 0.0

    def _update_needs_restart(self) -> None:
        """Set whether the container has lost access to all cards, so that it must restart."""
        problems = [device.problem for devices in self._last.values() for device in devices]
        codes = {problem.code for problem in problems if problem is not None}
        if not problems or None in problems:
            if problems:
                self._has_worked, self._backoff = True, 1.0
            self._needs_restart = False
            return
        needing = {code.name for code in _NEEDS_RESTART}
        self._needs_restart = self._has_worked and codes <= needing
        if codes & needing:
            self._problem = next(problem for problem in problems if problem is not None)

    def _update_hang_problem(self, skipped: Collection[str]) -> None:
        """Set the node's problem if hung calls keep all cards from being read."""
        is_any_read = any(
            uuid not in skipped and all(device.problem is None for device in devices)
            for uuid, devices in self._last.items()
        )
        self._node_hang_problem = (
            None if is_any_read else next(iter(self._hang_problems.values()), None)
        )

    def _shut_down(self, tracker: CallTracker) -> None:
        """Shut NVML down; a later pass starts it again.

        An open NVML session blocks driver upgrades, GPU resets and changes of the MIG layout.
        """
        self._is_started = False
        self._watcher.stop()
        self._readers.clear()
        self._driver_version = ""
        with contextlib.suppress(NvmlError):  # the session may have failed already
            tracker.call(_NO_CARD, "nvmlShutdown", self._backend.stop)

    def _disconnect(self, tracker: CallTracker, error: NvmlError) -> None:
        """Shut NVML down after it lost the driver, and set the node's problem."""
        self.failures[error.call, error.code.name] += 1
        what = "cannot read the GPUs" if self._is_started else "cannot start NVML"
        self._problem = problem_of(error, what)
        self._needs_restart = error.code is Code.LibRmVersionMismatch or (
            self._has_worked and error.code in _NEEDS_RESTART
        )
        for uuid, devices in self._last.items():
            self._last[uuid] = tuple(_without_values(devices, self._problem))
        if self._is_started:
            self._shut_down(tracker)


def _is_sxm(model: str) -> bool:
    """Return whether a model is an SXM module, by its product name.

    From Hopper on, the name of an SXM module has the memory (`NVIDIA H100 80GB HBM3`) or nothing
    (`NVIDIA H200`), and that of a PCIe card `PCIe` or `NVL`.

    Example:
        >>> [_is_sxm(f"NVIDIA {name}") for name in ("A100-SXM4-80GB", "H100 80GB HBM3", "H200")]
        [True, True, True]
        >>> [_is_sxm(f"NVIDIA {name}") for name in ("A100 80GB PCIe", "H100 NVL", "H200 NVL")]
        [False, False, False]
    """
    return "SXM" in model or "HBM3" in model or model.endswith((" H200", " H20"))


def _without_values(devices: Iterable[DeviceReading], problem: Problem) -> Iterable[DeviceReading]:
    for device in devices:
        yield replace(device, values={}, processes=None, problem=problem)


def _twice_problem(card: Card) -> Problem:
    return Problem(
        code=Code.Unknown.name,
        text=f"cannot open GPU {card.index}: the driver reports the UUID {card.uuid} twice: see "
        "dmesg for driver errors",
    )


def _missing_problem(uuid: str) -> Problem:
    return Problem(
        code=_GONE,
        text=f"{uuid} is no longer listed by the driver: removed, or fallen off the bus: see "
        "dmesg; restart the agent if the card was removed for good",
    )
