"""Measure the cost of each part of an answer, and the time that each cache saves.

`python -m bench.answer_cost` builds a fleet in this process, without a cluster or a socket. Each
part runs alternately as in the extender and without its cache, so that noise of the machine affects
both. The difference of the medians is the price of removing the cache. Times are CPU time. Nothing
is written.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle
from statistics import median
from typing import Final

import numpy as np
import orjson

from bench.machine import report
from bench.requests import request_body as body_of
from bench.virtual_cluster import GPU, Shape, VirtualCluster
from extender.core.decision.dirty_rows import evaluate_in_steps, evaluate_together
from extender.core.decision.evaluation import EvaluationInputs, device_requests
from extender.core.devices.readings import Signal
from extender.core.nodes.batches import current_batch
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Tenant
from extender.core.policy import Policy, Strategy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import GpuRequest, PodRef, WaitingRequests, parse_request
from extender.core.steps import finish
from extender.webhook import wire

NODES: Final = 5000
ROUNDS: Final = 41
WARM_UP: Final = 3
REQUESTS: Final = tuple(
    GpuRequest(
        resource=GPU, count=gpus, resources=((GPU, gpus),), memory_bytes=memory, strategy=strategy
    )
    for gpus in (1, 2, 4, 8)
    for memory, strategy in ((None, Strategy.AUTO), (20 << 30, Strategy.PACK))
)
"""As many requests as the extender precomputes."""
SHORTLIST: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """A part of an answer.

    Attributes:
        name: name of the part or of its cache.
        run: the work, as the extender does it.
        without: the same work without the cache; None if there is no cache.
    """

    name: str
    run: Callable[[], object]
    without: Callable[[], object] | None = None

    def row(self, rounds: int) -> dict[str, object]:
        """Time both variants alternately; return the medians in milliseconds."""
        both = [self.run] if self.without is None else [self.run, self.without]
        times: list[list[float]] = [[] for _ in both]
        for number in range(WARM_UP + rounds):
            for work, taken in zip(both, times, strict=True):
                started = time.process_time()
                work()
                if number >= WARM_UP:
                    taken.append(1e3 * (time.process_time() - started))
        medians = [median(taken) for taken in times]
        saved = medians[-1] - medians[0] if len(both) > 1 else None
        return {
            "part": self.name,
            "ms": medians[0],
            "without cache ms": medians[1] if len(both) > 1 else "",
            "saved ms": "" if saved is None else saved,
        }


def build(nodes: int) -> VirtualCluster:
    """Build a fleet with readings of all devices, half of them busy."""
    cluster = VirtualCluster(Shape(nodes=nodes), Policy())
    devices = cluster.shape.devices
    busy = np.where(np.arange(devices) % 2, 0.9, 0.0)
    used = np.where(busy > 0, 0.5, 0.0) * cluster.shape.memory_bytes
    cluster.read(
        {
            Signal.GPU_UTILIZATION: busy,
            Signal.MEMORY_USED: used,
            Signal.MEMORY_FREE: cluster.shape.memory_bytes - used,
        },
        np.full(devices, cluster.now),
        {},
    )
    cluster.fleet.snapshot_of_all()
    return cluster


def pods(number: int) -> Iterator[tuple[PodRecord, bytes]]:
    """Yield the records and the JSON of unbound pods."""
    for at in range(number):
        version = str(at + 1)
        record = PodRecord(
            uid=f"uid-{at}",
            namespace="bench",
            name=f"pod-{at}",
            resources={GPU: 1},
            version=version,
        )
        container = {"name": "main", "image": "image", "resources": {"limits": {GPU: "1"}}}
        metadata = {
            "name": record.name,
            "namespace": record.namespace,
            "uid": record.uid,
            "resourceVersion": version,
            "labels": {f"label-{label}": "value" * 5 for label in range(20)},
        }
        yield record, orjson.dumps({"metadata": metadata, "spec": {"containers": [container]}})


def wire_parts(cluster: VirtualCluster) -> Iterator[AnswerPart]:
    """Yield the parts that decode a request and encode its answer."""
    fleet, placer = cluster.fleet, cluster.placer
    names = orjson.dumps(cluster.names)
    # More pods than the cache in `wire` holds.
    known = list(pods(3 * 32))
    bodies = [body_of(pod, names) for _, pod in known]
    waiting = {record.uid: record for record, _ in known}
    called, listed = cycle(bodies), cycle(bodies)
    index, total = fleet.node_index, len(fleet.nodes)
    yield AnswerPart(
        name="names stay bytes, and numbers of nodes",
        run=lambda: wire.decode_request(next(called), index, waiting, known=total),
        without=lambda: index.number(tuple(orjson.loads(next(listed))["NodeNames"])),
    )
    yield AnswerPart(
        name="the watch's record instead of the pod's JSON",
        run=lambda: wire.decode_request(next(called), index, waiting, known=total),
        without=lambda: wire.decode_request(next(called), index, {}, known=total),
    )
    record, pod = known[0]
    requests, document = WaitingRequests(), orjson.loads(pod)
    requests.read(record, fleet.policy)
    yield AnswerPart(
        name="equal requests are parsed once",
        run=lambda: requests.read(record, fleet.policy),
        without=lambda: parse_request(document, resources=ResourceNames(), defaults=fleet.policy),
    )
    request = REQUESTS[0]
    call = wire.decode_request(bodies[0], index, waiting, known=total)
    about = PodRef(uid="uid", namespace="bench", name="pod")
    decision = placer.weigh(about, request, call.nodes).decision
    yield AnswerPart(
        name="filter's answer, all nodes", run=lambda: wire.encode_filter(call, decision)
    )
    yield AnswerPart(
        name=f"filter's answer, shortlist {SHORTLIST}",
        run=lambda: wire.encode_filter(call, decision, SHORTLIST),
    )
    yield AnswerPart(
        name="prioritize's answer, all nodes", run=lambda: wire.encode_scores(call, decision, 400)
    )
    yield AnswerPart(
        name="decision, evaluation cached, all nodes",
        run=lambda: placer.weigh(about, request, call.nodes),
    )


def evaluation_parts(cluster: VirtualCluster) -> Iterator[AnswerPart]:
    """Yield the parts of evaluating a pool."""
    fleet = cluster.fleet
    snapshot = fleet.snapshot()
    pool, policy = snapshot.pools[GPU], fleet.policy
    tenant = (Tenant(uid="other", count=1),)

    def inputs_of(request: GpuRequest, *nodes: str) -> EvaluationInputs:
        overlay = dict.fromkeys(nodes, tenant)
        ((_, devices),) = device_requests(request)
        return EvaluationInputs(request=request, devices=devices, policy=policy, overlay=overlay)

    before = [inputs_of(request) for request in REQUESTS]
    after = [inputs_of(request, cluster.names[1]) for request in REQUESTS]
    entries = [finish(evaluate_in_steps(snapshot, pool, one)) for one in before]
    filtered = finish(evaluate_in_steps(snapshot, pool, after[0]))

    def scratch() -> object:
        return finish(evaluate_in_steps(snapshot, pool, before[0]))

    def unshared() -> object:
        alone = replace(pool, batch=replace(pool.batch))
        return finish(evaluate_in_steps(snapshot, alone, before[0]))

    def update(*which: int) -> object:
        return evaluate_together(
            snapshot, pool, [after[at] for at in which], [[entries[at]] for at in which]
        )

    yield AnswerPart(
        name="entry without dirty rows",
        run=lambda: evaluate_together(snapshot, pool, [before[0]], [[entries[0]]]),
        without=scratch,
    )
    yield AnswerPart(name="entry with one dirty row", run=lambda: update(0), without=scratch)
    yield AnswerPart(
        name="two entries of a request: prioritize finds that of filter",
        run=lambda: evaluate_together(snapshot, pool, [before[0]], [[filtered, entries[0]]]),
        without=lambda: evaluate_together(snapshot, pool, [before[0]], [[filtered]]),
    )
    every = range(len(REQUESTS))
    yield AnswerPart(
        name=f"dirty rows of {len(REQUESTS)} requests in one batch",
        run=lambda: update(*every),
        without=lambda: [update(at) for at in every],
    )
    yield AnswerPart(
        name="evaluation from scratch, results that requests share are cached",
        run=scratch,
        without=unshared,
    )


def snapshot_parts(cluster: VirtualCluster) -> Iterator[AnswerPart]:
    """Yield the parts of building a snapshot after a pod was bound; these change the fleet."""
    fleet, numbers = cluster.fleet, count()

    def bind() -> None:
        number = next(numbers)
        cluster.bind(f"bound-{number}", number % cluster.shape.nodes)

    def update() -> object:
        bind()
        return fleet.snapshot()

    def rebuild() -> object:
        bind()
        return fleet.snapshot_of_all()

    yield AnswerPart(name="dirty rows of a snapshot after a binding", run=update, without=rebuild)

    def write() -> object:
        bind()
        snapshot = fleet.snapshot()
        return current_batch(snapshot.pools[GPU], snapshot.telemetry)

    yield AnswerPart(name="dirty rows are written into the arrays later", run=update, without=write)


def main() -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.answer_cost", description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES, help="of eight GPUs each")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    cluster = build(options.nodes)
    rows = [
        part.row(options.rounds)
        for parts in (wire_parts, evaluation_parts, snapshot_parts)
        for part in parts(cluster)
    ]
    report("answer_cost", "Cost of an answer", rows=rows, bounds=[], folder=None)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
