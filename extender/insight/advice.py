"""The route /v1/advice: how to share GPUs, which pods request too much, which GPUs are stranded."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, Final, TypeVar

from aiohttp import web

from extender.answers import routes
from extender.answers.advice import Advice, CardAdvice, PodAdvice, Rules
from extender.core.devices.gpu_models import SharingWay, is_vgpu, model_name
from extender.core.quantity import GIB
from extender.fleet.fleet import Fleet
from extender.fleet.pods import LEAST_SAMPLES, Use
from extender.insight import advice_rules as rules
from extender.insight.advice_findings import (
    KINDS,
    OWN_SECONDS,
    CardFinding,
    Measured,
    PodFinding,
    PrometheusCache,
    find,
)
from extender.insight.advice_rules import (
    Bound,
    Card,
    CardRecommendation,
    CardVerdict,
    MemoryAdvice,
    MemoryVerdict,
)
from extender.insight.last_hour import Plots, ShortMemory
from extender.insight.stranded import HostPods, find_stranded
from extender.runtime.cooperative import run_in_steps
from extender.runtime.fair_queue import BusyError, FairQueue
from extender.server.json_api import (
    QueryError,
    chunks,
    error_answer,
    json_answer,
    moment,
    read_boolean,
    read_number,
    serve,
    unknown_node,
)
from extender.server.redaction import VIEWER, of_pod, pod_name

# Explain each piece of advice in one sentence with its figures.

_BOUNDS: Final = {
    Bound.ACTIVITY: "activity allows no more",
    Bound.MEMORY: "memory allows no more, 1 GiB kept back",
    Bound.MOST: "more are never recommended",
}


def _card_words(card: Card, advice: CardRecommendation) -> str:
    """Explain the advice for a card."""
    if advice.verdict is CardVerdict.NOT_MEASURED:
        return (
            f"no samples of the pods' use; until there are, the default is {advice.replicas} "
            f"replicas of {_gib(advice.memory_bytes)}, 1 GiB kept back, {_way(card, advice)}"
        )
    used = _used(card.use, card.memory_bytes)
    limit = "" if advice.bound is None else f", {_BOUNDS[advice.bound]}"
    if advice.verdict is CardVerdict.SHARE:
        fit = f"{advice.replicas} such pods would fit{limit}"
        return f"its pod uses {used}: {fit}; {_way(card, advice)}"
    tenants = f"{card.pods} of {card.replicas} replicas in use, which together use {used}"
    if advice.verdict is CardVerdict.DO_NOT_SHARE:
        return f"{tenants}: not two of these fit{limit}"
    return f"{tenants}: {advice.replicas} fit{limit}"


def _tenth_words(gpus: int, use: Use, total_bytes: float, per_card: int) -> str:
    """Explain why a pod does not need its whole GPUs.

    Args:
        gpus: number of its GPUs.
        use: highest activity and highest memory use of any of its GPUs.
        total_bytes: memory of each GPU.
        per_card: number of such pods that would fit on one GPU.
    """
    subject = "its GPU is" if gpus == 1 else f"none of its {gpus} GPUs is more than"
    used = _used(use, total_bytes)
    room = (
        f"{per_card} pods that use so much would fit on one"
        if per_card > 1
        else "but for its memory one GPU would do for more"
    )
    return f"{subject} {used}: {room}"


def _memory_words(requested_bytes: float, use: Use, advice: MemoryAdvice) -> str:
    """Explain the difference between a pod's requested and used memory."""
    most = _gib(use.memory_most_bytes or 0.0)
    better = _gib(advice.suggested_bytes)
    if advice.verdict is MemoryVerdict.TOO_MUCH:
        return (
            f"requests {_gib(requested_bytes)} of each GPU and never used more than {most}: "
            f"{better} would suffice, and leave room for others"
        )
    return (
        f"requests {_gib(requested_bytes)} of each GPU and used up to {most}: with {better} it is "
        "placed on a GPU with enough room"
    )


def _used(use: Use, total_bytes: float) -> str:
    activity = use.activity_ratio or 0.0
    return (
        f"{activity:.0%} busy and {_gib(use.memory_bytes or 0.0)} of {_gib(total_bytes)} full, "
        "19 samples of 20"
    )


def _way(card: Card, advice: CardRecommendation) -> str:
    if is_vgpu(card.model):
        return "a vGPU: no MIG and no resets in the guest, the hypervisor schedules it"
    if advice.way is SharingWay.MIG:
        return f"as MIG instances, {advice.layout}"
    if advice.way is SharingWay.MPS:
        return "under MPS, which caps the memory of each"
    return "time-sliced: nothing there protects memory"


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


_WINDOWS: Final = tuple(
    hours * 3600 for hours in (1, 2, 3, 6, 12, 24, 2 * 24, 3 * 24, 7 * 24, 14 * 24, 30 * 24)
)
"""Periods for Prometheus queries: a request is rounded up, so that callers share cached answers."""

_AT_ONCE: Final = 2
_WAITING_EACH: Final = 4
_WAIT_SECONDS: Final = 60.0
"""Limits of the fair queue: answers at once, waiting requests of each caller, and waiting time. In
a large fleet one answer takes seconds."""

_PIECE_VIEWS: Final = 100
"""Number of records to build between two yields to the event loop."""

_Found = TypeVar("_Found")
_View = TypeVar("_View")


