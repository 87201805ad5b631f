"""No pod that a replica answered for counts as bound without a call, however messages fail."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extender.core.nodes.inventory import PodRecord
from extender.effects.peer_link import _MAX_QUEUE
from extender.placement.bypassed_pods import MAX_WAIT_SECONDS
from extender.placement.request_log import FILTER, PRIORITIZE
from tests.extender.placement.peers_by_hand import (
    GRACE_SECONDS,
    ClusterState,
    Replica,
    start_replicas,
)

SILENT_SECONDS = 10.0
"""Time after which a replica without an address counts as gone."""

ALONE = ("see_all", "look_up", "sweep")
STEPS = (*ALONE, "send", "arrive", "acknowledge", "fail")


@pytest.fixture
def truth() -> ClusterState:
    return ClusterState()


def results(*replicas: Replica) -> list[tuple[list[str], int]]:
    """Return each replica's accused pods, and the number of pods that it did not classify."""
    return [(one.accused, one.unjudged) for one in replicas]


def test_pod_without_requests_is_reported_by_each_replica(truth: ClusterState) -> None:
    replicas = start_replicas(truth, 0.0, 5000.0)
    pod = truth.create("p")
    truth.talk()
    truth.bind(pod)
    truth.talk()

    assert results(*replicas) == [(["p"], 0), (["p"], 0)]


@pytest.mark.parametrize("late_seconds", [0.5, 5.0, MAX_WAIT_SECONDS - 1.0])
def test_replica_that_reports_late_is_waited_for(truth: ClusterState, late_seconds: float) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    near.send(far.address)
    far.send(near.address)  # before the request, and the message arrives long after
    pod = truth.create("p")
    far.answer_all(pod)
    truth.bind(pod)
    truth.wait(0.01)
    near.see_all()
    truth.wait(late_seconds)
    far.arrive(near.address)
    near.look_up()
    near.sweep()
    assert results(near) == [([], 0)]

    far.acknowledge(near.address)
    truth.talk()

    assert results(near, far) == [([], 0), ([], 0)]


def test_replica_whose_every_message_takes_seconds_is_waited_for(truth: ClusterState) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    pod = truth.create("p")
    near.see_all()
    for step in range(30):  # all messages are slow now, so none shows that others are late
        far.send(near.address)
        if step == 20:
            far.answer_all(pod)
            truth.bind(pod)
            near.see_all()
        truth.wait(GRACE_SECONDS + 2.0)
        far.arrive(near.address)
        far.acknowledge(near.address)
        near.look_up()
        near.sweep()

    assert results(near) == [([], 0)]


def test_replica_that_is_cut_off_and_comes_back_is_waited_for(truth: ClusterState) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    requested, bypassed = truth.create("asked"), truth.create("bypassed")
    truth.talk()
    far.answer_all(requested)
    truth.bind(requested)
    truth.bind(bypassed)
    truth.talk(60.0, without=(far,))
    assert results(near) == [([], 0)]

    truth.talk()

    assert results(near) == [(["bypassed"], 0)]


def test_replica_that_stays_cut_off_leaves_pods_unjudged(truth: ClusterState) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    pods = [truth.create("asked"), truth.create("bypassed")]
    truth.talk()
    far.answer_all(pods[0])
    for pod in pods:
        truth.bind(pod)
    truth.talk(MAX_WAIT_SECONDS + 10.0, without=(far,))

    assert results(near) == [([], 2)]


def test_pod_with_our_request_waits_for_no_replica(truth: ClusterState) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    others, pod = truth.create("others"), truth.create("p")
    truth.talk()
    near.answer_all(pod)
    truth.bind(others)
    truth.bind(pod)
    truth.talk(0.5, without=(far,))

    assert [group.scheduler for group in near.bypassed_pods.report().pods] == ["p"]


