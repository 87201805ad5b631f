"""Attribute the use of each device to containers that hold it, to processes, and to foreign use.

Joins two sources: the kubelet (holders) and `/proc` (the pod of a process). Where a source is
missing, its facts are unknown (None), never "no holder" and never "foreign".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from agent.report.contract import Foreign, Place, Problem, Process, Tenant
from agent.tenants.device_holders import DeviceHolders, DeviceIds, DeviceKey, HolderSnapshot
from agent.tenants.foreign import (
    Attribution,
    Evidence,
    Threshold,
    exceeds,
    foreign_use,
    unaccounted_memory_bytes,
)
from agent.tenants.kubelet import PodName, PodNames
from agent.tenants.processes import ProcessFacts, ProcessLocation, ProcessTable

_SYSTEM_COMMANDS: Final = frozenset(
    {
        "nvidia-cuda-mps",  # -server and -control: /proc truncates commands to 15 characters
        "nvidia-persiste",  # nvidia-persistenced
        "nv-hostengine",
        "dcgm-exporter",
        "nvidia-smi",
    }
)
"""System programs that open every device; their use is not foreign."""

_SETTLE_SECONDS: Final = 2.0
"""Delay after a holder's end during which its leftovers are not foreign."""

_NO_HOST_PID: Final = Problem(
    code="NoHostPid",
    text="host processes are not visible, so the pods that use the devices are unknown: "
    "set hostPID: true, and mount /proc without hidepid",
)
_NO_KUBELET: Final = Problem(
    code="PodResources", text="the kubelet is not called: kubelet_socket is null"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """Settings that decide which use of a device counts as foreign.

    Attributes:
        threshold: limits of memory and activity below which use is ignored.
        list_seconds: time within which the driver lists every process that uses memory.
    """

    threshold: Threshold = field(default_factory=Threshold)
    list_seconds: float = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """Use of one device as the driver reports it.

    Attributes:
        memory_used_bytes: memory in use without the driver's reserved memory; None if unknown.
        utilization_ratio: 0 to 1, None if unknown.
        agreed_ratio: activity that two signals agree on, 0 to 1, None without two signals.
        processes: pid, memory and activity from the driver; None if the driver lists no processes.
    """

    device: DeviceIds
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    agreed_ratio: float | None = None
    processes: tuple[Process, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTenants:
    """Holders, processes and foreign use of one device; fields as in `report.contract.Device`."""

    allocated_to: tuple[Tenant, ...] | None
    used_by: tuple[Process, ...] | None
    foreign: Foreign | None
    replicas: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _HolderState:
    """Holders of one device as the kubelet reports them.

    Attributes:
        holders: containers, () for a free device; None if unknown.
        replicas: as in `report.contract.Device`.
        answered_at: time of the kubelet call that returned the holders.
        is_settled: no holder has ended recently.
    """

    holders: tuple[Tenant, ...] | None
    replicas: int | None
    answered_at: float
    is_settled: bool

    def is_held_by(self, name: PodName | None) -> bool:
        """Return whether the pod holds the device."""
        return name is not None and any(
            (one.namespace, one.pod) == (name.namespace, name.pod) for one in self.holders or ()
        )


class Tenants:
    """Joins data about tenants from the kubelet, the kernel and the driver.

    Everything runs on one thread. `attribute` reads a few small files of `/proc` for each process;
    `refresh` calls the kubelet when a call is due.

    Args:
        device_holders: source of holders; None without a kubelet.
        processes: source of process locations; None if `/proc` is not read.
        names: pod names by UID.
        policy: when use counts as foreign; None for the defaults.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        device_holders: DeviceHolders | None,
        processes: ProcessTable | None,
        names: PodNames,
        policy: TenantPolicy | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._device_holders = device_holders
        self._processes = processes
        self._names = names
        self._policy = policy or TenantPolicy()
        self._clock = clock
        self._use_seen_at: dict[DeviceKey, float] = {}
        self._unlisted_since: dict[DeviceKey, float] = {}
        self._sees_host = False

    @property
    def holders_problem(self) -> Problem | None:
        """Problem that leaves the holders of devices unknown, or None."""
        return _NO_KUBELET if self._device_holders is None else self._device_holders.problem

    @property
    def processes_problem(self) -> Problem | None:
        """Problem that leaves the pods of processes unknown, or None."""
        return None if self._sees_host else _NO_HOST_PID

    async def refresh(self) -> None:
        """Call the kubelet if a call is due; a failure appears in `holders_problem`."""
        if self._device_holders is not None:
            await self._device_holders.refresh()

    def close(self) -> None:
        """Close the connection to the kubelet; a later `refresh` opens a new one."""
        if self._device_holders is not None:
            self._device_holders.close()

    def attribute(self, usages: Sequence[DeviceUsage]) -> tuple[DeviceTenants, ...]:
        """Return the tenants of each device, in the order given."""
        snapshot = (
            None
            if self._device_holders is None
            else self._device_holders.snapshot(use.device for use in usages)
        )
        facts = self._look_up(usages)
        now = self._clock()
        self._use_seen_at = {
            key: self._use_seen_at.get(key, now)
            for use in usages
            if self._exceeds_threshold(use)
            for key in (use.device.key,)
        }
        self._unlisted_since = {
            key: self._unlisted_since[key]
            for use in usages
            if (key := use.device.key) in self._unlisted_since
        }
        return tuple(
            self._attribute(use, self._holder_state(use, snapshot), facts) for use in usages
        )

    def _look_up(self, usages: Sequence[DeviceUsage]) -> Mapping[int, ProcessFacts]:
        pids = (process.pid for use in usages for process in use.processes or ())
        facts = None if self._processes is None else self._processes.look_up(pids)
        self._sees_host = facts is not None
        return facts or {}

    def _exceeds_threshold(self, use: DeviceUsage) -> bool:
        return exceeds(use.memory_used_bytes or 0, use.agreed_ratio, self._policy.threshold)

    def _holder_state(
        self, use: DeviceUsage, snapshot: HolderSnapshot | None
    ) -> _HolderState | None:
        if snapshot is None:
            return None
        freed_at = snapshot.freed_at.get(use.device.key)
        return _HolderState(
            holders=snapshot.holders.get(use.device.key),
            replicas=snapshot.replicas.get(use.device.key),
            answered_at=snapshot.at,
            is_settled=freed_at is None or self._clock() - freed_at >= _SETTLE_SECONDS,
        )

    def _attribute(
        self, use: DeviceUsage, holder_state: _HolderState | None, facts: Mapping[int, ProcessFacts]
    ) -> DeviceTenants:
        holders = None if holder_state is None else holder_state.holders
        described = tuple(
            (self._describe(one, facts.get(one.pid), holders), facts.get(one.pid))
            for one in use.processes or ()
        )
        used_by = None if use.processes is None else tuple(process for process, _ in described)
        seen_at = self._use_seen_at.get(use.device.key)
        is_explained = seen_at is None or (
            holder_state is not None and holder_state.answered_at > seen_at
        )
        if not holders and not is_explained:
            self._request_refresh()
        attributed = (
            None if use.processes is None else self._attribute_processes(described, holder_state)
        )
        evidence = Evidence(
            memory_used_bytes=use.memory_used_bytes,
            utilization_ratio=use.utilization_ratio,
            agreed_ratio=use.agreed_ratio,
            is_held=None if holders is None else bool(holders),
            is_settled=is_explained and holder_state is not None and holder_state.is_settled,
            is_listed=self._is_listed(use, attributed or ()),
            processes=attributed,
        )
        return DeviceTenants(
            allocated_to=None if holders is None else self._tenants(holders),
            used_by=used_by,
            foreign=foreign_use(evidence, self._policy.threshold),
            replicas=None if holder_state is None else holder_state.replicas,
        )

    def _is_listed(
        self, use: DeviceUsage, attributed: Sequence[tuple[Process, Attribution]]
    ) -> bool:
        """Return whether the driver has had time to list the process of unexplained memory."""
        unlisted = unaccounted_memory_bytes(use.memory_used_bytes, attributed)
        if unlisted is None or unlisted <= self._policy.threshold.memory_bytes:
            self._unlisted_since.pop(use.device.key, None)
            return False
        since = self._unlisted_since.setdefault(use.device.key, self._clock())
        return self._clock() - since >= self._policy.list_seconds

    def _attribute_processes(
        self,
        described: Sequence[tuple[Process, ProcessFacts | None]],
        holder_state: _HolderState | None,
    ) -> tuple[tuple[Process, Attribution], ...] | None:
        if not self._sees_host:
            return None if described else ()
        is_held = holder_state is not None and bool(holder_state.holders)
        return tuple(
            (process, self._attribute_process(facts, holder_state))
            for process, facts in described
            if facts is not None or is_held
        )

    def _attribute_process(
        self, facts: ProcessFacts | None, holder_state: _HolderState | None
    ) -> Attribution:
        if facts is None:
            return Attribution.ACCOUNTED  # the process has ended; its memory is being freed
        if facts.name in _SYSTEM_COMMANDS:
            return Attribution.ACCOUNTED
        if facts.location.place is Place.HOST:
            return Attribution.FOREIGN
        if (
            facts.location.place is Place.UNKNOWN
            or holder_state is None
            or holder_state.holders is None
        ):
            return Attribution.UNKNOWN
        name = self._names.name(facts.location.pod_uid)
        if holder_state.is_held_by(name):
            return Attribution.ACCOUNTED
        if holder_state.holders and name is None:
            return Attribution.UNKNOWN  # the unnamed pod may be one of the holders
        if holder_state.answered_at <= facts.first_seen:
            self._request_refresh()  # the pod may be newer than the kubelet's answer
            return Attribution.UNKNOWN
        return Attribution.FOREIGN if holder_state.is_settled else Attribution.UNKNOWN

    def _request_refresh(self) -> None:
        if self._device_holders is not None:
            self._device_holders.request_refresh()

    def _tenants(self, holders: Sequence[Tenant]) -> tuple[Tenant, ...]:
        return tuple(
            msgspec.structs.replace(
                holder, uid=self._names.uid(PodName(namespace=holder.namespace, pod=holder.pod))
            )
            for holder in holders
        )

    def _describe(
        self, process: Process, facts: ProcessFacts | None, holders: Sequence[Tenant] | None
    ) -> Process:
        if facts is None:
            return process
        location = facts.location
        name = self._names.name(location.pod_uid) if location.place is Place.POD else None
        return msgspec.structs.replace(
            process,
            name=facts.name,
            place=location.place,
            uid=location.pod_uid,
            namespace="" if name is None else name.namespace,
            pod="" if name is None else name.pod,
            container=_container(location, name, holders or ()),
            started_at=facts.started_at,
        )


def _container(location: ProcessLocation, name: PodName | None, holders: Sequence[Tenant]) -> str:
    """Return the container's name if it is the pod's only holder of the device, else its id."""
    if location.place is Place.HOST:
        return location.unit
    named = {
        one.container
        for one in holders
        if name is not None and (one.namespace, one.pod) == (name.namespace, name.pod)
    }
    return named.pop() if len(named) == 1 else location.container_id