class AdviceRoutes:
    """Handler of /v1/advice.

    Args:
        memory: samples of the last hour.
        plots: reads older samples from Prometheus; None if there is no Prometheus.
        clock: seconds since the epoch.
        host_pods: requests of all pods on their nodes.
    """

    def __init__(
        self,
        fleet: Fleet,
        memory: ShortMemory,
        plots: Plots | None,
        clock: Callable[[], float],
        host_pods: HostPods,
    ) -> None:
        self._fleet = fleet
        self._memory = memory
        self._plots = plots
        self._clock = clock
        self._host_pods = host_pods
        self._cache = PrometheusCache(clock)
        self._queue = FairQueue(
            at_once=_AT_ONCE, waiting_each=_WAITING_EACH, wait_seconds=_WAIT_SECONDS
        )

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/advice."""
        return [serve(routes.ADVICE, self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        node, namespace = query.get("node"), query.get("namespace")
        limit = read_number(query, routes.ADVICE, "limit")
        seconds = read_number(query, routes.ADVICE, "over")
        is_all = read_boolean(query, "all")
        if node is not None and node not in self._fleet.nodes:
            return error_answer(404, unknown_node(node, self._fleet.nodes))
        plots = self._source(seconds)
        if plots is not None:
            seconds = next(window for window in _WINDOWS if window >= seconds)
        measured = Measured(self._fleet, self._memory, plots, float(seconds), self._cache)
        try:
            async with self._queue.of(VIEWER.get().name or request.remote or ""):
                found = await find(
                    self._fleet, measured, node=node, namespace=namespace, most=limit
                )
                stranded = await run_in_steps(find_stranded(self._fleet, self._host_pods(), node))
        except BusyError as error:
            return error_answer(429, f"too many requests for advice at once: {error}")
        if not is_all:
            found.cards[CardVerdict.KEEP].clear()
            found.counts[CardVerdict.KEEP.value] = 0
        cards = chain.from_iterable(found.cards.values())
        pods = chain.from_iterable(found.pods.values())
        return json_answer(
            Advice(
                at=moment(self._clock()),
                devices=found.devices,
                looked_seconds=found.seconds,
                samples=found.samples,
                sources=sorted(found.sources),
                over_seconds=float(seconds),
                note=measured.note,
                rules=_rules(),
                cards_total=sum(found.counts[verdict.value] for verdict in CardVerdict),
                pods_total=sum(found.counts[kind] for kind in KINDS),
                pods_unjudged=found.unjudged,
                cards=await _views(islice(cards, limit), _card_view),
                pods=await _views(islice(pods, limit), _pod_view),
                stranded_gpus=sum(one.gpus for one in stranded),
                stranded_total=len(stranded),
                stranded=[one.view() for one in stranded[:limit]],
            )
        )

    def _source(self, seconds: int) -> Plots | None:
        """Return the source for a period: Prometheus, or None for our own samples."""
        if seconds <= OWN_SECONDS:
            return None
        if self._plots is None or not self._plots.is_configured:
            raise QueryError(
                "over",
                str(seconds),
                f"must be at most {OWN_SECONDS}: nothing older is known without prometheus.url",
            )
        return self._plots


async def _views(found: Iterable[_Found], view: Callable[[_Found], _View]) -> list[_View]:
    """Build records for an answer in batches, yielding to the event loop after each."""
    views: list[_View] = []
    for some in chunks(found, _PIECE_VIEWS):
        views += map(view, some)
        await asyncio.sleep(0)
    return views


def _rules() -> Rules:
    """Return the thresholds of the advice."""
    return Rules(
        quantile=rules.QUANTILE,
        full_ratio=rules.FULL_RATIO,
        kept_back_bytes=rules.KEPT_BACK_BYTES,
        least_samples=LEAST_SAMPLES,
        most_replicas=rules.MOST_REPLICAS,
        tenth_ratio=rules.TENTH,
    )


def _figures(use: Use, source: str) -> dict[str, Any]:
    """Return the fields of a `SampledUse`."""
    return {
        "activity_ratio": use.activity_ratio,
        "memory_bytes": use.memory_bytes,
        "memory_most_bytes": use.memory_most_bytes,
        "samples": use.samples,
        "looked_seconds": use.seconds,
        "source": source,
    }


def _card_view(found: CardFinding) -> CardAdvice:
    device, card, advice = found.device, found.card, found.advice
    shared_by = "mps" if device.pool_row.is_mps else "time-slicing"
    return CardAdvice(
        node=device.node,
        index=device.info.index,
        uuid=device.info.uuid,
        model=model_name(device.model),
        resource=device.resource,
        shared_by=shared_by if card.is_shared else None,
        replicas=card.replicas,
        replicas_used=device.used,
        memory_total_bytes=card.memory_bytes or None,
        verdict=advice.verdict.value,
        recommended_replicas=advice.replicas,
        bound_by=None if advice.bound is None else advice.bound.value,
        way=None if advice.way is None else advice.way.value,
        mig_layout=advice.layout or None,
        replica_memory_bytes=advice.memory_bytes,
        **_figures(card.use, found.source),
        why=_card_words(card, advice),
    )


def _pod_view(found: PodFinding) -> PodAdvice:
    record, hidden = found.record, found.record.namespace
    if found.memory is not None:
        why = _memory_words(float(record.memory_bytes or 0), found.use, found.memory)
    else:
        why = _tenth_words(found.gpus, found.use, found.memory_bytes, found.per_card or 1)
    return PodAdvice(
        pod=pod_name(record.namespace, record.name),
        uid=of_pod(hidden, record.uid),
        owner=of_pod(hidden, record.owner or None),
        node=record.node,
        resources=dict(record.resources),
        gpus=found.gpus,
        kind=found.kind,
        memory_total_bytes=found.memory_bytes,
        pods_per_gpu=found.per_card,
        requested_memory_bytes=of_pod(hidden, record.memory_bytes),
        suggested_memory_bytes=of_pod(
            hidden, None if found.memory is None else found.memory.suggested_bytes
        ),
        **_figures(found.use, found.source),
        why=why,
    )
