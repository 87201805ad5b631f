"""Measure the latency of filter and prioritize, beside a trivial handler with the same requests.

`python -m bench.webhooks` calls the extender and `bench.trivial` alternately with the same bytes,
each over its own kept-alive connection, as kube-scheduler does: filter with the names of all nodes,
in another order each time, a moment after the API server sent the pod; then prioritize with the
names of filter's answer. Then the pod is bound, so that each request changes the state. Prometheus'
values of every device change each ten seconds.

Both return the same number of nodes: without a shortlist prioritize scores every node, with one a
hundred. The first requests of their kind (cold) are separated from repeated ones (warm). Latency is
kube-scheduler's wait, from the first byte sent to the last byte read. Both have the same client.
"""

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import orjson

from bench.machine import Bound, report
from bench.placing import Connection, percentile
from bench.requests import EVERYDAY, Wish, create_pod, distinct, names_json, request_body
from bench.trivial_process import base_url, trivial_process
from bench.world import FleetSpec, World, open_world

SIZES: Final = (100, 1000, 5000)
SHORTLISTS: Final = (100, 0)
VERBS: Final = ("filter", "prioritize")
TRIES: Final = 1500
"""At 5,000 nodes this takes half a minute, in which Prometheus' values change three times."""
COLD_TRIES: Final = 40
FREED: Final = 0.8
"""Share of the placed pods that are deleted again, so that there is room until the end."""
PAUSE_SECONDS: Final = 0.005
HEAD_START_SECONDS: Final = (-0.0014, 1.4e-6)
"""kube-scheduler receives a pod at the same time as the extender, and filters the nodes itself
before it calls: a time per node, less the possible delay of the watch; no head start if the sum is
negative. Nine of ten pods have a longer one (`bench.head_start` measures it)."""
BETWEEN_SECONDS: Final = 0.001
"""kube-scheduler calls prioritize after it has parsed filter's answer and scored those nodes
itself: at 5,000 nodes that takes longer (`bench.scheduler` shows how long)."""
RATIO_LIMIT: Final = 2.0
"""Bound of filter at the largest size, where parsing names is most of the work of both."""
MEDIAN_LIMIT_MS: Final = {"filter": 2.5, "prioritize": 1.0}
RATIO_AIM: Final = 1.3
P99_LIMIT_MS: Final = 10.0
P99_AIM_MS: Final = 5.0


@dataclass(slots=True)
class Times:
    """Latencies of one kind of request, in milliseconds.

    Attributes:
        ours: latencies of the extender.
        trivial: latencies of the trivial handler for the same requests.
    """

    ours: list[float] = field(default_factory=list)
    trivial: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median of the extender divided by the median of the trivial handler."""
        return median(self.ours) / median(self.trivial)


Kinds = dict[str, dict[str, Times]]
"""Latencies by state, "cold" and "warm", and by verb."""


class RequestSender:
    """Stand-in for kube-scheduler that calls two extenders.

    Args:
        world: the cluster and the extender.
        trivial_url: base URL of the trivial handler.
    """

    def __init__(self, world: World, trivial_url: str) -> None:
        self._world = world
        self._ours = Connection(world.url)
        self._trivial = Connection(trivial_url)
        for connection in (self._ours, self._trivial):
            world.connections.callback(connection.close)
        self._names = world.nodes()
        self._random = random.Random(7)  # same order in every run
        self._placed: list[str] = []

    def place(self, wish: Wish, times: Mapping[str, Times]) -> None:
        """Place one pod, and record the latency of each verb.

        Args:
            wish: GPU request of the pod.
            times: latencies by verb.
        """
        self._random.shuffle(self._names)
        names = names_json(self._names)
        uid, pod = create_pod(self._world, wish)
        time.sleep(head_start_seconds(len(self._names)))
        answer = self._request("/filter", request_body(pod, names), times["filter"])
        passed = orjson.loads(answer)["NodeNames"] or []
        if passed:
            time.sleep(BETWEEN_SECONDS)
            answer = self._request(
                "/prioritize", request_body(pod, names_json(passed)), times["prioritize"]
            )
            best = max(orjson.loads(answer), key=lambda score: score["Score"])["Host"]
            self._world.control("bind", uid=uid, node=best)
        self._placed.append(uid)
        if self._random.random() < FREED:
            gone = self._placed.pop(self._random.randrange(len(self._placed)))
            self._world.control("delete", uids=[gone])
        time.sleep(PAUSE_SECONDS)

    def _request(self, path: str, body: bytes, times: Times) -> bytes:
        """Call both, in alternating order; return the extender's answer."""
        answer = b""
        for is_ours in self._random.sample((True, False), 2):
            if is_ours:
                seconds, answer = self._ours.post(path, body)
                times.ours.append(seconds * 1e3)
            else:
                seconds, _ = self._trivial.post(path, body)
                times.trivial.append(seconds * 1e3)
        return answer


