"""The agent's loop: reads, asks whose the devices are, judges, and tells who waits for reports."""

import asyncio
import importlib.metadata
import logging
import math
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from agent.backend import Backend, XidEvent
from agent.compose import Composer, Identity, Whose, uses_of
from agent.events import XidLog, XidWatcher
from agent.options import Options
from agent.problems import exhausted_problem, hung_problem
from agent.reading import Pass
from agent.report import Problem, Report
from agent.session import NO_CARD, Session
from agent.tenants import DeviceTenants, DeviceUse
from agent.worker import ExhaustedError, HungError, Lane, Worker
from extender.core.health import RECOVERY_CHANGED

logger = logging.getLogger(__name__)


class Tenancy(Protocol):
    """What the loop asks about tenants."""

    @property
    def holders_problem(self) -> Problem | None:
        """Why it is not known who holds the devices."""

    @property
    def processes_problem(self) -> Problem | None:
        """Why it is not known whose the processes are."""

    def attribute(self, uses: tuple[DeviceUse, ...]) -> tuple[DeviceTenants, ...]:
        """Say whose each device is, in the order given."""


class Latest:
    """The latest report, and a way to wait for the next; nothing older is kept.

    Written by one task, read by any on the same loop.

    Args:
        stale_seconds: readings that are older are none of now.

    Attributes:
        report: None before the first pass.
        found: what it was made of.
    """

    def __init__(self, stale_seconds: float = math.inf) -> None:
        self._stale_seconds = stale_seconds
        self.report: Report | None = None
        self.found = Pass()
        self._published = asyncio.Event()

    def publish(self, report: Report, found: Pass) -> None:
        """Make a report the latest, and wake who waits."""
        self.report, self.found = report, found
        self._published.set()
        self._published = asyncio.Event()

    def are_fresh(self, now: float) -> tuple[bool, ...]:
        """Say of each device whether what was measured of it is still true.

        Args:
            now: seconds since the epoch.
        """
        return tuple(
            reading.measured_at is not None and now - reading.measured_at <= self._stale_seconds
            for reading in self.found.devices
        )

    async def newer(self, sequence: int) -> Report:
        """Wait for a report after the one of this number; 0 for any."""
        while self.report is None or self.report.sequence <= sequence:
            await self._published.wait()
        return self.report


