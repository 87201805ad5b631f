"""Of several replicas, the one that answered last counts a bound pod, once that is certain."""

from extender.core.steps import finish
from extender.placement.binding_attribution import BindingAttribution
from extender.placement.bypassed_pods import MAX_BOUND, MAX_WAIT_SECONDS
from extender.placement.history import Choice
from extender.placement.request_log import PRIORITIZE, AnsweredRequest
from testkit.judging import ReceivedPeriod
from testkit.world import World, time_sliced


class Replica:
    """Replica whose reports from others the test controls."""

    def __init__(self) -> None:
        self.world: World = time_sliced(2)
        self.received = ReceivedPeriod(until=self.world.now)
        self.own: list[str] = []
        self.attribution = BindingAttribution(
            self.world.request_log,
            self.world.history,
            self.world.metrics,
            peers=self.received,
            on_own=[lambda record: self.own.append(record.pod.name)],
        )

    def answered(self, name: str) -> AnsweredRequest:
        uid, key = f"uid-{name}", f"ns/{name}"
        return AnsweredRequest(verb=PRIORITIZE, uid=uid, key=key, at=self.world.now, choices=2)

    def bind(self, name: str) -> None:
        """Answer for a pod, which is bound to the first choice at once."""
        best = self.world.place(name)
        self.world.request_log.note(self.answered(name))
        choice = self.world.history.take_choice(f"uid-{name}")
        assert choice is not None
        assert best is not None
        self.attribution.note(f"uid-{name}", choice, best)

    def sweep_after(self, seconds: float) -> list[str]:
        self.world.now += seconds
        finish(self.attribution._sweep_in_steps())
        return self.own

    @property
    def counted(self) -> float:
        return self.world.count("idlegpu_bound_pods_total", choice="first")


def test_a_pod_counts_once_the_others_have_reported_beyond_its_binding() -> None:
    replica = Replica()
    replica.bind("a")  # just when the last report ends

    assert replica.sweep_after(1.0) == []
    replica.received.until += 0.1
    assert replica.sweep_after(1.0) == ["a"]
    assert replica.sweep_after(1.0) == ["a"]
    assert (replica.counted, len(replica.attribution)) == (1, 0)


def test_later_answer_owns_the_pod_even_if_reported_late() -> None:
    replica = Replica()
    replica.bind("a")
    replica.world.now += 0.1
    replica.world.request_log.take(replica.answered("a"))

    replica.received.until += 1.0

    assert replica.sweep_after(1.0) == []
    assert (replica.counted, len(replica.attribution)) == (0, 0)


def test_a_pod_is_left_out_if_a_replica_stays_silent() -> None:
    replica = Replica()
    replica.bind("a")

    assert replica.sweep_after(MAX_WAIT_SECONDS - 1.0) == []
    assert len(replica.attribution) == 1
    assert replica.sweep_after(1.0) == []
    assert (replica.counted, len(replica.attribution)) == (0, 0)


def test_a_pod_is_left_out_if_reports_since_its_answer_are_lost() -> None:
    replica = Replica()
    replica.bind("a")
    replica.received.since = replica.world.now + 0.1
    replica.received.until = replica.world.now + 1.0

    assert replica.sweep_after(1.0) == []
    assert (replica.counted, len(replica.attribution)) == (0, 0)


def test_if_too_many_pods_wait_the_latest_are_kept() -> None:
    replica = Replica()
    choice = Choice(number=0, at=replica.world.now, verb=PRIORITIZE, best="node-0")
    for number in range(MAX_BOUND + 1):
        replica.world.request_log.note(replica.answered(str(number)))
        replica.attribution.note(f"uid-{number}", choice, "node-0" if number else "node-1")
    replica.received.until += 1.0

    assert len(replica.attribution) == MAX_BOUND
    replica.sweep_after(1.0)
    assert replica.counted == MAX_BOUND  # without the first, which was bound elsewhere
