"""The pods of a day of sharing GPUs, and the load outside Kubernetes: drawn from traces."""

from dataclasses import dataclass
from math import erf, sqrt
from typing import Final

import numpy as np

from bench.traces import DAY_SECONDS, Floats, Ints, TracedPods, acme_quantiles, openb_pods
from bench.virtual_cluster import GIB, Shape

STEP_SECONDS: Final = 15.0
STEPS: Final = int(DAY_SECONDS / STEP_SECONDS)
LOADING_SECONDS: Final = 60.0
COMPRESSION: Final = 20.0
"""So many days of the trace arrive in one at full load; pods run as long as they did."""
FIRST_DAY: Final = 116
DAYS_APART: Final = 4
WINDOWS: Final = 4
"""Seeds take their pods from so many stretches of the trace in turn, which begin so many days apart
from this day on: before it there are few pods."""

TRAINING_GIB: Final = (1.0, 12.0)
"""A training pod holds the first number, and of the second as much as Acme's cards were filled."""
SERVING_GIB: Final = (10.0, 24.0)
TIGHT_SERVING: Final = 0.5
TIGHT_CARD_GIB: Final = 24.0

BURST_ENDS: Final = 1 - 0.57 ** (STEP_SECONDS / 57)
"""Chance in a step: of pods at 20 % and more, 43 % are under 5 % in a sample 57 s later."""
MOST_BURSTS: Final = 0.5
"""Most of its time that a serving pod is at work; the mean is a quarter of it."""

FOREIGN_SECONDS: Final = 3600.0
FOREIGN_UTILIZATION: Final = (0.3, 1.0)
FOREIGN_MEMORY: Final = (0.1, 0.5)
"""Of the card's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """What makes one kind of day.

    Attributes:
        name: as the tables call it.
        what: in words.
        load: this share of the trace's pods: where replicas run out or memory ends most pods, no
            placement helps.
        is_training_alone: no pod serves.
        has_foreign: half of the nodes carry load outside Kubernetes.
        is_tight: cards are small.
    """

    name: str
    what: str
    load: float
    is_training_alone: bool = False
    has_foreign: bool = False
    is_tight: bool = False

    @property
    def shape(self) -> Shape:
        """The cluster."""
        gib = TIGHT_CARD_GIB if self.is_tight else 80.0
        return Shape(nodes=6, cards=8, replicas=4, memory_bytes=gib * GIB)


REGIMES: Final = (
    Regime(name="R1", what="training alone", load=0.6, is_training_alone=True),
    Regime(name="R2", what="load outside on half of the nodes", load=1.0, has_foreign=True),
    Regime(name="R2 low", what="the same with fewer pods", load=0.4, has_foreign=True),
    Regime(name="R3", what="memory tight", load=0.7, is_tight=True),
    Regime(name="R4", what="R2 and R3", load=0.4, has_foreign=True, is_tight=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of a day, the first that comes first.

    Attributes:
        arrives: seconds since the start of the day.
        works: seconds that each would take alone, once it is loaded.
        memory_bytes: what it holds once it is loaded.
        owner: kind and name of what controls it.
        shape: the same number for pods whose requests are alike.
        is_serving: whether its load comes in bursts.
        series: utilization of all pods, one step after the other.
        first: where each pod's begins; a training pod has one value.
        length: how many values it has.
    """

    arrives: Floats
    works: Floats
    memory_bytes: Floats
    owner: tuple[str, ...]
    shape: Ints
    is_serving: np.ndarray[tuple[int], np.dtype[np.bool_]]
    series: Floats
    first: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.arrives)

    @property
    def alone(self) -> Floats:
        """Seconds from start to end of each pod on a GPU of its own."""
        return LOADING_SECONDS + self.works

    def utilization(self, pods: Ints, progress: Floats) -> Floats:
        """Return how busy pods would keep a GPU alone, by the seconds that they have come to."""
        at = ((progress - LOADING_SECONDS) / STEP_SECONDS).astype(np.intp)
        at = np.clip(at, 0, self.length[pods] - 1)
        return np.where(progress < LOADING_SECONDS, 0.0, self.series[self.first[pods] + at])

    def memory(self, pods: Ints, progress: Floats) -> Floats:
        """Return what they hold by then: it grows while a pod loads."""
        return self.memory_bytes[pods] * np.minimum(progress / LOADING_SECONDS, 1.0)


