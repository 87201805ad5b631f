"""Pods and load outside Kubernetes for a day of shared GPUs, drawn from traces."""

from collections.abc import Sequence
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
"""Days of the trace that arrive in one simulated day at full load; run times are unchanged."""
FIRST_DAY: Final = 116
DAYS_APART: Final = 4
WINDOWS: Final = 4
"""Number of periods of the trace between which seeds alternate. They start `DAYS_APART` days apart,
the first on `FIRST_DAY`, because the trace has few pods before."""

TRAINING_GIB: Final = (1.0, 12.0)
"""Memory of a training pod: the first number, plus the second times Acme's memory utilization."""
SERVING_GIB: Final = (10.0, 24.0)
TIGHT_SERVING: Final = 0.5
TIGHT_CARD_GIB: Final = 24.0

BURST_ENDS: Final = 1 - 0.57 ** (STEP_SECONDS / 57)
"""Probability that a burst ends in a step: of pods at 20 % and more, 43 % are under 5 % in a sample
57 s later."""
MOST_BURSTS: Final = 0.5
"""Largest share of the time in which a serving pod is busy; the mean is a quarter."""

FOREIGN_SECONDS: Final = 3600.0
FOREIGN_UTILIZATION: Final = (0.3, 1.0)
FOREIGN_MEMORY: Final = (0.1, 0.5)
"""Memory use outside Kubernetes, as a range of shares of the card's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Parameters of one kind of day.

    Attributes:
        name: name in the tables.
        what: description.
        load: share of the trace's pods. It is below 1 where replicas or memory would run out under
            every policy.
        is_training_alone: whether there are no serving pods.
        has_foreign: whether half of the nodes have load outside Kubernetes.
        is_tight: whether cards have little memory.
    """

    name: str
    what: str
    load: float
    is_training_alone: bool = False
    has_foreign: bool = False
    is_tight: bool = False

    @property
    def shape(self) -> Shape:
        """Cluster of this kind of day."""
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
    """Pods of a day in the order of arrival.

    Attributes:
        arrives: arrival in seconds since the start of the day.
        works: run time alone in seconds, without loading.
        memory_bytes: memory after loading.
        owner: kind and name of the controller.
        shape: number that pods with equal requests share.
        is_serving: whether the load comes in bursts.
        series: utilization of all pods, concatenated.
        first: index of each pod's first value; a training pod has one value.
        length: number of each pod's values.
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
        """Run time of each pod alone on a GPU, with loading, in seconds."""
        return LOADING_SECONDS + self.works

    def utilization(self, pods: Ints, progress: Floats) -> Floats:
        """Return the pods' utilization alone on a GPU, by their progress in seconds."""
        at = ((progress - LOADING_SECONDS) / STEP_SECONDS).astype(np.intp)
        at = np.clip(at, 0, self.length[pods] - 1)
        return np.where(progress < LOADING_SECONDS, 0.0, self.series[self.first[pods] + at])

    def memory(self, pods: Ints, progress: Floats) -> Floats:
        """Return the pods' memory by their progress: it grows while a pod loads."""
        return self.memory_bytes[pods] * np.minimum(progress / LOADING_SECONDS, 1.0)


def draw_pods(regime: Regime, seed: int) -> Pods:
    """Draw the pods of a day.

    Pods with equal requests have similar memory and load; pods of one owner even more so.

    Args:
        regime: the kind of day.
        seed: seed of the draws; also selects the period of the trace.
    """
    draws = np.random.default_rng([seed, 1])
    traced = stretch(seed, draws, regime.load)
    return pods_of(
        traced, draws, is_training_alone=regime.is_training_alone, is_tight=regime.is_tight
    )


