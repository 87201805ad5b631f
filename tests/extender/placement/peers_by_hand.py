"""Replicas whose clocks, messages and watches a test controls.

Nothing waits and nothing is random: the test delivers each message and each watch event, and the
replicas run the real code.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from extender.core.nodes.inventory import PodRecord
from extender.core.policy import Policy
from extender.effects.peer_link import PeerLink, decode_message, decode_receipt, encode_receipt
from extender.effects.peers import Peers, _Address
from extender.fleet.fleet import Fleet
from extender.placement.bypassed_pods import BypassedPods
from extender.placement.request_log import (
    FILTER,
    PRIORITIZE,
    AnsweredRequest,
    Answers,
    BypassVerdict,
    RequestLog,
)
from extender.runtime.metrics import Metrics
from extender.settings import service as settings
from testkit.builders import GPU, NOW

GRACE_SECONDS = 1.0
UP_SECONDS = 30.0
"""Time since the start of every replica."""


@dataclass(slots=True)
class ClusterState:
    """State of the cluster, by the API server's clock.

    Attributes:
        now: seconds since the epoch.
        listed: addresses in the DNS answer for the replicas' Service.
        requested: pods for which kube-scheduler has read its last needed answer.
        stray: messages that their sender has given up, with their receivers; they may still arrive.
    """

    now: float = NOW
    listed: dict[_Address, "Replica"] = field(default_factory=dict)
    requested: set[str] = field(default_factory=set)
    stray: list[tuple[_Address, bytes]] = field(default_factory=list)

    @property
    def replicas(self) -> list["Replica"]:
        """Running replicas."""
        return [one for one in self.listed.values() if one.is_running]

    def start(self, number: int, **rest: Any) -> "Replica":
        """Start a replica at a new address, or in another one's place."""
        replica = Replica(self, number, **rest)
        self.listed[replica.address] = replica
        return replica

    def create(self, name: str) -> PodRecord:
        """Create a pod; the watches have not shown it yet."""
        return self._show(
            PodRecord(
                uid=f"uid-{name}",
                namespace="team",
                name=name,
                resources={GPU: 1},
                scheduler_name=name,  # so no two pods are alike, and each has a name
                created_at=float(int(self.now)),  # the API server writes whole seconds
            )
        )

    def bind(self, pod: PodRecord) -> PodRecord:
        """Bind a pod; the watches have not shown it yet."""
        return self._show(replace(pod, node="a"))

    def _show(self, pod: PodRecord) -> PodRecord:
        for replica in self.replicas:
            replica.unseen.append(pod)
        return pod

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def deliver_stray(self) -> None:
        """Deliver the oldest of the messages that were given up."""
        if self.stray:
            to, body = self.stray.pop(0)
            self.deliver(to, body)

    def deliver(self, to: _Address, body: bytes) -> bytes | None:
        """Deliver a message to an address; return the receipt, None without a replica."""
        target, message = self.listed.get(to), decode_message(body)
        if target is None or not target.is_running:
            return None
        if message.instance != target.instance:
            target.peers.receive(message)
        return encode_receipt(target.instance, target.monotonic())

    def talk(self, seconds: float = 3.0, *, without: tuple["Replica", ...] = ()) -> None:
        """Let time pass while replicas process the watch, exchange messages and classify pods.

        Args:
            seconds: duration.
            without: replicas that are cut off from messages and from the watch.
        """
        for _ in range(int(seconds * 2)):
            self.wait(0.5)
            up = [one for one in self.replicas if one not in without]
            for one in up:
                one.see_all()
                one.look_up()
            for sender, to in [(one, to) for one in up for to in one.links]:
                sender.send(to)
                if self.listed.get(to) not in without:
                    sender.arrive(to)
                    sender.acknowledge(to)
                sender.fail(to)
            for one in up:
                one.sweep()