@pytest.mark.parametrize("is_replaced", [False, True], ids=["gone", "another in its place"])
def test_requests_to_a_dead_replica_leave_pods_unjudged(
    truth: ClusterState, *, is_replaced: bool
) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    pod = truth.create("p")
    truth.talk()
    far.answer_all(pod)
    far.is_running = False  # before it could send a message
    truth.bind(pod)
    truth.talk()
    if is_replaced:
        truth.start(2, life=1, clock_ahead=-7.0)
    else:
        del truth.listed[far.address]
    truth.talk(2 * SILENT_SECONDS)

    assert results(near) == [([], 1)]


@pytest.mark.parametrize("is_replaced", [False, True], ids=["gone", "another in its place"])
def test_after_a_replica_is_gone_the_others_judge_new_pods(
    truth: ClusterState, *, is_replaced: bool
) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    far.is_running = False
    del truth.listed[far.address]
    if is_replaced:
        truth.start(2, life=1)
    truth.talk(2 * SILENT_SECONDS)
    pod = truth.create("p")
    truth.talk()
    truth.bind(pod)
    truth.talk()

    assert results(near) == [(["p"], 0)]


def test_requests_before_a_replicas_first_message_leave_pods_unjudged(truth: ClusterState) -> None:
    (near,) = start_replicas(truth, 0.0)
    pod = truth.create("p")
    truth.talk()
    far = truth.start(2, clock_ahead=-50.0)
    far.answer_all(pod)
    truth.bind(pod)
    truth.talk(60.0)

    assert results(near) == [([], 1)]


def test_replica_that_is_gone_before_its_first_message_accuses_no_pod(truth: ClusterState) -> None:
    (near,) = start_replicas(truth, 0.0)
    far = truth.start(2)
    truth.talk(without=(far,))
    pod = truth.create("p")
    far.answer_all(pod)
    truth.talk(without=(far,))
    far.is_running = False
    del truth.listed[far.address]
    truth.bind(pod)
    truth.talk(2 * SILENT_SECONDS)

    assert results(near) == [([], 1)]


def test_judgment_waits_for_a_removed_replica_that_still_gets_requests(truth: ClusterState) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    del truth.listed[far.address]
    near.look_up()
    truth.wait(2.1)
    pod = truth.create("p")
    near.see_all()
    far.answer_all(pod)
    truth.bind(pod)
    near.see_all()
    truth.wait(GRACE_SECONDS)
    near.look_up()
    near.sweep()
    assert results(near) == [([], 0)]

    far.send(near.address)
    far.arrive(near.address)
    near.sweep()

    assert results(near) == [([], 0)]
    assert sum(group.count for group in near.bypassed_pods.report().pods) == 1


def test_receipt_of_another_life_is_no_mark_of_this_one(truth: ClusterState) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    near.is_running = False
    again = truth.start(1, life=1, clock_ahead=-1e6)  # by its clock the old marks are in the future
    again.look_up()
    for _ in range(2):
        truth.wait(1.0)
        for to in again.links:
            again.send(to)
            again.arrive(to)
            again.acknowledge(to)
        far.send(near.address)
        far.arrive(near.address)
        far.fail(near.address)  # it does not learn of the other replica
    truth.wait(60.0)
    pod = truth.create("p")
    again.see_all()
    far.answer_all(pod)
    truth.bind(pod)
    again.see_all()
    truth.wait(GRACE_SECONDS)
    again.look_up()
    again.sweep()

    assert results(again) == [([], 0)]


def test_a_replica_that_cannot_report_for_too_long_leaves_pods_unjudged(
    truth: ClusterState,
) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    pod = truth.create("p")
    near.see_all()
    far.answer_all(pod)
    others = [truth.create(str(number)) for number in range(_MAX_QUEUE)]
    for other in others:
        far.answer(other)  # enough requests to drop the first ones
    truth.bind(pod)
    truth.talk(60.0)

    assert results(near) == [([], 1)]


