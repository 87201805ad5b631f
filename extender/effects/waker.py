"""Make kube-scheduler try rejected pods again when a node has room for them.

kube-scheduler retries a rejected pod five minutes later, or after a change of an object that it
watches; it does not watch metrics. So the extender changes an annotation. If it is on the
extender's own object, kube-scheduler retries all pods that an extender rejected. If it is on a pod
with room for it, kube-scheduler retries this pod. From 1.37 on it also retries all of them after
any pod event, except pods with a scheduling gate.
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
from typing import Final, TypeVar

from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.node_selection import ANYWHERE
from extender.core.request.request import GATE, GpuRequest, PodRef, WaitingRequests
from extender.effects.wake_plan import (
    MAX_NEEDS,
    PACE,
    Hope,
    LookOrder,
    PodWakes,
    Prospect,
    WakeNeed,
    WakePace,
    WakePlan,
    nodes_with_room,
    open_to,
)
from extender.kube.client import KubeClient, KubeError, OnceLogger
from extender.kube.kubeconfig import own_namespace
from extender.kube.lease import Lease
from extender.placement.placer import Placer
from extender.runtime.logs import LogThrottle
from extender.runtime.supervision import Tasks
from extender.settings.config import Settings
from extender.settings.service import Wake, WakeTarget

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_ANNOTATION: Final = "idlegpu.io/state"
_POD_ANNOTATION: Final = "wake.idlegpu.io/state"
"""Annotation of pods; keys under idlegpu.io/ are reserved for the pods' owners."""
_OBJECT_NAME: Final = "idlegpu-state"
_LEASE_NAME: Final = "idlegpu-wake"
_STORAGE_CLASS: Final = "idlegpu.io-no-storage"
"""A name that no storage class has, so the object has no effect on storage."""

_TASK: Final = "waker"
_RESOURCE: Final = "csistoragecapacities.storage.k8s.io"
_TIMEOUT_SECONDS: Final = 5.0
_SHOWN_PODS: Final = 5

_SCANNED: Final = 250
"""Pods that are examined between two yields of the event loop."""
_LOOKED_AT: Final = 1000
"""Maximum number of waiting pods that one check examines; with more pods, checks take turns."""
_MOST_WOKEN: Final = 64
"""Maximum number of pods that a check wakes singly: each takes a request and a few milliseconds."""
_MAX_CHECKED_NODES: Final = 16
"""Maximum number of nodes that a check offers first to more urgent pods that it did not examine."""
_MAX_CHECKS: Final = 256
"""Maximum number of pairs of pod and node that a check examines for this: each takes a fraction of
a millisecond."""
_PIECE_CHECKS: Final = 8
"""Pairs that are examined in one step."""
_PIECE_NODES: Final = 1000
"""Nodes whose labels and taints are examined in one step, which takes 1 to 3 ms."""
_REST: Final = 19.0
"""Rest after a step, as a multiple of its CPU time, so that webhooks come first. A step takes up to
8 ms with 40,000 devices, and the evaluation cache keeps its results for the webhooks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiter:
    """A waiting pod.

    Attributes:
        created_at: its creation time, seconds since the epoch.
        is_gated: whether our scheduling gate keeps kube-scheduler from trying it.
    """

    pod: PodRef
    need: WakeNeed
    priority: int
    created_at: float
    is_gated: bool

    @property
    def place(self) -> tuple[int, float, str]:
        """Sort key in kube-scheduler's order: by priority, then by age."""
        return -self.priority, self.created_at, self.pod.key


@dataclass(slots=True, kw_only=True)
class _WakeCounts:
    """Counts of wakes, updated as they happen.

    Attributes:
        waiting: rejected pods that wait, as of the last check of the elected replica.
        wakes: changes that were written.
        failed: changes that the API server refused or did not receive.
        faults: checks that failed with an internal error.
    """

    waiting: int = 0
    wakes: int = 0
    failed: int = 0
    faults: int = 0


