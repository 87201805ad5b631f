"""Makes kube-scheduler look again at pods that we refused, once a node would do for them.

kube-scheduler tries a refused pod again after any change of an object that it watches, and after
five minutes. A metric is no such object. So an annotation is changed on one that is: on an object
of ours, which has it try all pods that an extender refused, or on each pod that there is room for,
which has it try that one. From 1.37 on it also tries all of them after whatever becomes of any pod;
only those with a scheduling gate it leaves alone.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from itertools import chain, islice, product
from pathlib import Path
from typing import Final, Protocol, TypeVar

from extender.core.inventory import PodRecord
from extender.core.request import GpuRequest, PodRef
from extender.core.scheduled import GATE
from extender.core.selection import ANYWHERE
from extender.core.waiting import WaitingRequests
from extender.effects.lease import Lease
from extender.effects.trouble import Trouble
from extender.effects.wake_order import MAX_NEEDS, LookOrder
from extender.effects.wake_plan import (
    Hope,
    Need,
    Prospect,
    WakePlan,
    nodes_with_room,
    open_to,
)
from extender.effects.wake_pods import PodWakes
from extender.kube import KubeClient, KubeError
from extender.kube_config import SERVICE_ACCOUNT
from extender.placement.placer import Placer
from extender.seldom import Seldom
from extender.settings.wake import Wake, WakeTarget

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ANNOTATION: Final = "idlegpu.io/state"
POD_ANNOTATION: Final = "wake.idlegpu.io/state"
"""On pods: those under idlegpu.io/ are what their owners ask for."""
OBJECT_NAME: Final = "idlegpu-state"
LEASE_NAME: Final = "idlegpu-wake"
STORAGE_CLASS: Final = "idlegpu.io-no-storage"
"""A name that no storage class has: the object says nothing about storage to anybody."""

RESOURCE: Final = "csistoragecapacities.storage.k8s.io"
DEFAULT_NAMESPACE: Final = "idlegpu"
TIMEOUT_SECONDS: Final = 5.0
SHOWN_PODS: Final = 5

SCANNED: Final = 250
"""Pods that are looked through before others get their turn on the event loop."""
LOOKED_AT: Final = 1000
"""Waiting pods that are looked at in one look, in turn where there are more."""
MOST_WOKEN: Final = 64
"""Pods that are woken one by one after one look: each takes a request and a few milliseconds."""
MAX_CHECKED_NODES: Final = 16
"""Nodes that a look finds are offered first to more urgent pods that it does not ask about: so many
nodes ..."""
MAX_CHECKS: Final = 256
"""... and as many nodes, pod by pod, in all: each takes a fraction of a millisecond."""
PIECE_CHECKS: Final = 8
"""Of these so many are made in one step."""
PIECE_NODES: Final = 1000
"""Nodes whose labels and taints are looked at in one step: 1 to 3 ms."""
REST: Final = 19.0
"""So many times as long as a step took is rested after it: webhooks come first. A step takes up to
8 ms with 40,000 devices; what it finds is kept for the webhooks' next answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """A pod that waits.

    Attributes:
        pod: the pod.
        need: what it needs.
        priority: its priority.
        created_at: when it was created, seconds since the epoch.
        is_gated: our scheduling gate keeps kube-scheduler from trying it.
    """

    pod: PodRef
    need: Need
    priority: int
    created_at: float
    is_gated: bool

    @property
    def place(self) -> tuple[int, float, str]:
        """Orders pods as kube-scheduler does: by priority, then by age."""
        return -self.priority, self.created_at, self.pod.key


class Leader(Protocol):
    """Says whether this replica is the one that acts, and works on staying so."""

    @property
    def is_held(self) -> bool:
        """Whether this replica may act."""

    async def run(self) -> None:
        """Work on it until cancelled."""


@dataclass(slots=True, kw_only=True)
class WakeCounts:
    """What waking came to; live.

    Attributes:
        waiting: pods that we refused and that wait, as of the last look of the replica that wakes.
        wakes: changes that were written.
        failed: changes that the API server did not take.
        faults: looks that ended in a fault of ours.
    """

    waiting: int = 0
    wakes: int = 0
    failed: int = 0
    faults: int = 0


class Waker:
    """Looks at the waiting pods again and again, and wakes them where that may help.

    Everything happens on the event loop's thread, in small steps.

    Args:
        client: the API server.
        placer: says what a pod would get now.
        settings: how often, and where the annotation is.
        namespace: of the object that is changed.
        leader: says whether this replica is the one that wakes.
        monotonic: seconds since any moment.
    """

    def __init__(
        self,
        client: KubeClient,
        placer: Placer,
        settings: Wake,
        *,
        namespace: str,
        leader: Leader,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = WakeCounts()
        self.leader = leader
        self._client = client
        self._placer = placer
        self._settings = settings
        self._path = f"/apis/storage.k8s.io/v1/namespaces/{namespace}/csistoragecapacities"
        self._monotonic = monotonic
        self.plan = WakePlan(settings)
        self.pods = PodWakes(settings)
        self._woken_number = 0
        self._requests = WaitingRequests()
        self.order = LookOrder()
        self._seldom = Seldom()
        self._trouble = Trouble(
            logger, "cannot wake waiting pods", "waiting pods can be woken again"
        )

    @property
    def helped(self) -> int:
        """How many pods got a node after a wake for them."""
        return self.plan.helped + self.pods.helped

    async def run(self) -> None:
        """Wake until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.leader.run(), name="wake lease")
            group.create_task(self._run(), name="wake")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.check_seconds)
            if not self.leader.is_held:
                self.counts.waiting = 0
                self.plan.forget()
                self.pods.forget()
                self.order.forget()
                continue
            try:
                await self.look()
            except Exception:  # placing pods must go on whatever is wrong here
                logger.exception("fault", extra={"verb": "wake"})
                self.counts.faults += 1

    async def look(self) -> None:
        """Look at the waiting pods once, and wake them where that may help."""
        waiting = await self._waiting()
        self.counts.waiting = len(waiting)
        uids = {waiter.pod.uid for waiter in waiting}
        if self._settings.target is WakeTarget.POD:
            await self._look_by_pod(waiting, uids)
            return
        self.plan.note_retries(self._retried_at(waiting))
        prospects = [prospect async for prospect in self._prospects(waiting)]
        now = self._monotonic()
        hopes = self.plan.next_wake(prospects, uids, now, is_placed=self._is_placed)
        # The look takes its time: by now another replica may be the one that wakes.
        if hopes and self.leader.is_held:
            await self._wake(hopes, len(waiting))

    def _retried_at(self, waiting: list[Waiter]) -> list[float]:
        """Return when pods that still wait were tried after the last wake, as far as we know."""
        last = (self._placer.history.last_of(waiter.pod.uid) for waiter in waiting)
        return [record.at for record in last if record and record.number > self._woken_number]

    async def _look_by_pod(self, waiting: list[Waiter], uids: set[str]) -> None:
        """Wake each pod that there is room for, those first that kube-scheduler takes first."""
        now = self._monotonic()
        if not self.pods.is_free(now):
            return
        self.pods.note_waiting(uids, now, is_placed=self._is_placed, is_assumed=self._is_assumed)
        hopes = [hope async for hope in self._next_by_pod(waiting, now)]
        for hope, waiter in hopes:
            # The look takes its time: by now another replica may be the one that wakes.
            if self.leader.is_held and self.pods.is_free(now):
                await self._wake_pod(hope, is_gated=waiter.is_gated)
            else:
                self._placer.fleet.ledger.drop(waiter.pod.uid)

    async def _next_by_pod(
        self, waiting: list[Waiter], now: float
    ) -> AsyncIterator[tuple[Hope, Waiter]]:
        """Yield who is to be woken, and count each where it may go, as long as there is room."""
        self.pods.keep_needs({_key(waiter.need) for waiter in waiting})
        by_need: dict[object, list[Waiter]] = {}
        for waiter in sorted(waiting, key=lambda each: each.place):
            if not self._is_assumed(waiter.pod.uid):
                by_need.setdefault(_key(waiter.need), []).append(waiter)
        offers = await self._offers(waiting, by_need, now)
        hopeful = sorted(
            (waiter for key, nodes in offers.items() if nodes for waiter in by_need[key]),
            key=lambda each: each.place,
        )
        woken = set[str]()
        # A node that a pod did not come to is offered to all others before that pod has it again:
        # the node may lack what we do not see, and a less urgent pod may need less of it.
        for is_first, (number, waiter) in product((True, False), enumerate(hopeful)):
            if number % SCANNED == SCANNED - 1:
                await asyncio.sleep(0)
            if waiter.pod.uid in woken:
                continue
            node = self._take(waiter, offers[_key(waiter.need)], now, is_first=is_first)
            if node is not None:
                await asyncio.sleep(0)
                woken.add(waiter.pod.uid)
                yield Hope(pod=waiter.pod, node=node, nodes=frozenset()), waiter
            if len(woken) == MOST_WOKEN:
                return

    async def _offers(
        self, waiting: list[Waiter], by_need: Mapping[object, Sequence[Waiter]], now: float
    ) -> dict[object, list[str]]:
        """Return the nodes that pods may be woken for, by need.

        Args:
            waiting: all waiting pods.
            by_need: those that may be woken, by need, the most urgent first.
            now: seconds of a clock that never goes back.
        """
        self.order.begin(waiter.pod.uid for waiter in waiting)
        uids = {key: [waiter.pod.uid for waiter in some] for key, some in by_need.items()}
        picked = self.order.pick(uids)
        found: dict[object, Sequence[str]] = {}
        # The most urgent last: what was evaluated last is what is still known when they are taken.
        for key in reversed(picked):
            first = by_need[key][0]
            found[key] = await self._nodes_for(first.need, first.pod.uid)
            self.order.note(uids[key])
        offers = {key: self.pods.confirm(key, found[key], now) for key in picked}
        promising = {
            key: nodes for key in picked if (nodes := self.pods.open_nodes(found[key], now))
        }
        for key, nodes in (await self._wanted_before(by_need, picked, promising)).items():
            offers[key] = self.pods.confirm(key, nodes, now)
            promising[key] = nodes
        self.order.note_promising(picked, promising)
        return offers

    async def _wanted_before(
        self,
        by_need: Mapping[object, Sequence[Waiter]],
        picked: Collection[object],
        promising: Mapping[object, Sequence[str]],
    ) -> dict[object, list[str]]:
        """Return what was found for some needs and would do for others that are more urgent.

        A node must not go to a pod because its turn came before that of a more urgent one.

        Args:
            by_need: the pods that wait, by need, the most urgent first.
            picked: the needs that this look asks about.
            promising: the nodes that it found, by need.
        """
        nodes = list(islice(dict.fromkeys(chain(*promising.values())), MAX_CHECKED_NODES))
        last = max((by_need[key][0].place for key in promising), default=None)
        wanted: dict[object, list[str]] = {}
        checks = 0
        for key, (first, *_) in by_need.items():
            if last is None or first.place > last or checks >= MAX_CHECKS:
                break
            if key in picked:
                continue
            candidates = open_to(first.need.selection, nodes, self._placer.fleet.nodes)
            checks += len(candidates)
            for start in range(0, len(candidates), PIECE_CHECKS):
                some = candidates[start : start + PIECE_CHECKS]
                accepts = partial(self._placer.accepting, first.pod, first.need.request, some)
                if fitting := await _in_turn(accepts):
                    wanted.setdefault(key, []).extend(fitting)
        return wanted

    def _take(self, waiter: Waiter, nodes: list[str], now: float, *, is_first: bool) -> str | None:
        """Return a node for a pod, which counts there; nodes without room are taken off.

        Args:
            waiter: the pod.
            nodes: nodes for it.
            now: seconds of a clock that never goes back.
            is_first: whether those count that it was not woken for in vain before, or the others.
        """
        request, uid = waiter.need.request, waiter.pod.uid
        for node in tuple(nodes):
            if not self.pods.may_try(uid, node, now):
                continue
            if self.pods.is_untried(uid, node) is not is_first:
                continue
            if self._placer.would_do(waiter.pod, request, node):
                self._placer.reserve(waiter.pod, request, node)
                return node
            nodes.remove(node)
        return None

    def _is_assumed(self, uid: str) -> bool:
        return self._placer.fleet.ledger.get(uid) is not None

    def _is_placed(self, uid: str) -> bool:
        record = self._placer.fleet.pods.get(uid)
        return record is not None and bool(record.node)

    async def _waiting(self) -> list[Waiter]:
        """Return the pods that we refused and that wait, with what each needs."""
        found: list[Waiter] = []
        for number, record in enumerate(tuple(self._placer.fleet.unbound_pods.values())):
            if number % SCANNED == SCANNED - 1:
                await asyncio.sleep(0)
            request = self._refused_request(record)
            if request is not None:
                found.append(
                    Waiter(
                        pod=PodRef.of(record),
                        need=Need(request=request, selection=record.selection or ANYWHERE),
                        priority=record.priority,
                        created_at=record.created_at,
                        is_gated=record.awaits_room,
                    )
                )
        return found

    def _refused_request(self, record: PodRecord) -> GpuRequest | None:
        """Return what a pod asks for if we refused it and it waits, else None."""
        if record.is_deleting:
            return None
        if record.awaits_room and self._settings.target is not WakeTarget.POD:
            self._warn_gated(record)
        elif record.is_refused or record.awaits_room:
            request = self._requests.read(record, self._placer.policy).request
            return request and self._placer.fleet.informed(request, record.kin)
        # Where kube-scheduler has said why, that is its last word, whatever we answered before.
        decided = None if record.is_unscheduled else self._placer.history.last_of(record.uid)
        return decided.request if decided and decided.leaves_none else None

    def _warn_gated(self, record: PodRecord) -> None:
        """Say now and then that a pod waits for what never comes."""
        if self._seldom.due("gated") is not None:
            logger.warning(
                "pods wait for ever for their scheduling gate to be taken away",
                extra={"gate": GATE, "pod": record.key, "remedy": "wake.target: pod"},
            )

    async def _prospects(self, waiting: list[Waiter]) -> AsyncIterator[Prospect]:
        """Yield what would do for the pods whose turn it is."""
        for need, pods in self._next_in_turn(waiting):
            nodes = await self._nodes_for(need, pods[0].uid)
            yield Prospect(request=need.request, pods=tuple(pods), nodes=nodes)

    def _next_in_turn(self, waiting: list[Waiter]) -> list[tuple[Need, list[PodRef]]]:
        """Return as many pods as one look takes, by need: those first that it is longest since."""
        self.order.begin(waiter.pod.uid for waiter in waiting)
        groups: dict[object, tuple[Need, list[PodRef]]] = {}
        taken: list[str] = []
        for waiter in sorted(waiting, key=lambda each: self.order.looked_at(each.pod.uid)):
            key = _key(waiter.need)
            if key not in groups and len(groups) == MAX_NEEDS:
                continue
            groups.setdefault(key, (waiter.need, []))[1].append(waiter.pod)
            taken.append(waiter.pod.uid)
            if len(taken) == LOOKED_AT:
                break
        self.order.note(taken)
        return list(groups.values())

    async def _nodes_for(self, need: Need, uid: str) -> tuple[str, ...]:
        """Return the nodes that would do for a pod now, best first."""
        fleet = self._placer.fleet
        snapshot = await _in_turn(fleet.snapshot)
        roomy = await _in_turn(partial(nodes_with_room, snapshot, fleet.nodes, need.request))
        candidates: list[str] = []
        for start in range(0, len(roomy), PIECE_NODES):
            some = roomy[start : start + PIECE_NODES]
            candidates += await _in_turn(partial(open_to, need.selection, some, fleet.nodes))
        if not candidates:
            return ()
        decision = await _in_turn(partial(self._placer.rank, need.request, candidates, uid=uid))
        return tuple(decision.candidates[index] for index in decision.order)

    async def _wake(self, hopes: tuple[Hope, ...], waiting: int) -> None:
        """Change the annotation."""
        try:
            await self._write(hopes[0].node, describe(hopes, datetime.now(UTC)))
        except KubeError as error:
            self.counts.failed += 1
            self._trouble.note(error)
            self.plan.note_failed(self._monotonic())
            return
        self._trouble.end()
        self.counts.wakes += 1
        self.plan.note_woken(hopes, self._monotonic())
        newest = next(iter(self._placer.history), None)
        self._woken_number = 0 if newest is None else newest.number
        logger.info(
            "woke waiting pods",
            extra={
                "waiting": waiting,
                "hopeful": len(hopes),
                "pods": [f"{hope.pod.key} on {hope.node}" for hope in hopes[:SHOWN_PODS]],
            },
        )

    async def _wake_pod(self, hope: Hope, *, is_gated: bool) -> None:
        """Change one pod: its annotation, and its gate where it has ours."""
        pod = hope.pod
        text = describe([hope], datetime.now(UTC))
        change: dict[str, object] = {"metadata": {"annotations": {POD_ANNOTATION: text}}}
        if is_gated:
            change["spec"] = {"schedulingGates": []}  # ours is the only one, and none can be added
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        try:
            await self._send("PATCH", path, change, "patch pods")
        except KubeError as error:
            self._placer.fleet.ledger.drop(pod.uid)
            if error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                return  # it has gone meanwhile
            self.counts.failed += 1
            self._trouble.note(error)
            self.pods.note_failed(self._monotonic())
            return
        self._trouble.end()
        self.counts.wakes += 1
        self.pods.note_woken(pod.uid, hope.node)
        logger.info("woke a waiting pod", extra={"pod": pod.key, "node": hope.node})

    async def _write(self, node: str, text: str) -> None:
        """Write the annotation to our object, or to the node.

        Raises:
            KubeError: the API server did not take it.
        """
        change = {"metadata": {"annotations": {ANNOTATION: text}}}
        if self._settings.target is WakeTarget.NODE:
            await self._send("PATCH", f"/api/v1/nodes/{node}", change, "patch nodes")
            return
        path = f"{self._path}/{OBJECT_NAME}"
        try:
            await self._send("PATCH", path, change, f"patch {RESOURCE}")
        except KubeError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            await self._send("POST", self._path, build_object(text), f"create {RESOURCE}")

    async def _send(self, method: str, path: str, body: object, action: str) -> None:
        await self._client.send(method, path, body, action=action, timeout_seconds=TIMEOUT_SECONDS)