class Replica:
    """Replica with its state, and its messages in transit.

    Args:
        truth: state of the cluster.
        number: number in its address; a replica in another's place has the same.
        life: number of the process at this address.
        clock_ahead: offset of its monotonic clock.
        wall_ahead: offset of its wall clock from the API server's.
    """

    def __init__(
        self,
        truth: ClusterState,
        number: int,
        *,
        life: int = 0,
        clock_ahead: float = 0.0,
        wall_ahead: float = 0.0,
    ) -> None:
        self.truth = truth
        self.number = number
        self.address: _Address = (f"10.0.0.{number}", 8888)
        self.instance = f"replica-{number}-{life}"
        self.is_running = True
        self.unseen: deque[PodRecord] = deque()
        self.metrics = Metrics()
        self._clock_ahead = clock_ahead
        self.request_log = RequestLog(
            Fleet(Policy(), lambda: truth.now + wall_ahead),
            clock=lambda: truth.now + wall_ahead,
            monotonic=self.monotonic,
        )
        self.peers = Peers(
            settings.PeersSettings(),
            self.request_log.take,
            self.metrics,
            monotonic=self.monotonic,
            instance=self.instance,
        )
        self.request_log.answered.subscribe(self.peers.report)
        self.bypassed_pods = BypassedPods(
            self.request_log,
            self.metrics,
            settings.BypassSettings(),
            peers=self.peers,
            grace_seconds=GRACE_SECONDS,
        )
        self.seen_by: set[Replica] = set()
        self._messages: dict[_Address, bytes] = {}
        self._receipts: dict[_Address, bytes] = {}

    def monotonic(self) -> float:
        return self.truth.now - NOW + UP_SECONDS + self._clock_ahead

    # --- requests and watch events ----------------------------------------------------------------

    def answer(self, pod: PodRecord, verb: str = PRIORITIZE, **rest: Any) -> None:
        """Answer a request for a pod; kube-scheduler reads the answer unless it is lost."""
        request = AnsweredRequest(
            verb=verb, uid=pod.uid, key=pod.key, at=self.monotonic(), **{"choices": 2, **rest}
        )
        if request.came_to in {Answers.LEFT_ONE, Answers.SCORED}:
            self.truth.requested.add(pod.uid)
        self.request_log.note(request)

    def answer_all(self, pod: PodRecord) -> None:
        for verb in (FILTER, PRIORITIZE):
            self.answer(pod, verb)

    def see(self) -> None:
        """Deliver the next watch event."""
        if self.unseen:
            self.bypassed_pods.see(self.unseen.popleft())

    def see_all(self) -> None:
        while self.unseen:
            self.see()

    # --- messages ---------------------------------------------------------------------------------

    @property
    def links(self) -> dict[_Address, PeerLink]:
        return self.peers._links

    def look_up(self) -> None:
        """Look up the addresses of the others."""
        listed = self.truth.listed
        for address in self.links.keys() - listed:
            self.peers._drop(address)
            self._messages.pop(address, None)
            self._receipts.pop(address, None)
        for address in listed.keys() - self.links:
            self.links[address] = PeerLink(
                address,
                None,  # type: ignore[arg-type] # nothing is sent over it
                instance=self.instance,
                interval_seconds=0.01,
                monotonic=self.monotonic,
                count=lambda _: None,
            )
        for other in listed.values():
            other.seen_by.add(self)
        self.peers._note_members(self.monotonic())

    @property
    def was_looked_up(self) -> bool:
        """Return whether all other running replicas have looked up its address."""
        return self.seen_by >= set(self.truth.replicas)

    def sweep(self) -> None:
        """Classify the pods for which enough is known."""
        self.bypassed_pods.sweep()

    def send(self, to: _Address) -> None:
        """Send a message to an address unless one is in transit."""
        if to in self.links and to not in self._messages:
            self._receipts.pop(to, None)
            self._messages[to] = self.links[to].compose()

    def arrive(self, to: _Address) -> None:
        """Deliver a message if a replica is there; its receipt is then in transit."""
        if to in self._messages:
            receipt = self.truth.deliver(to, self._messages[to])
            if receipt is not None:
                self._receipts[to] = receipt

    def acknowledge(self, to: _Address) -> None:
        """Deliver the receipt."""
        if to in self._receipts:
            del self._messages[to]
            self.links[to].settle(decode_receipt(self._receipts.pop(to)))

    def fail(self, to: _Address) -> None:
        """Give up a message without a receipt: it may still arrive later, or again."""
        if to in self._messages:
            self.truth.stray.append((to, self._messages.pop(to)))
            self._receipts.pop(to, None)
            self.links[to]._note_failure(OSError("lost"))

    # --- results ----------------------------------------------------------------------------------

    @property
    def accused(self) -> list[str]:
        """Names of the pods that it counts as bound without a call or an answer."""
        groups = self.bypassed_pods.report().pods
        return [group.scheduler for group in groups if group.verdict is not BypassVerdict.CALLED]

    @property
    def unjudged(self) -> int:
        return self.bypassed_pods.report().unjudged


def start_replicas(truth: ClusterState, *clocks_ahead: float) -> list[Replica]:
    """Start replicas with different clocks, and let them exchange messages for a while."""
    started = [
        truth.start(number, clock_ahead=ahead) for number, ahead in enumerate(clocks_ahead, 1)
    ]
    truth.talk(5.0)
    return started