def draw_pods(regime: Regime, seed: int) -> Pods:
    """Return the pods of a day.

    Pods whose requests are alike, and more so those of one owner, are alike in memory and load.

    Args:
        regime: the kind of day.
        seed: of the draws; also chooses the stretch of the trace.
    """
    draws = np.random.default_rng([seed, 1])
    traced = _stretch(seed, draws, regime.load)
    count = len(traced.created)
    owners = _owners(traced)
    is_serving = traced.is_serving & (not regime.is_training_alone)
    works = _in_steps(np.clip(traced.ran, STEP_SECONDS, DAY_SECONDS))

    def alike(of_shape: float, of_owner: float) -> Floats:
        """Return numbers from 0 to 1, one for each pod, alike where requests and owners are."""
        own = sqrt(max(1 - of_shape - of_owner, 0.0))
        shapes = draws.standard_normal(int(traced.shape.max(initial=0)) + 1)[traced.shape]
        by_owner = draws.standard_normal(int(owners.max(initial=0)) + 1)[owners]
        noise = draws.standard_normal(count)
        normal = sqrt(of_shape) * shapes + sqrt(of_owner) * by_owner + own * noise
        return np.array([0.5 * (1 + erf(value / sqrt(2))) for value in normal.tolist()])

    percent = np.linspace(0.0, 1.0, 101)
    busy, filled = acme_quantiles()
    fullness, business, level = alike(0.45, 0.45), alike(0.25, 0.5), alike(0.25, 0.5)
    training = TRAINING_GIB[0] + TRAINING_GIB[1] * np.interp(fullness, percent, filled)
    serving = SERVING_GIB[0] + (SERVING_GIB[1] - SERVING_GIB[0]) * fullness
    serving *= TIGHT_SERVING if regime.is_tight else 1.0
    lengths = np.where(is_serving, np.ceil(works / STEP_SECONDS).astype(np.intp) + 1, 1)
    constant = np.interp(business, percent, busy)
    series = [
        bursts(draws, int(length), MOST_BURSTS * share**3, 0.2 + 0.7 * high)
        if serves
        else np.array([value])
        for serves, length, share, high, value in zip(
            is_serving, lengths, business, level, constant, strict=True
        )
    ]
    return Pods(
        arrives=_in_steps(traced.created),
        works=works,
        memory_bytes=GIB * np.where(is_serving, serving, training),
        owner=tuple(
            f"{'ReplicaSet serve' if serves else 'Job train'}-{owner}"
            for serves, owner in zip(is_serving, owners, strict=True)
        ),
        shape=traced.shape,
        is_serving=is_serving,
        series=np.concatenate(series),
        first=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp),
        length=lengths,
    )


def _in_steps(seconds: Floats) -> Floats:
    """Return times as whole steps: alone, a pod takes no longer than it takes."""
    steps: Floats = np.ceil(seconds / STEP_SECONDS) * STEP_SECONDS
    return steps


def _stretch(seed: int, draws: np.random.Generator, load: float) -> TracedPods:
    """Return the pods of a stretch of the trace with one GPU, in the time of the day."""
    traced = openb_pods()
    begins = DAY_SECONDS * (FIRST_DAY + DAYS_APART * (seed % WINDOWS))
    created = (traced.created - begins) / COMPRESSION
    kept = (created >= 0) & (created < DAY_SECONDS) & (traced.gpus == 1)
    kept &= draws.random(len(created)) < load
    chosen = traced.only(kept)
    return TracedPods(
        created=created[kept],
        ran=chosen.ran,
        gpus=chosen.gpus,
        shape=chosen.shape,
        is_serving=chosen.is_serving,
    )


OWNER_SECONDS: Final = 225.0
OWNER_PODS: Final = 20


def _owners(traced: TracedPods) -> Ints:
    """Return a number for each pod: of pods alike that come one soon after the other, the same."""
    last: dict[int, tuple[int, float, int]] = {}
    owners: list[int] = []
    for shape, at in zip(traced.shape.tolist(), traced.created.tolist(), strict=True):
        owner, before, pods = last.get(shape, (-1, -np.inf, 0))
        if at - before > OWNER_SECONDS or pods >= OWNER_PODS:
            owner, pods = len(owners), 0
        last[shape] = owner, at, pods + 1
        owners.append(owner)
    return np.array(owners, dtype=np.intp)


def bursts(draws: np.random.Generator, length: int, share: float, high: float) -> Floats:
    """Return so many steps of a serving pod: bursts for this share of the time, else near rest."""
    starts = max(BURST_ENDS * share / (1 - share), 1e-5)
    pairs = int(length / (1 / starts + 1 / BURST_ENDS)) * 2 + 8
    rest = draws.geometric(starts, pairs)
    rest[0] = rest[0] * draws.random()  # the day begins within a rest
    runs = np.stack([rest, draws.geometric(BURST_ENDS, pairs)], axis=1).ravel()
    is_burst = np.repeat(np.tile([False, True], pairs), np.minimum(runs, length))
    is_burst = np.pad(is_burst, (0, max(length - len(is_burst), 0)))[:length]
    low, noise = 0.04 * draws.random(), draws.uniform(0.8, 1.2, length)
    return np.minimum(np.where(is_burst, high, low) * noise, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLoad:
    """What runs on the devices outside Kubernetes.

    Attributes:
        utilization: by step and device, 0 where nothing runs.
        memory: what it wants of the card's, ratio, likewise.
    """

    utilization: Floats
    memory: Floats


def draw_foreign(regime: Regime, seed: int) -> ForeignLoad:
    """Return the load of a day: on and off again on every device of every second node."""
    draws = np.random.default_rng([seed, 2])
    shape = regime.shape
    # A serving pod that starts late in the day has a next hour, too.
    steps = STEPS + int(FOREIGN_SECONDS / STEP_SECONDS)
    utilization, memory = np.zeros((steps, shape.devices)), np.zeros((steps, shape.devices))
    for device in range(shape.devices) if regime.has_foreign else ():
        if device // shape.cards % 2 == 0:
            continue
        at, is_on = 0, bool(draws.random() < 0.5)
        while at < steps:
            until = at + 1 + int(draws.exponential(FOREIGN_SECONDS) / STEP_SECONDS)
            if is_on:
                utilization[at:until, device] = draws.uniform(*FOREIGN_UTILIZATION)
                memory[at:until, device] = draws.uniform(*FOREIGN_MEMORY)
            at, is_on = until, not is_on
    return ForeignLoad(utilization=utilization, memory=memory)
