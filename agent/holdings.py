"""Keeps what the kubelet last said of who holds which device, and since when nobody does."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from agent.device_ids import DeviceKey, DeviceNames, KnownDevice
from agent.podresources import Allocation, Offer, PodResources, PodResourcesError
from agent.report import Problem, Tenant

logger = logging.getLogger(__name__)

_FAILURES_BETWEEN_LOGS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingsPolicy:
    """When the kubelet is asked, and how long its word is good.

    Attributes:
        list_seconds: it is asked so often who holds what.
        least_seconds: at most so often where something new wants explaining.
        offer_seconds: it is asked so often what there is to hold.
        stale_seconds: what it said longer ago is not known any more.
    """

    list_seconds: float = 5.0
    least_seconds: float = 1.0
    offer_seconds: float = 60.0
    stale_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Who holds each device.

    Attributes:
        at: when the kubelet was asked, by the caller's clock.
        holders: by device; all that a claim may mean, where it leaves open which. One that is
            absent is not known to be held or not.
        freed_at: when a device was first seen without the holder that it had.
    """

    at: float
    holders: Mapping[DeviceKey, tuple[Tenant, ...]]
    freed_at: Mapping[DeviceKey, float]


class Holdings:
    """Asks the kubelet when due, and answers from what it said.

    Everything happens on the event loop's thread.
    """

    def __init__(
        self,
        kubelet: PodResources,
        *,
        policy: HoldingsPolicy | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._kubelet = kubelet
        self._policy = policy or HoldingsPolicy()
        self._clock = clock
        self._allocations: tuple[Allocation, ...] = ()
        self._offers: tuple[Offer, ...] | None = None
        self._listed_at: float | None = None
        self._list_due = self._offers_due = float("-inf")
        self._asked_at = float("-inf")
        self._wanted = False
        self._held_before: dict[DeviceKey, frozenset[tuple[str, str]]] = {}
        self._freed_at: dict[DeviceKey, float] = {}
        self._asked_of: tuple[float, tuple[KnownDevice, ...]] | None = None
        self._answer: Held | None = None
        self._failures = 0
        self._problem: Problem | None = Problem(
            code="PodResources", text="the kubelet has not been asked yet"
        )

    @property
    def problem(self) -> Problem | None:
        """Why the kubelet's last answer is missing, None where it came."""
        return self._problem

    def want(self) -> None:
        """Have the kubelet asked soon: something is seen that its last answer does not explain."""
        self._wanted = True

    def close(self) -> None:
        """End the connection to the kubelet."""
        self._kubelet.close()

    async def refresh(self) -> None:
        """Ask the kubelet if it is time to; a failure is kept as `problem`, and never raised."""
        now = self._clock()
        soon = self._asked_at + self._policy.least_seconds
        due = min(soon, self._list_due) if self._wanted else self._list_due
        if self._asked_at <= now < due:  # a clock that was set back makes it due
            return
        self._asked_at = now
        self._list_due = now + self._policy.list_seconds
        try:
            self._allocations = await self._kubelet.list()
        except PodResourcesError as error:
            self._failed(error)
            return
        self._listed_at = now
        self._wanted = False
        if self._failures:
            logger.info("kubelet answers again", extra={"failures": self._failures})
        self._failures = 0
        self._problem = None
        await self._ask_what_there_is(now)

    def held(self, devices: Iterable[KnownDevice]) -> Held | None:
        """Say who holds these devices; None where the kubelet's word is missing or too old.

        A device that the kubelet neither offers nor gave to anybody is of a plugin whose ids we
        do not know, or of claims that the kubelet does not show: whether it is held is unknown.
        """
        if self._listed_at is None or self._clock() - self._listed_at > self._policy.stale_seconds:
            return None
        known = tuple(devices)
        asked_of = (self._listed_at, known)
        if self._answer is None or self._asked_of != asked_of:
            holders = self._holders(DeviceNames(known), known)
            self._note_freed(holders)
            self._asked_of = asked_of
            self._answer = Held(
                at=self._listed_at,
                holders=MappingProxyType(holders),
                freed_at=MappingProxyType(dict(self._freed_at)),
            )
        return self._answer

    async def _ask_what_there_is(self, now: float) -> None:
        if now < self._offers_due:
            return
        try:
            self._offers = await self._kubelet.allocatable()
        except PodResourcesError as error:
            self._offers = None  # then every device counts as one of the kubelet's
            logger.debug("kubelet does not say what it offers", extra={"error": str(error)})
        self._offers_due = now + self._policy.offer_seconds

    def _failed(self, error: PodResourcesError) -> None:
        if self._failures % _FAILURES_BETWEEN_LOGS == 0:
            logger.warning(
                "kubelet does not say who holds devices",
                extra={"error": str(error), "failures": self._failures + 1},
            )
        self._failures += 1
        self._problem = Problem(code="PodResources", text=str(error))

    def _holders(
        self, names: DeviceNames, known: tuple[KnownDevice, ...]
    ) -> dict[DeviceKey, tuple[Tenant, ...]]:
        shares: defaultdict[tuple[DeviceKey, Allocation], set[str]] = defaultdict(set)
        sees_claims = False
        for allocation in self._allocations:
            meant = names.find(allocation.device_id, allocation.claim)
            if meant is None:
                continue
            sees_claims |= allocation.claim is not None
            for key in meant.keys:
                shares[key, _anonymous(allocation)].add(meant.share)
        holders: defaultdict[DeviceKey, list[Tenant]] = defaultdict(list)
        for (key, of), replicas in shares.items():
            tenant = Tenant(
                namespace=of.namespace,
                pod=of.pod,
                container=of.container,
                replicas=tuple(sorted(replicas - {""})),
            )
            holders[key].append(tenant)
        offered = self._offered(names, known, sees_claims=sees_claims)
        return {key: tuple(holders.get(key, ())) for key in {*holders, *offered}}

    def _offered(
        self, names: DeviceNames, known: tuple[KnownDevice, ...], *, sees_claims: bool
    ) -> set[DeviceKey]:
        if self._offers is None or sees_claims:
            return {device.key for device in known}
        meant = (names.find(offer.device_id) for offer in self._offers)
        offered = {key for one in meant if one is not None for key in one.keys}
        if any(device.key not in offered for device in known):
            self._offers_due = min(self._offers_due, self._asked_at + self._policy.list_seconds)
        return offered

    def _note_freed(self, holders: Mapping[DeviceKey, tuple[Tenant, ...]]) -> None:
        now = self._listed_at or self._clock()
        for key, held in holders.items():
            pods = frozenset((one.namespace, one.pod) for one in held)
            if self._held_before.get(key, pods) - pods:
                self._freed_at[key] = now
            self._held_before[key] = pods


def _anonymous(allocation: Allocation) -> Allocation:
    """Return who holds, without which share: what the shares of one container have in common."""
    return Allocation(
        namespace=allocation.namespace,
        pod=allocation.pod,
        container=allocation.container,
        resource="",
        device_id="",
    )