def _key(need: Need) -> object:
    """Return what is equal for equal needs: to compare long selections takes its time."""
    return need.request, id(need.selection)


async def _in_turn(work: Callable[[], Result]) -> Result:
    """Return what a step of work gives, after a rest that leaves the event loop to others.

    What counts is CPU time. While other programs keep this one waiting for a CPU, a step takes many
    times as long; to rest longer for that would delay every wake, and help no webhook.
    """
    started = time.thread_time()
    result = work()
    await asyncio.sleep(REST * (time.thread_time() - started))
    return result


def build_waker(
    client: KubeClient,
    placer: Placer,
    settings: Wake,
    *,
    kubeconfig: Path | None,
    before: Waker | None = None,
) -> Waker:
    """Return a waker that shares the work with other replicas through a Lease.

    Args:
        client: the API server.
        placer: says what a pod would get now.
        settings: the settings.
        kubeconfig: the kubeconfig file that is set; without one this runs in a pod.
        before: one with other settings, which this one goes on for: what its wakes came to.
    """
    namespace = settings.namespace or own_namespace(kubeconfig)
    lease = Lease(
        client,
        namespace=namespace,
        name=LEASE_NAME,
        duration_seconds=settings.lease_seconds,
    )
    waker = Waker(client, placer, settings, namespace=namespace, leader=lease)
    if before is not None:
        waker.counts, waker.plan, waker.pods = before.counts, before.plan, before.pods
        waker.order = before.order
        waker.plan.settings = waker.pods.settings = settings
    return waker


