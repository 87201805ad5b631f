"""Properties of a shared GPU's room, for any pods and foreign processes."""

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import PodRecord
from extender.placement.placer import Victims
from testkit.builders import GIB, GPU, pod_ref, request
from testkit.world import World

SIZE = 80


def declared_of(pod: PodRecord) -> int:
    """Return the GiB that a pod declared for all its shares."""
    return int((pod.memory_bytes or 0) / GIB) * pod.resources[GPU]


@dataclass
class Card:
    """Time-sliced card of 80 GiB: its real use, and its readings.

    Attributes:
        foreign: GiB that processes outside Kubernetes hold.
        pods: GiB that each pod holds.
    """

    foreign: int = 0
    pods: dict[str, tuple[PodRecord, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World()
        self.world.add_node("node", replicas=20)
        self.read()

    @property
    def used(self) -> int:
        return self.foreign + sum(held for _, held in self.pods.values())

    @property
    def declared(self) -> int:
        return sum(declared_of(pod) for pod, _ in self.pods.values())

    def read(self, seconds: float = 30.0) -> None:
        used, card = self.used * GIB, self.world.card()
        card.values.update({Signal.MEMORY_USED: used, Signal.MEMORY_FREE: SIZE * GIB - used})
        self.world.read_after(seconds)

    def start(self, name: str, declared: int | None, held: int, shares: int = 1) -> None:
        memory = None if declared is None else int(declared * GIB)
        card = self.world.card()
        pod = self.world.bind(name, count=shares, on=[card], memory_bytes=memory)
        self.pods[name] = pod, min(held, SIZE - self.used)
        self.read(300.0)

    def end(self, name: str) -> None:
        self.world.clock.now += 5.0
        pod, _ = self.pods.pop(name)
        self.world.end(pod)

    def load(self, name: str, held: int) -> None:
        pod, before = self.pods[name]
        self.pods[name] = pod, min(held, SIZE - self.used + before)
        self.read()

    def room(self) -> float:
        return (
            float(
                self.world.placer.explain_nodes(request(), ["node"])[0].devices[0].free_bytes or 0
            )
            / GIB
        )

    def fits_without(self, name: str, gib: int) -> bool:
        requested = request(memory_bytes=int(gib * GIB))
        victims = Victims(node="node", uids=frozenset({self.pods[name][0].uid}))
        return bool(self.world.placer.accepts_without(pod_ref("new"), requested, [victims]))

    def fits(self, gib: int) -> bool:
        return self.world.rank(request(memory_bytes=int(gib * GIB))).best is not None


amounts = st.integers(0, SIZE)
declared = st.sampled_from([None, 5, 20, 40])


@st.composite
def cards(draw: st.DrawFn, *, declare: st.SearchStrategy[int | None] = declared) -> Card:
    """Draw a card with foreign processes, and with pods that have come, loaded and freed memory."""
    card = Card(foreign=draw(st.sampled_from([0, 0, 10, 40])))
    for number in range(draw(st.integers(1, 3))):
        requested, shares = draw(declare), draw(st.sampled_from([1, 1, 2, 3]))
        most = SIZE if requested is None else requested * shares
        card.start(f"p{number}", requested, draw(st.integers(0, most)), shares)
        if draw(st.booleans()):
            card.load(f"p{number}", draw(st.integers(0, most)))
    return card


@given(cards())
def test_room_never_exceeds_free_or_undeclared_memory(card: Card) -> None:
    assert card.room() <= SIZE - card.used + 1e-6
    assert card.room() <= max(SIZE - card.declared, 0) + 1e-6


@given(cards(), st.data())
def test_an_end_makes_no_more_room_than_the_pod_declared_or_held(
    card: Card, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(card.pods)))
    pod, held = card.pods[name]
    before = card.room()

    card.end(name)

    most = max(held, declared_of(pod))
    assert card.room() <= before + most + 1e-6


@given(cards(declare=st.sampled_from([5, 20, 40])), st.data())
def test_preemption_agrees_with_filter_after_the_victims_end(
    card: Card, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(card.pods)))
    gib = data.draw(st.integers(1, SIZE))
    expected = card.fits_without(name, gib)

    card.end(name)
    card.read()

    assert card.fits(gib) is expected


@given(st.sampled_from([0, 10, 40]), st.data())
def test_preemption_says_so_of_pods_that_declared_nothing_too(
    foreign: int, data: st.DataObject
) -> None:
    """The memory of other undeclared pods is unknown: preemption must not be in vain."""
    card = Card(foreign=foreign)
    requested = data.draw(st.lists(declared, min_size=1, max_size=3))
    for number, each in enumerate(requested):
        shares = data.draw(st.sampled_from([1, 2]))
        most = SIZE if each is None else each * shares
        card.start(f"p{number}", each, data.draw(st.integers(0, most)), shares)
    name = data.draw(st.sampled_from(sorted(card.pods)))
    gib = data.draw(st.integers(1, SIZE))
    expected = card.fits_without(name, gib)

    pod = card.pods[name][0]
    card.end(name)
    card.read()

    assert card.fits(gib) or not expected
    others = [other.memory_bytes for other, _ in card.pods.values()]
    if pod.memory_bytes is None and None not in others:
        assert card.fits(gib) is expected


@given(cards(), st.data())
def test_a_nomination_alone_changes_nothing(card: Card, data: st.DataObject) -> None:
    gib = data.draw(st.integers(1, SIZE))
    requested = request(memory_bytes=int(gib * GIB))

    nominated = card.world.rank(replace(requested, nominated_node="node"))

    assert nominated.best == card.world.rank(requested).best
