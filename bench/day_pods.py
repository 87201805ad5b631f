"""Draw the pods, the processes outside Kubernetes and the broken cards of a simulated day.

Pods: all pods with GPUs of 20 days of Alibaba's trace, which arrive in one day in the trace's
bursts. GPUs, CPU, memory and run time are those of the trace, run times end at 24 h. A pod that
requests less than a GPU gets one of 4 replicas of a shared GPU; every other pod gets whole GPUs.
Pods that request more CPU or memory than a node has are left out. Load and memory on the GPU are
drawn as in `bench.sharing_pods`; a training pod with whole GPUs fills as much of each as Acme's
cards were filled.

Processes outside Kubernetes are an assumption: on every eighth node with whole GPUs and on every
second one with shared GPUs, each GPU is used for an hour and free for an hour (means).

Broken cards are an assumption, too: each card breaks once in 80 days (mean) and works again after
4 h (mean). In the training of Llama 3 a card failed once in about 3,300 days (268 faults of GPUs
in 54 days on 16,384 H100), so these break 40 times as often: a day with 160 cards has two faults.
Only faults that the device plugin does not report are drawn, such as failed row remaps: it takes
all other broken cards off the node's list, with or without idlegpu.
"""

from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.sharing_pods import (
    FOREIGN_SECONDS,
    STEP_SECONDS,
    STEPS,
    TRAINING_GIB,
    ForeignLoad,
    Pods,
    foreign_on,
    pods_of,
    stretch,
)
from bench.traces import DAY_SECONDS, Ints, openb_requests
from bench.virtual_cluster import GIB, Shape
from extender.core.nodes.host_resources import HostResources

SHARED_GPU: Final = "nvidia.com/gpu.shared"
MIB: Final = 1 << 20
WHOLE_MILLI: Final = 1000
ACME_CARD_BYTES: Final = 80e9
LARGEST: Final = 8

HOST: Final = HostResources(millicores=96_000, memory_bytes=393_216 * MIB)
"""Size of the trace's most frequent kind of node with 8 GPUs."""

WHOLE: Final = Shape(nodes=16, host=HOST)
SHARED: Final = Shape(nodes=4, replicas=4, resource=SHARED_GPU, host=HOST)
NODES: Final = WHOLE.nodes + SHARED.nodes
CARDS: Final = WHOLE.cards

FOREIGN_OF_WHOLE: Final = 8
FOREIGN_OF_SHARED: Final = 2
"""On one of so many nodes with shared GPUs, processes outside Kubernetes use the GPUs."""

BREAKS_DAYS: Final = 80.0
REPAIR_HOURS: Final = 4.0

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPods(Pods):
    """Pods of a day on nodes with whole and nodes with shared GPUs.

    Attributes:
        gpus: requested GPUs or replicas of each pod.
        is_whole: whether each pod requests whole GPUs.
        millicores: requested CPU of each pod.
        host_bytes: requested host memory of each pod.
    """

    gpus: Ints
    is_whole: Flags
    millicores: Ints
    host_bytes: Ints


def draw_fleet_pods(seed: int, load: float = 1.0) -> FleetPods:
    """Draw the pods of a day.

    Args:
        seed: seed of the draws; also selects the period of the trace.
        load: share of the trace's pods that arrive.
    """
    draws = np.random.default_rng([seed, 1])
    traced = stretch(seed, draws, load, most_gpus=LARGEST)
    millicores, memory_mib, milli = openb_requests()
    fits = (millicores <= HOST.millicores) & (memory_mib * MIB <= HOST.memory_bytes)
    kept = fits[traced.shape]
    traced = replace(
        traced, **{each.name: getattr(traced, each.name)[kept] for each in fields(traced)}
    )
    pods = pods_of(traced, draws)
    is_whole = milli[traced.shape] == WHOLE_MILLI
    filled = (pods.memory_bytes / GIB - TRAINING_GIB[0]) / TRAINING_GIB[1]
    memory = np.where(is_whole & ~pods.is_serving, filled * ACME_CARD_BYTES, pods.memory_bytes)
    return FleetPods(
        **{each.name: getattr(pods, each.name) for each in fields(pods)} | {"memory_bytes": memory},
        gpus=traced.gpus,
        is_whole=is_whole,
        millicores=millicores[traced.shape],
        host_bytes=memory_mib[traced.shape] * MIB,
    )


def draw_outside(seed: int) -> ForeignLoad:
    """Draw the load of the processes outside Kubernetes."""
    used = [*range(0, WHOLE.nodes, FOREIGN_OF_WHOLE)]
    used += range(WHOLE.nodes, NODES, FOREIGN_OF_SHARED)
    cards = [node * CARDS + card for node in used for card in range(CARDS)]
    return foreign_on(cards, NODES * CARDS, seed)


def draw_broken(seed: int) -> Flags:
    """Draw whether each card is broken, by step and card."""
    draws = np.random.default_rng([seed, 5])
    broken = np.zeros((STEPS + int(FOREIGN_SECONDS / STEP_SECONDS), NODES * CARDS), dtype=np.bool_)
    for card in range(NODES * CARDS):
        at = draws.exponential(BREAKS_DAYS * DAY_SECONDS) / STEP_SECONDS
        while at < len(broken):
            until = at + 1 + draws.exponential(REPAIR_HOURS * 3600) / STEP_SECONDS
            broken[int(at) : int(until), card] = True
            at = until + draws.exponential(BREAKS_DAYS * DAY_SECONDS) / STEP_SECONDS
    return broken