def head_start_seconds(nodes: int) -> float:
    """Return the pause of `RequestSender` between creating a pod and calling filter for it.

    Example:
        >>> head_start_seconds(100), round(head_start_seconds(5000), 4)
        (0.0, 0.0056)
    """
    offset, for_each = HEAD_START_SECONDS
    return max(0.0, offset + for_each * nodes)


@contextmanager
def trivial_handler(shortlist: int = 0) -> Iterator[str]:
    """Run the trivial handler while the context is open; yield its base URL.

    Args:
        shortlist: number of nodes in filter's answer, 0 for all.
    """
    with tempfile.TemporaryDirectory(prefix="idlegpu-trivial-") as folder:
        server = trivial_process(Path(folder), shortlist)
        asyncio.run(server.start())
        try:
            yield base_url(server)
        finally:
            server.kill()


def measure(nodes: int, shortlist: int, tries: int) -> Kinds:
    """Measure one size of cluster.

    Args:
        nodes: number of nodes with eight GPUs each.
        shortlist: the extender's `wire.shortlist`.
        tries: number of warm requests of each verb.
    """
    spec = FleetSpec(nodes=nodes, gpu_pods=2 * nodes)
    kinds = {state: {verb: Times() for verb in VERBS} for state in ("cold", "warm")}
    with (
        open_world(spec, settings={"wire": {"shortlist": shortlist}}) as world,
        trivial_handler(shortlist) as trivial_url,
    ):
        world.wait_ready()
        world.wait_readings(1)
        world.wait_past()
        sender = RequestSender(world, trivial_url)
        for wish in distinct(COLD_TRIES):
            sender.place(wish, kinds["cold"])
        for wish in EVERYDAY:
            sender.place(wish, kinds["cold"])
        for turn in range(tries):
            sender.place(EVERYDAY[turn % len(EVERYDAY)], kinds["warm"])
    return kinds


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the exponent of the growth of costs with size, by least squares of the logarithms.

    Example:
        >>> round(exponent([10, 100, 1000], [1.0, 10.0, 100.0]), 3)
        1.0
    """
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return over / sum((a - mean_x) ** 2 for a in x)


def main() -> int:
    """Run the benchmark, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--shortlists", type=int, nargs="+", default=list(SHORTLISTS))
    parser.add_argument("--tries", type=int, default=TRIES, help="pods placed at each size")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    bounds: list[Bound] = []
    notes: list[str] = []
    for shortlist in arguments.shortlists:
        measured = {nodes: measure(nodes, shortlist, arguments.tries) for nodes in arguments.nodes}
        for nodes, kinds in measured.items():
            rows += [
                _row(nodes, shortlist, state, verb, times)
                for state, verbs in kinds.items()
                for verb, times in verbs.items()
            ]
        bounds += _bounds(shortlist, measured)
        for verb in VERBS:
            if len(measured) > 1:
                medians = [median(kinds["warm"][verb].ours) for kinds in measured.values()]
                grows = exponent(list(measured), medians)
                notes.append(
                    f"{verb}, shortlist {shortlist}: the median grows with nodes to the power of "
                    f"{grows:.2f} (allowed 1)."
                )
    notes.append(f"Aims: {RATIO_AIM} times and {P99_AIM_MS:g} ms.")
    is_met = report("webhooks", "Filter and prioritize", rows=rows, bounds=bounds, notes=notes)
    return 0 if is_met else 1


def _bounds(shortlist: int, measured: Mapping[int, Kinds]) -> Iterator[Bound]:
    """Yield the bounds: medians at all sizes, p99 and filter's ratio at the largest size."""
    for nodes, kinds in measured.items():
        for state, verbs in kinds.items():
            for verb, times in verbs.items():
                where = f"{verb}, {nodes} nodes, shortlist {shortlist}, {state}"
                limit = MEDIAN_LIMIT_MS[verb]
                middle = median(times.ours)
                yield Bound(what=f"{where}: median", limit=limit, measured=middle, unit="ms")
                if nodes == max(measured):
                    p99 = percentile(times.ours, 0.99)
                    yield Bound(what=f"{where}: p99", limit=P99_LIMIT_MS, measured=p99, unit="ms")
                    if verb == "filter":
                        yield Bound(
                            what=f"{where}: median by the trivial handler's",
                            limit=RATIO_LIMIT,
                            measured=times.ratio,
                            unit="times",
                        )


def _row(nodes: int, shortlist: int, state: str, verb: str, times: Times) -> dict[str, object]:
    return {
        "nodes": nodes,
        "shortlist": shortlist,
        "state": state,
        "verb": verb,
        "requests": len(times.ours),
        "median ms": median(times.ours),
        "p99 ms": percentile(times.ours, 0.99),
        "most ms": max(times.ours),
        "trivial median ms": median(times.trivial),
        "trivial p99 ms": percentile(times.trivial, 0.99),
        "ratio of medians": times.ratio,
    }


if __name__ == "__main__":
    sys.exit(main())