def test_replica_that_was_gone_before_our_first_look_up_accuses_no_pod(truth: ClusterState) -> None:
    (far,) = start_replicas(truth, 0.0)
    near = truth.start(2)
    pod = truth.create("p")
    near.see_all()
    far.answer_all(pod)
    far.is_running = False
    del truth.listed[far.address]
    truth.wait(3.0)
    truth.bind(pod)
    truth.talk()

    assert results(near) == [([], 1)]


def test_replica_that_no_look_up_has_shown_yet_is_waited_for(truth: ClusterState) -> None:
    (near,) = start_replicas(truth, 0.0)
    pod = truth.create("p")
    truth.talk()
    far = truth.start(2)
    far.answer_all(pod)
    truth.bind(pod)
    truth.wait(0.1)
    near.see_all()
    truth.wait(60.0)
    near.sweep()
    assert results(near) == [([], 0)]

    near.look_up()
    near.sweep()

    assert results(near) == [([], 1)]


def test_new_replica_does_not_judge_pods_from_before_its_start(truth: ClusterState) -> None:
    (far,) = start_replicas(truth, 0.0)
    pod = truth.create("p")
    far.see_all()
    far.answer_all(pod)
    near = truth.start(2)
    near.unseen.append(pod)  # its watch begins before the pod, and shows it late
    truth.talk(30.0)
    truth.bind(pod)
    truth.talk()

    assert results(near) == [([], 1)]


def test_late_watch_does_not_hide_a_lost_replica(truth: ClusterState) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    pod = truth.create("p")
    far.answer_all(pod)
    far.is_running = False
    del truth.listed[far.address]
    shown = near.unseen.popleft()
    truth.talk(2 * SILENT_SECONDS)
    near.unseen.append(shown)
    truth.talk()
    truth.bind(pod)
    truth.talk()

    assert results(near) == [([], 1)]


@pytest.mark.parametrize("wall_ahead", [-3600.0, 3600.0], ids=["behind", "ahead"])
@pytest.mark.parametrize("clock_ahead", [-1e6, 1e6], ids=["younger", "older"])
def test_clock_differences_report_no_pod_with_requests(
    truth: ClusterState, clock_ahead: float, wall_ahead: float
) -> None:
    replicas = [
        truth.start(1, wall_ahead=wall_ahead),
        truth.start(2, clock_ahead=clock_ahead, wall_ahead=-wall_ahead),
    ]
    truth.talk(5.0)
    pods = [truth.create(name) for name in ("one", "other", "bypassed")]
    truth.talk()
    for replica, pod in zip(replicas, pods, strict=False):
        replica.answer_all(pod)
    for pod in pods:
        truth.bind(pod)
    truth.talk()

    assert all(not {"one", "other"} & set(replica.accused) for replica in replicas)


def test_messages_that_wait_for_our_own_late_loop_prove_nothing(truth: ClusterState) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    pod = truth.create("p")
    near.see_all()
    far.send(near.address)
    truth.wait(0.1)
    far.answer_all(pod)
    truth.bind(pod)
    truth.wait(30.0)  # no replica runs here
    far.arrive(near.address)
    near.see_all()
    for _ in range(5):
        near.look_up()
        near.sweep()
        truth.wait(GRACE_SECONDS)

    assert results(near) == [([], 0)]


def test_answers_of_two_replicas_whose_order_is_not_known_accuse_no_pod(
    truth: ClusterState,
) -> None:
    near, far = start_replicas(truth, 0.0, 0.0)
    pod = truth.create("p")
    far.answer(pod, "filter", choices=0)
    truth.wait(0.5)
    near.answer(pod, "filter", choices=1)
    truth.bind(pod)
    near.see()
    for _ in range(40):  # by the fastest of the late messages, the refusal looks younger than it is
        far.send(near.address)
        truth.wait(1.0)
        far.arrive(near.address)
        far.acknowledge(near.address)
    truth.talk()

    assert results(near, far) == [([], 0), ([], 0)]