class Sampler:
    """Makes a report of every pass, and of every XID at once.

    Everything but the calls of the library happens on the loop's thread.

    Args:
        backend: the library.
        options: the settings.
        tenancy: what knows whose devices are, None for nothing.
        clock: seconds since the epoch.
        monotonic: seconds that never jump.

    Attributes:
        latest: the latest report.
        xids: what XIDs happened.
        passes: passes that were made.
        pass_seconds: time that they took, together.
        library_seconds: part of it spent in the library.
        hung: how often a call was given up, by its name; 0 for those that were made and never were.
    """

    def __init__(
        self,
        backend: Backend,
        options: Options,
        tenancy: Tenancy | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.latest = Latest(options.stale_seconds)
        self.xids = XidLog()
        self.passes = 0
        self.pass_seconds = 0.0
        self.library_seconds = 0.0
        self.hung: dict[str, int] = {}
        self._options = options
        self._tenancy = tenancy
        self._clock = clock
        self._monotonic = monotonic
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._cut_off_since: float | None = None
        self.watcher = XidWatcher(backend, self._deliver, monotonic=monotonic)
        self.session = Session(
            backend, self.watcher, cadence=options.cadence, clock=clock, monotonic=monotonic
        )
        self._worker = Worker(limit_seconds=options.call_seconds, most_hung=options.hung_calls)
        self._composer = Composer(
            Identity(
                node=options.node,
                agent_version=importlib.metadata.version("idlegpu"),
                started_at=clock(),
            ),
            options.judgement,
            self.xids,
        )

    @property
    def is_alive(self) -> bool:
        """Whether a new container would not help."""
        since = self._cut_off_since
        return since is None or self._monotonic() - since < self._options.liveness_seconds

    async def run(self) -> None:
        """Sample until cancelled."""
        loop = asyncio.get_running_loop()
        due = self._monotonic()
        while True:
            await self.sample()
            due = max(due + self._options.period_seconds, now := self._monotonic())
            timer = loop.call_later(due - now, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            self._wake.clear()

    async def sample(self) -> Report:
        """Make one pass, and publish its report."""
        self._loop = asyncio.get_running_loop()
        started = self._monotonic()
        found, is_read = await self._read()
        report = self._composer.compose(found, self._whose(found), self._clock())
        now = self._monotonic()
        self.passes += 1
        self.pass_seconds += now - started
        if is_read and not found.needs_restart:
            self._cut_off_since = None
        elif self._cut_off_since is None:
            self._cut_off_since = now
        self._log_changes(found)
        self.latest.publish(report, found)
        return report

    def close(self) -> None:
        """Let the threads end."""
        self.watcher.close()
        self._worker.close()

    async def _read(self) -> tuple[Pass, bool]:
        """Read every card that can be read; each one that hangs costs one limit, once.

        Returns:
            What was found, and whether anything could be asked.
        """
        while True:
            skipped = self._worker.hung_subjects()
            try:
                found, seconds, calls = await self._worker.run(partial(self._pass, skipped))
            except HungError as error:
                self._give_up(error)
            except ExhaustedError:
                self.session.mark(NO_CARD, exhausted_problem(len(skipped)))
                return self.session.last_pass(), False
            else:
                self.library_seconds += seconds
                # A counter that starts at 0 lets its first event be seen.
                self.hung = dict.fromkeys(calls, 0) | self.hung
                return found, NO_CARD not in skipped

    def _pass(self, skipped: frozenset[str], lane: Lane) -> tuple[Pass, float, Collection[str]]:
        found = self.session.read(lane, skipped)
        return found, lane.take_busy_seconds(), lane.names

    def _give_up(self, error: HungError) -> None:
        self.hung[error.call] = self.hung.get(error.call, 0) + 1
        self.session.mark(error.subject, hung_problem(error.call, error.seconds))
        logger.error(
            "call of the driver does not return",
            extra={"call": error.call, "gpu": error.subject, "limit_seconds": error.seconds},
        )

    def _whose(self, found: Pass) -> Whose:
        if self._tenancy is None:
            return Whose()
        return Whose(
            devices=self._tenancy.attribute(uses_of(found.devices)),
            tenants_problem=self._tenancy.holders_problem,
            processes_problem=self._tenancy.processes_problem,
        )

    def _deliver(self, event: XidEvent) -> None:
        """Take an event over from the thread that waits for them."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_xid, event)

    def _note_xid(self, event: XidEvent) -> None:
        self.xids.add(event, self._clock())
        logger.warning(
            "XID error",
            extra={"gpu": event.uuid, "instance": event.gpu_instance_id, "xid": event.xid},
        )
        if event.xid == RECOVERY_CHANGED:  # to what is read with what changes slowly
            self.session.look_closely()
        self._wake.set()

    def _log_changes(self, found: Pass) -> None:
        """Log each problem once when it comes, and when it goes."""
        before, after = _problems(self.latest.found), _problems(found)
        for subject, problem in after.items():
            if subject not in before or before[subject].code != problem.code:
                logger.warning("cannot read", extra={"what": subject, "problem": problem.text})
        for subject in before.keys() - after.keys():
            logger.info("can be read again", extra={"what": subject})
        if found.driver_version != self.latest.found.driver_version and found.driver_version:
            logger.info(
                "reading GPUs",
                extra={"driver": found.driver_version, "devices": len(found.devices)},
            )


def _problems(found: Pass) -> dict[str, Problem]:
    """Return what cannot be read, and why."""
    problems = {
        device.card.uuid: device.problem for device in found.devices if device.problem is not None
    }
    return problems if found.problem is None else {**problems, "GPUs": found.problem}