def pods_of(
    traced: TracedPods,
    draws: np.random.Generator,
    *,
    is_training_alone: bool = False,
    is_tight: bool = False,
) -> Pods:
    """Draw load and memory of pods of the trace, in the time of the day.

    Args:
        draws: random numbers.
        is_training_alone: no pod serves.
        is_tight: cards are small, and serving pods hold less.
    """
    count = len(traced.created)
    owners = _owners(traced)
    is_serving = traced.is_serving & (not is_training_alone)
    works = _in_steps(np.clip(traced.ran, STEP_SECONDS, DAY_SECONDS))

    def alike(of_shape: float, of_owner: float) -> Floats:
        """Return a number from 0 to 1 for each pod, correlated within requests and owners."""
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
    serving *= TIGHT_SERVING if is_tight else 1.0
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
    """Round times up to whole steps, so that a pod alone has no slowdown."""
    steps: Floats = np.ceil(seconds / STEP_SECONDS) * STEP_SECONDS
    return steps


def stretch(seed: int, draws: np.random.Generator, load: float, most_gpus: int = 1) -> TracedPods:
    """Return the pods of a period of the trace, compressed to one day.

    Args:
        seed: selects the period.
        draws: random numbers; they select the pods.
        load: share of the pods that are kept.
        most_gpus: largest number of GPUs of a pod.
    """
    traced = openb_pods()
    begins = DAY_SECONDS * (FIRST_DAY + DAYS_APART * (seed % WINDOWS))
    created = (traced.created - begins) / COMPRESSION
    kept = (created >= 0) & (created < DAY_SECONDS) & (traced.gpus <= most_gpus)
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
    """Return the owner's number of each pod; similar pods in quick succession share an owner."""
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
    """Draw steps of a serving pod: bursts for `share` of the time, otherwise near idle."""
    starts = max(BURST_ENDS * share / (1 - share), 1e-5)
    pairs = int(length / (1 / starts + 1 / BURST_ENDS)) * 2 + 8
    rest = draws.geometric(starts, pairs)
    rest[0] = rest[0] * draws.random()  # the day begins between two bursts
    runs = np.stack([rest, draws.geometric(BURST_ENDS, pairs)], axis=1).ravel()
    is_burst = np.repeat(np.tile([False, True], pairs), np.minimum(runs, length))
    is_burst = np.pad(is_burst, (0, max(length - len(is_burst), 0)))[:length]
    low, noise = 0.04 * draws.random(), draws.uniform(0.8, 1.2, length)
    return np.minimum(np.where(is_burst, high, low) * noise, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLoad:
    """Load of processes outside Kubernetes.

    Attributes:
        utilization: utilization by step and device, 0 where no process runs.
        memory: share of the card's memory by step and device.
    """

    utilization: Floats
    memory: Floats


def draw_foreign(regime: Regime, seed: int) -> ForeignLoad:
    """Draw the foreign load of a day: intermittent on every device of every second node."""
    shape = regime.shape
    odd = [device for device in range(shape.devices) if device // shape.cards % 2]
    return foreign_on(odd if regime.has_foreign else [], shape.devices, seed)


def foreign_on(used: Sequence[int], devices: int, seed: int) -> ForeignLoad:
    """Draw the foreign load of a day on some devices: used and unused for an hour each (means).

    Args:
        used: the devices.
        devices: number of all devices.
        seed: seed of the draws.
    """
    draws = np.random.default_rng([seed, 2])
    # One hour longer than the day, so that a late pod's next hour exists.
    steps = STEPS + int(FOREIGN_SECONDS / STEP_SECONDS)
    utilization, memory = np.zeros((steps, devices)), np.zeros((steps, devices))
    for device in used:
        at, is_on = 0, bool(draws.random() < 0.5)
        while at < steps:
            until = at + 1 + int(draws.exponential(FOREIGN_SECONDS) / STEP_SECONDS)
            if is_on:
                utilization[at:until, device] = draws.uniform(*FOREIGN_UTILIZATION)
                memory[at:until, device] = draws.uniform(*FOREIGN_MEMORY)
            at, is_on = until, not is_on
    return ForeignLoad(utilization=utilization, memory=memory)