class Chance:
    """Replicas that start, crash and lag at random, with delayed and stray messages.

    Each replica keeps its address until all others have looked it up.

    Args:
        random: source of random numbers.
    """

    def __init__(self, random: Random) -> None:
        self.truth = ClusterState()
        self.random = random
        self.started = start_replicas(self.truth, *(random.uniform(-1e4, 1e4) for _ in range(2)))
        self.waiting: list[PodRecord] = []
        self.count = 0

    def step(self) -> None:
        """Let a random event happen."""
        actions = {
            self.create: 4,
            self.call: 1,
            self.place: 4,
            self.start: 0.2,
            self.move: 8,
            self.truth.deliver_stray: 1,
            self.wait: 2,
            self.talk: 4,
        }
        (action,) = self.random.choices(tuple(actions), tuple(actions.values()))
        action()

    def create(self) -> None:
        self.count += 1
        self.waiting.append(self.truth.create(f"p{self.count}"))
        self.show()

    def call(self) -> None:
        if self.waiting:
            pod, verb = self.random.choice(self.waiting), self.random.choice((FILTER, PRIORITIZE))
            is_lost = self.random.random() < 0.5
            self.replica().answer(pod, verb, choices=self.random.randint(0, 2), is_lost=is_lost)

    def place(self) -> None:
        if not self.waiting:
            return
        pod, replica = self.waiting.pop(self.random.randrange(len(self.waiting))), self.replica()
        if self.random.random() < 0.5:
            replica.answer_all(pod)
        self.truth.bind(pod)
        if self.random.random() < 0.2 and replica.was_looked_up:
            self.die(replica)
        self.show()

    def die(self, replica: Replica) -> None:
        """Stop a replica; another may start, at the same or another address."""
        replica.is_running = False
        if self.random.random() < 0.7:
            del self.truth.listed[replica.address]
        if self.random.random() < 0.5 or not self.truth.replicas:
            self.start(self.random.choice((replica.number, None)))

    def start(self, number: int | None = None) -> None:
        life = len(self.started) + 1
        ahead = self.random.uniform(-1e4, 1e4)
        self.started.append(self.truth.start(number or life, life=life, clock_ahead=ahead))

    def move(self) -> None:
        """Let one replica take some steps, each with another replica if it needs two."""
        replica = self.replica()
        for step in self.random.choices(STEPS, k=4):
            if step in ALONE:
                getattr(replica, step)()
            elif replica.links:
                getattr(replica, step)(self.random.choice(tuple(replica.links)))

    def wait(self) -> None:
        self.truth.wait(self.random.choice((0.001, 0.3, 1.5, 4.0, 15.0, 700.0)))

    def talk(self) -> None:
        is_cut = self.random.random() < 0.3
        without = (self.replica(),) if is_cut else ()
        self.truth.talk(self.random.choice((1.5, 3.0, 12.0)), without=without)

    def show(self) -> None:
        """Let the watches show all events, or a part of them."""
        for replica in self.truth.replicas:
            if self.random.random() < 0.7:
                replica.see_all()

    def replica(self) -> Replica:
        return self.random.choice(self.truth.replicas)

    def mend(self) -> None:
        """Let all remaining replicas work without faults."""
        for address, replica in tuple(self.truth.listed.items()):
            if not replica.is_running:
                del self.truth.listed[address]
        self.truth.talk(2 * SILENT_SECONDS)


@settings(max_examples=150)
@given(st.integers(0, 1 << 32))  # a seed makes many choices faster than Hypothesis
def test_pod_with_requests_is_never_reported(seed: int) -> None:
    chance = Chance(Random(seed))
    for _ in range(60):
        chance.step()
        for replica in chance.started:
            assert not {f"uid-{name}" for name in replica.accused} & chance.truth.requested
    chance.mend()
    pod = chance.truth.create("bypassed")
    chance.truth.talk()
    chance.truth.bind(pod)
    chance.truth.talk()

    assert all("bypassed" in replica.accused for replica in chance.truth.replicas)
