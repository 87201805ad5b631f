"""Says of each device who holds it, who uses it, and what is used of it that no pod accounts for.

Two sources: the kubelet (who holds what) and `/proc` (in which pod a process runs). Either may be
missing; what only it could tell is then unknown (None), never "nobody" and never "foreign".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from agent.cgroup import Home
from agent.device_ids import DeviceKey, KnownDevice
from agent.foreign import (
    Blame,
    Evidence,
    Threshold,
    foreign_use,
    memory_not_accounted,
    shows,
)
from agent.holdings import Held, Holdings
from agent.pod_names import PodName, PodNames
from agent.processes import ProcessFacts, ProcessTable
from agent.report import Foreign, Place, Problem, Process, Tenant

SYSTEM_COMMANDS: Final = frozenset(
    {
        "nvidia-cuda-mps",  # -server and -control: /proc has 15 characters of a command
        "nvidia-persiste",  # nvidia-persistenced
        "nv-hostengine",
        "dcgm-exporter",
        "nvidia-smi",
    }
)
"""Programs that touch every device on everybody's behalf: their use is nobody's."""

_NO_HOST_PID: Final = Problem(
    code="NoHostPid",
    text="the machine's processes are not seen, so it is unknown whose pods use the devices: "
    "set hostPID: true, and mount /proc without hidepid",
)
_NO_KUBELET: Final = Problem(code="PodResources", text="the kubelet is not asked: switched off")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """When use of a device is called foreign.

    Attributes:
        threshold: from where on a device that nobody holds counts as used.
        settle_seconds: what a tenant leaves behind is not foreign for so long after its end.
        list_seconds: within so long the driver lists a process that uses memory, of any kind.
        system_commands: processes of these names are not foreign.
    """

    threshold: Threshold = field(default_factory=Threshold)
    settle_seconds: float = 2.0
    list_seconds: float = 12.0
    system_commands: frozenset[str] = SYSTEM_COMMANDS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What the driver says of one device.

    Attributes:
        device: what it is called.
        memory_used_bytes: without what the driver reserves; None where unknown.
        utilization_ratio: 0 to 1, None where unknown.
        processes: as the driver lists them (pid, memory, activity); None where it does not.
    """

    device: KnownDevice
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    processes: tuple[Process, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTenants:
    """What the report says of one device's tenants; the fields are those of `report.Device`."""

    allocated_to: tuple[Tenant, ...] | None
    used_by: tuple[Process, ...] | None
    foreign: Foreign | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """What the kubelet says of one device.

    Attributes:
        holders: None where it does not.
        asked_at: when it was asked.
        is_settled: no tenant has left lately.
    """

    holders: tuple[Tenant, ...] | None
    asked_at: float
    is_settled: bool

    def is_of(self, name: PodName | None) -> bool:
        """Say whether that pod holds the device."""
        return name is not None and any(
            (one.namespace, one.pod) == (name.namespace, name.pod) for one in self.holders or ()
        )


class Tenants:
    """Joins what the kubelet, `/proc` and the driver say.

    Everything happens on one thread; `attribute` reads a few small files of `/proc` for each
    process, `refresh` asks the kubelet when that is due.
    """

    def __init__(
        self,
        *,
        holdings: Holdings | None,
        processes: ProcessTable | None,
        names: PodNames,
        policy: TenantPolicy | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._holdings = holdings
        self._processes = processes
        self._names = names
        self._policy = policy or TenantPolicy()
        self._clock = clock
        self._use_seen_at: dict[DeviceKey, float] = {}
        self._unlisted_since: dict[DeviceKey, float] = {}
        self._sees_machine = False

    @property
    def holders_problem(self) -> Problem | None:
        """Why it is not known who holds the devices, None where it is."""
        return _NO_KUBELET if self._holdings is None else self._holdings.problem

    @property
    def processes_problem(self) -> Problem | None:
        """Why it is not known in which pods the processes run, None where it is."""
        return None if self._sees_machine else _NO_HOST_PID

    async def refresh(self) -> None:
        """Ask the kubelet if that is due; failures are told by `holders_problem`."""
        if self._holdings is not None:
            await self._holdings.refresh()

    def close(self) -> None:
        """End the connection to the kubelet; `refresh` would open another."""
        if self._holdings is not None:
            self._holdings.close()

    def attribute(self, uses: Sequence[DeviceUse]) -> tuple[DeviceTenants, ...]:
        """Say whose each device is, in the order given."""
        held = None if self._holdings is None else self._holdings.held(use.device for use in uses)
        facts = self._look_up(uses)
        now = self._clock()
        self._use_seen_at = {
            key: self._use_seen_at.get(key, now)
            for use in uses
            if self._shows_use(use)
            for key in (use.device.key,)
        }
        self._unlisted_since = {
            key: self._unlisted_since[key]
            for use in uses
            if (key := use.device.key) in self._unlisted_since
        }
        return tuple(self._attribute(use, self._holding(use, held), facts) for use in uses)

    def _look_up(self, uses: Sequence[DeviceUse]) -> Mapping[int, ProcessFacts]:
        pids = (process.pid for use in uses for process in use.processes or ())
        facts = None if self._processes is None else self._processes.look_up(pids)
        self._sees_machine = facts is not None
        return facts or {}

    def _shows_use(self, use: DeviceUse) -> bool:
        return shows(use.memory_used_bytes or 0, use.utilization_ratio, self._policy.threshold)

    def _holding(self, use: DeviceUse, held: Held | None) -> _Holding | None:
        if held is None:
            return None
        freed_at = held.freed_at.get(use.device.key)
        return _Holding(
            holders=held.holders.get(use.device.key),
            asked_at=held.at,
            is_settled=freed_at is None or self._clock() - freed_at >= self._policy.settle_seconds,
        )

    def _attribute(
        self, use: DeviceUse, holding: _Holding | None, facts: Mapping[int, ProcessFacts]
    ) -> DeviceTenants:
        holders = None if holding is None else holding.holders
        described = tuple(
            (self._described(one, facts.get(one.pid), holders), facts.get(one.pid))
            for one in use.processes or ()
        )
        used_by = None if use.processes is None else tuple(process for process, _ in described)
        seen_at = self._use_seen_at.get(use.device.key)
        is_explained = seen_at is None or (holding is not None and holding.asked_at > seen_at)
        if not holders and not is_explained:
            self._want_explanation()
        blamed = None if use.processes is None else self._blamed(described, holding)
        evidence = Evidence(
            memory_used_bytes=use.memory_used_bytes,
            utilization_ratio=use.utilization_ratio,
            is_held=None if holders is None else bool(holders),
            is_settled=is_explained and holding is not None and holding.is_settled,
            is_listed=self._is_listed(use, blamed or ()),
            processes=blamed,
        )
        return DeviceTenants(
            allocated_to=None if holders is None else self._tenants(holders),
            used_by=used_by,
            foreign=foreign_use(evidence, self._policy.threshold),
        )

    def _is_listed(self, use: DeviceUse, blamed: Sequence[tuple[Process, Blame]]) -> bool:
        """Say whether memory is in use for so long that whatever process uses it is listed."""
        unlisted = memory_not_accounted(use.memory_used_bytes, blamed)
        if unlisted is None or unlisted <= self._policy.threshold.memory_bytes:
            self._unlisted_since.pop(use.device.key, None)
            return False
        since = self._unlisted_since.setdefault(use.device.key, self._clock())
        return self._clock() - since >= self._policy.list_seconds

    def _blamed(
        self,
        described: Sequence[tuple[Process, ProcessFacts | None]],
        holding: _Holding | None,
    ) -> tuple[tuple[Process, Blame], ...] | None:
        if not self._sees_machine:
            return None if described else ()
        is_held = holding is not None and bool(holding.holders)
        return tuple(
            (process, self._blame(facts, holding))
            for process, facts in described
            if facts is not None or is_held
        )

    def _blame(self, facts: ProcessFacts | None, holding: _Holding | None) -> Blame:
        if facts is None:
            return Blame.ACCOUNTED  # it has ended meanwhile; what it held is being freed
        if facts.name in self._policy.system_commands:
            return Blame.ACCOUNTED
        if facts.home.place is Place.HOST:
            return Blame.FOREIGN
        if facts.home.place is Place.UNKNOWN or holding is None or holding.holders is None:
            return Blame.UNKNOWN
        name = self._names.name(facts.home.pod_uid)
        if holding.is_of(name):
            return Blame.ACCOUNTED
        if holding.holders and name is None:
            return Blame.UNKNOWN  # it may be one of the holders
        if holding.asked_at <= facts.first_seen:
            self._want_explanation()  # its pod may be newer than the kubelet's answer
            return Blame.UNKNOWN
        return Blame.FOREIGN if holding.is_settled else Blame.UNKNOWN

    def _want_explanation(self) -> None:
        if self._holdings is not None:
            self._holdings.want()

    def _tenants(self, holders: Sequence[Tenant]) -> tuple[Tenant, ...]:
        return tuple(
            msgspec.structs.replace(
                holder,
                uid=self._names.uid(PodName(namespace=holder.namespace, pod=holder.pod)),
            )
            for holder in holders
        )

    def _described(
        self,
        process: Process,
        facts: ProcessFacts | None,
        holders: Sequence[Tenant] | None,
    ) -> Process:
        if facts is None:
            return process
        home = facts.home
        name = self._names.name(home.pod_uid) if home.place is Place.POD else None
        return msgspec.structs.replace(
            process,
            name=facts.name,
            place=home.place,
            uid=home.pod_uid,
            namespace="" if name is None else name.namespace,
            pod="" if name is None else name.pod,
            container=_container(home, name, holders or ()),
        )


def _container(home: Home, name: PodName | None, holders: Sequence[Tenant]) -> str:
    """Return the container's name where its pod holds the device by one alone, else its id."""
    if home.place is Place.HOST:
        return home.unit
    named = {
        one.container
        for one in holders
        if name is not None and (one.namespace, one.pod) == (name.namespace, name.pod)
    }
    return named.pop() if len(named) == 1 else home.container_id