def own_namespace(kubeconfig: Path | None, folder: Path = SERVICE_ACCOUNT) -> str:
    """Return the namespace that this runs in, the one of the manifests where that is not told."""
    if kubeconfig is not None:
        return DEFAULT_NAMESPACE
    try:
        return (folder / "namespace").read_text(encoding="utf-8").strip() or DEFAULT_NAMESPACE
    except OSError:
        return DEFAULT_NAMESPACE


def build_object(text: str) -> dict[str, object]:
    """Return the object whose change wakes pods: no storage for a class that nobody has."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSIStorageCapacity",
        "metadata": {"name": OBJECT_NAME, "annotations": {ANNOTATION: text}},
        "storageClassName": STORAGE_CLASS,
        "capacity": "0",
    }


def describe(hopes: Iterable[Hope], at: datetime) -> str:
    """Return what people read in the annotation; no two are alike, for the time is in it."""
    told = [f"{hope.pod.key} on {hope.node}" for hope in hopes]
    shown = ", ".join(told[:SHOWN_PODS])
    more = f" and {len(told) - SHOWN_PODS} more" if len(told) > SHOWN_PODS else ""
    pods = "1 waiting pod" if len(told) == 1 else f"{len(told)} waiting pods"
    return f"{pods} may fit: {shown}{more}; {at:%Y-%m-%dT%H:%M:%S.%fZ}"