class Waker:
    """Checks the waiting pods periodically, and wakes pods for which a node has room.

    Use it on the event loop's thread only; it works in small steps.

    Args:
        placer: evaluates nodes for a pod.
        settings: the object to change, and the share of kube-scheduler's time.
        namespace: namespace of the object to change.
        lease: elects the replica that wakes pods.
        pace: limits of rate and repetition.
    """

    def __init__(
        self,
        client: KubeClient,
        placer: Placer,
        settings: Wake,
        *,
        namespace: str,
        lease: Lease,
        pace: WakePace = PACE,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = _WakeCounts()
        self._lease = lease
        self._client = client
        self._placer = placer
        self._settings = settings
        self._path = f"/apis/storage.k8s.io/v1/namespaces/{namespace}/csistoragecapacities"
        self._monotonic = monotonic
        self._pace = pace
        self.plan = WakePlan(pace)
        self.pods = PodWakes(pace)
        self._woken_number = 0
        self._requests = WaitingRequests()
        self.order = LookOrder()
        self._throttle = LogThrottle()
        self._once_logger = OnceLogger(
            logger, "cannot wake waiting pods", "waiting pods can be woken again"
        )

    def continue_from(self, before: "Waker") -> None:
        """Take over the counts and the history of a waker with other settings."""
        self.counts, self.order = before.counts, before.order
        self.plan, self.pods = before.plan, before.pods

    async def run(self) -> None:
        """Check and wake pods until cancelled, while this replica is elected."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lease.run(), name="wake lease")
            group.create_task(self._run(), name="wake")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pace.check_seconds)
            if not self._lease.is_held:
                self.counts.waiting = 0
                self.plan.forget()
                self.pods.forget()
                self.order.forget()
                continue
            try:
                await self.look()
            except Exception:  # placing pods must go on
                logger.exception("internal error", extra={"verb": "wake"})
                self.counts.faults += 1

    async def look(self) -> None:
        """Check the waiting pods once, and wake those for which a node has room."""
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
        # The check takes time: another replica may be elected by now.
        if hopes and self._lease.is_held:
            await self._wake(hopes, len(waiting))

    def _retried_at(self, waiting: list[_Waiter]) -> list[float]:
        """Return the times of retries after the last wake, of pods that still wait."""
        last = (self._placer.history.last_of(waiter.pod.uid) for waiter in waiting)
        return [record.at for record in last if record and record.number > self._woken_number]

    async def _look_by_pod(self, waiting: list[_Waiter], uids: set[str]) -> None:
        """Wake each pod for which a node has room, in kube-scheduler's order."""
        now = self._monotonic()
        if not self.pods.is_free(now):
            return
        self.pods.note_waiting(uids, now, is_placed=self._is_placed, is_assumed=self._is_assumed)
        hopes = [hope async for hope in self._next_by_pod(waiting, now)]
        for hope, waiter in hopes:
            # The check takes time: another replica may be elected by now.
            if self._lease.is_held and self.pods.is_free(now):
                await self._wake_pod(hope, is_gated=waiter.is_gated)
            else:
                self._placer.fleet.ledger.drop(waiter.pod.uid)

    async def _next_by_pod(
        self, waiting: list[_Waiter], now: float
    ) -> AsyncIterator[tuple[Hope, _Waiter]]:
        """Yield the pods to wake, and reserve a node for each while there is room."""
        self.pods.keep_needs({_key(waiter.need) for waiter in waiting})
        by_need: dict[object, list[_Waiter]] = {}
        for waiter in sorted(waiting, key=lambda each: each.place):
            if not self._is_assumed(waiter.pod.uid):
                by_need.setdefault(_key(waiter.need), []).append(waiter)
        offers = await self._offers(waiting, by_need, now)
        hopeful = sorted(
            (waiter for key, nodes in offers.items() if nodes for waiter in by_need[key]),
            key=lambda each: each.place,
        )
        woken = set[str]()
        # A node to which a woken pod was not bound is offered to all other pods first: it may lack
        # resources that we do not see, and a less urgent pod may need less of them.
        for is_first, (number, waiter) in product((True, False), enumerate(hopeful)):
            if number % _SCANNED == _SCANNED - 1:
                await asyncio.sleep(0)
            if waiter.pod.uid in woken:
                continue
            node = self._take(waiter, offers[_key(waiter.need)], now, is_first=is_first)
            if node is not None:
                await asyncio.sleep(0)
                woken.add(waiter.pod.uid)
                yield Hope(pod=waiter.pod, node=node, nodes=frozenset()), waiter
            if len(woken) == _MOST_WOKEN:
                return

    async def _offers(
        self, waiting: list[_Waiter], by_need: Mapping[object, Sequence[_Waiter]], now: float
    ) -> dict[object, list[str]]:
        """Return the nodes for which pods may be woken, by requirement.

        Args:
            waiting: all waiting pods.
            by_need: pods that may be woken, by requirement, the most urgent first.
        """
        self.order.begin(waiter.pod.uid for waiter in waiting)
        uids = {key: [waiter.pod.uid for waiter in some] for key, some in by_need.items()}
        picked = self.order.pick(uids)
        found: dict[object, Sequence[str]] = {}
        # The most urgent requirement last, so that its evaluation is still cached for `_take`.
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
        by_need: Mapping[object, Sequence[_Waiter]],
        picked: Collection[object],
        promising: Mapping[object, Sequence[str]],
    ) -> dict[object, list[str]]:
        """Return nodes that were found for picked requirements and suit more urgent ones.

        A less urgent pod must not get a node only because it was examined earlier.

        Args:
            by_need: the waiting pods by requirement, the most urgent first.
            picked: requirements that this check examines.
            promising: nodes that the check found, by requirement.
        """
        nodes = list(islice(dict.fromkeys(chain(*promising.values())), _MAX_CHECKED_NODES))
        last = max((by_need[key][0].place for key in promising), default=None)
        wanted: dict[object, list[str]] = {}
        checks = 0
        for key, (first, *_) in by_need.items():
            if last is None or first.place > last or checks >= _MAX_CHECKS:
                break
            if key in picked:
                continue
            candidates = open_to(first.need.selection, nodes, self._placer.fleet.nodes)
            checks += len(candidates)
            for start in range(0, len(candidates), _PIECE_CHECKS):
                some = candidates[start : start + _PIECE_CHECKS]
                accepts = partial(self._placer.accepting, first.pod, first.need.request, some)
                if fitting := await _run_and_rest(accepts):
                    wanted.setdefault(key, []).extend(fitting)
        return wanted

    def _take(self, waiter: _Waiter, nodes: list[str], now: float, *, is_first: bool) -> str | None:
        """Reserve and return a node for a pod, and remove nodes without room from `nodes`.

        Args:
            is_first: whether to consider only nodes without a failed wake, or only nodes with one.
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

    async def _waiting(self) -> list[_Waiter]:
        """Return the waiting pods that we rejected, with their requirements."""
        found: list[_Waiter] = []
        for number, record in enumerate(tuple(self._placer.fleet.unbound_pods.values())):
            if number % _SCANNED == _SCANNED - 1:
                await asyncio.sleep(0)
            request = self._refused_request(record)
            if request is not None:
                found.append(
                    _Waiter(
                        pod=PodRef.of(record),
                        need=WakeNeed.of(
                            request, record.selection or ANYWHERE, self._placer.fleet.groups
                        ),
                        priority=record.priority,
                        created_at=record.created_at,
                        is_gated=record.awaits_room,
                    )
                )
        return found

    def _refused_request(self, record: PodRecord) -> GpuRequest | None:
        """Return the GPU request of a pod that we rejected and that waits, else None."""
        if record.is_deleting:
            return None
        if record.awaits_room and self._settings.target is not WakeTarget.POD:
            self._warn_gated(record)
        elif record.is_refused or record.awaits_room:
            request = self._requests.read(record, self._placer.policy).request
            return request and self._placer.fleet.informed(request, record.kin)
        # kube-scheduler's reason is newer than our answer.
        decided = None if record.is_unscheduled else self._placer.history.last_of(record.uid)
        return decided.request if decided and decided.leaves_none else None

    def _warn_gated(self, record: PodRecord) -> None:
        """Log that a gated pod waits without end, unless the line is throttled."""
        if self._throttle.due("gated") is not None:
            logger.warning(
                "pods wait forever for the removal of their scheduling gate",
                extra={"gate": GATE, "pod": record.key, "remedy": "wake.target: pod"},
            )

    async def _prospects(self, waiting: list[_Waiter]) -> AsyncIterator[Prospect]:
        """Yield suitable nodes for the pods that this check examines."""
        for need, pods in self._next_batch(waiting):
            nodes = await self._nodes_for(need, pods[0].uid)
            yield Prospect(request=need.request, pods=tuple(pods), nodes=nodes)

    def _next_batch(self, waiting: list[_Waiter]) -> list[tuple[WakeNeed, list[PodRef]]]:
        """Return the pods that this check examines, by requirement, longest unexamined first."""
        self.order.begin(waiter.pod.uid for waiter in waiting)
        groups: dict[object, tuple[WakeNeed, list[PodRef]]] = {}
        taken: list[str] = []
        for waiter in sorted(waiting, key=lambda each: self.order.looked_at(each.pod.uid)):
            key = _key(waiter.need)
            if key not in groups and len(groups) == MAX_NEEDS:
                continue
            groups.setdefault(key, (waiter.need, []))[1].append(waiter.pod)
            taken.append(waiter.pod.uid)
            if len(taken) == _LOOKED_AT:
                break
        self.order.note(taken)
        return list(groups.values())

    async def _nodes_for(self, need: WakeNeed, uid: str) -> tuple[str, ...]:
        """Return the suitable nodes for a pod, best first."""
        fleet = self._placer.fleet
        snapshot = await _run_and_rest(fleet.snapshot)
        roomy = await _run_and_rest(partial(nodes_with_room, snapshot, fleet.nodes, need.request))
        candidates: list[str] = []
        for start in range(0, len(roomy), _PIECE_NODES):
            some = roomy[start : start + _PIECE_NODES]
            candidates += await _run_and_rest(partial(open_to, need.selection, some, fleet.nodes))
        if not candidates:
            return ()
        decision = await _run_and_rest(
            partial(self._placer.rank, need.request, candidates, uid=uid)
        )
        return tuple(decision.candidates[index] for index in decision.order)

    async def _wake(self, hopes: tuple[Hope, ...], waiting: int) -> None:
        """Change the annotation that makes kube-scheduler retry all rejected pods."""
        try:
            await self._write(hopes[0].node, _describe(hopes, datetime.now(UTC)))
        except KubeError as error:
            self.counts.failed += 1
            self._once_logger.note(error)
            self.plan.note_failed(self._monotonic())
            return
        self._once_logger.end()
        self.counts.wakes += 1
        self.plan.note_woken(hopes, self._monotonic())
        newest = next(iter(self._placer.history), None)
        self._woken_number = 0 if newest is None else newest.number
        logger.info(
            "woke waiting pods",
            extra={
                "waiting": waiting,
                "hopeful": len(hopes),
                "pods": [f"{hope.pod.key} on {hope.node}" for hope in hopes[:_SHOWN_PODS]],
            },
        )

    async def _wake_pod(self, hope: Hope, *, is_gated: bool) -> None:
        """Change the annotation of one pod, and remove our scheduling gate."""
        pod = hope.pod
        text = _describe([hope], datetime.now(UTC))
        change: dict[str, object] = {"metadata": {"annotations": {_POD_ANNOTATION: text}}}
        if is_gated:
            change["spec"] = {"schedulingGates": []}  # ours is the only one, and none can be added
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        try:
            await self._send("PATCH", path, change, "patch pods")
        except KubeError as error:
            self._placer.fleet.ledger.drop(pod.uid)
            if error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                return  # the pod was deleted or changed
            self.counts.failed += 1
            self._once_logger.note(error)
            self.pods.note_failed(self._monotonic())
            return
        self._once_logger.end()
        self.counts.wakes += 1
        self.pods.note_woken(pod.uid, hope.node)
        logger.info("woke a waiting pod", extra={"pod": pod.key, "node": hope.node})

    async def _write(self, node: str, text: str) -> None:
        """Write the annotation to our object or to the node.

        Raises:
            KubeError: the request failed or was refused.
        """
        change = {"metadata": {"annotations": {_ANNOTATION: text}}}
        if self._settings.target is WakeTarget.NODE:
            await self._send("PATCH", f"/api/v1/nodes/{node}", change, "patch nodes")
            return
        path = f"{self._path}/{_OBJECT_NAME}"
        try:
            await self._send("PATCH", path, change, f"patch {_RESOURCE}")
        except KubeError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            await self._send("POST", self._path, _build_object(text), f"create {_RESOURCE}")

    async def _send(self, method: str, path: str, body: object, action: str) -> None:
        await self._client.send(method, path, body, action=action, timeout_seconds=_TIMEOUT_SECONDS)


def _key(need: WakeNeed) -> object:
    """Return a key that is equal for equal requirements, and cheap to compare."""
    return need.request, id(need.selection), need.group


async def _run_and_rest(work: Callable[[], _Result]) -> _Result:
    """Run a step of work, then rest for `_REST` times its CPU time.

    CPU time counts, not elapsed time: while other processes use the CPU a step takes many times as
    long, and a longer rest would delay every wake without any benefit for webhooks.
    """
    started = time.thread_time()
    result = work()
    await asyncio.sleep(_REST * (time.thread_time() - started))
    return result


def build_waker(
    client: KubeClient,
    placer: Placer,
    settings: Wake,
    *,
    kubeconfig: Path | None,
    before: Waker | None = None,
) -> Waker:
    """Create a waker that shares the work with other replicas through a Lease.

    Args:
        placer: evaluates nodes for a pod.
        kubeconfig: the configured kubeconfig file; None in a pod.
        before: previous waker, whose counts and history the new one takes over.
    """
    namespace = settings.namespace or own_namespace(kubeconfig)
    lease = Lease(client, namespace=namespace, name=_LEASE_NAME)
    waker = Waker(client, placer, settings, namespace=namespace, lease=lease)
    if before is not None:
        waker.continue_from(before)
    return waker


class WakerRunner:
    """Runs a waker as a background task as long as the settings enable it.

    Args:
        placer: evaluates nodes for a pod.
        tasks: runs the waker.

    Attributes:
        waker: the current waker; None while waking is disabled.
    """

    def __init__(
        self, client: KubeClient, placer: Placer, tasks: Tasks, settings: Settings
    ) -> None:
        self._client = client
        self._placer = placer
        self._tasks = tasks
        self._settings = settings
        self.waker = self._build(None)

    def start(self) -> None:
        """Start the background task, if waking is enabled."""
        if self.waker is not None:
            self._tasks.start(_TASK, self.waker.run)

    async def adopt(self, settings: Settings) -> None:
        """Replace the waker if its settings have changed; counts and history stay."""
        before, self._settings = self._settings, settings
        if settings.wake != before.wake:
            await self._tasks.stop(_TASK)
            self.waker = self._build(self.waker)
            self.start()

    def _build(self, before: Waker | None) -> Waker | None:
        wake, kubeconfig = self._settings.wake, self._settings.kubeconfig
        if not wake.enabled:
            return None
        return build_waker(self._client, self._placer, wake, kubeconfig=kubeconfig, before=before)


def _build_object(text: str) -> dict[str, object]:
    """Build the object whose change wakes pods: zero storage of an unknown storage class."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSIStorageCapacity",
        "metadata": {"name": _OBJECT_NAME, "annotations": {_ANNOTATION: text}},
        "storageClassName": _STORAGE_CLASS,
        "capacity": "0",
    }


def _describe(hopes: Iterable[Hope], at: datetime) -> str:
    """Format the annotation for people; the time makes each value unique."""
    parts = [f"{hope.pod.key} on {hope.node}" for hope in hopes]
    shown = ", ".join(parts[:_SHOWN_PODS])
    more = f" and {len(parts) - _SHOWN_PODS} more" if len(parts) > _SHOWN_PODS else ""
    pods = "1 waiting pod" if len(parts) == 1 else f"{len(parts)} waiting pods"
    return f"{pods} may fit: {shown}{more}; {at:%Y-%m-%dT%H:%M:%S.%fZ}"
