"""Settings of the server around the decision: answers, sources, events and log."""

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from extender.runtime.logs import LogFormat, LogLevel
from extender.settings.section import LABEL, AnyCase, Section, ValueForm, check_label


class Wire(Section):
    """Settings of the answers to kube-scheduler."""

    max_score: int = Field(
        default=400,
        ge=1,
        le=1_000_000,
        description="score of the best node. kube-scheduler adds score x weight x 10 to the "
        "points of its own plugins: with 400 and weight 1 one GPU of fit is 40 points, and idle "
        "instead of busy is more than all other points (docs/decision.md)",
    )
    shortlist: int = Field(
        default=100,
        ge=0,
        le=100_000,
        description="number of best nodes that pass filter, so that kube-scheduler scores only "
        "these; above 1 also every node that the pod's soft spread or preferred affinity could "
        "favor. 0: all nodes pass, which is needed if an extender that refuses nodes is called "
        "after this one",
    )


class Ready(Section):
    """Conditions under which a replica is ready."""

    wait_seconds: float = Field(
        default=10.0,  # plus some 3 s for 5,000 nodes: ready within 15 s even without Prometheus
        ge=0,
        le=300,
        description="longest time that a starting replica waits for first readings and for "
        "messages of other replicas before it is ready; it always waits for nodes and pods",
    )


class ClusterSettings(Section):
    """Settings of the lists and watches of nodes and pods."""

    max_backoff_seconds: float = Field(
        default=30.0,
        ge=1,
        le=600,
        description="longest wait before the next attempt to reach the API server after failures",
    )
    exporter_words: tuple[str, ...] = Field(
        default=("dcgm-exporter",),
        description="words in the name or app label of pods that export telemetry; the names and "
        "addresses of these pods identify the node of a series",
    )
    memory_limits: bool = Field(
        default=False,
        description="read variables and arguments that limit a framework's GPU memory, such as "
        "vLLM's --gpu-memory-utilization, as gpu-memory of pods without that annotation",
    )
    group_objects: bool = Field(
        default=False,
        description="watch PodGroups (Kubernetes, coscheduling, Volcano) and JobSets for the sizes "
        "of pod groups; needs the rights of the component group-sizes",
    )


class Events(Section):
    """Settings of the Events that explain decisions in `kubectl describe pod`."""

    enabled: bool = Field(default=True, description="write Events that explain decisions")
    placements: bool = Field(
        default=True,
        description="write one Event on each bound pod that says where it was placed and why; "
        "above events.rate_per_second only on some pods",
    )
    rate_per_second: float = Field(
        default=5.0, ge=0.01, le=1000, description="most Events that are written, on average"
    )

    @property
    def writes_placements(self) -> bool:
        """Whether the extender writes an Event for placements."""
        return self.enabled and self.placements


class DecisionsSettings(Section):
    """Settings of the history behind `GET /v1/decisions`."""

    history: int = Field(
        default=1000, ge=1, le=100_000, description="number of decisions that are remembered"
    )
    detailed_nodes: int = Field(
        default=20,
        ge=1,
        le=1000,
        description="number of best nodes that are remembered with all details for each decision",
    )


def _check_entry(entry: str) -> str:
    key, separator, _ = entry.removeprefix("label/").partition("=")
    if entry.startswith("label/") and not (LABEL.fullmatch(key) and separator):
        raise ValueError(f"{entry!r} is not allowed: must be label/NAME=VALUE")
    if entry == "node/":
        raise ValueError(f"{entry!r} is not allowed: must be node/NAME")
    return entry


Prices = dict[Annotated[str, AfterValidator(_check_entry)], Annotated[float, Field(ge=0)]]

PRICES: Final = (
    "price of a GPU-hour by words of the model, e.g. {H100: 2.5, A100 80GB: 1.4}, by label of the "
    "node (label/pool=cheap: 0.9) or by node (node/gpu-7: 0.5), in any currency: page, API and "
    "`idlegpu costs` then show the cost of pods. A node's entry counts before a label's, a label's "
    "before a model's; of several the longest counts"
)

PRICE: Final = (
    "effect of prices on the choice of a node for pods that name no model: ignore; prefer: of "
    "nodes as likely to have idle GPUs the cheaper one first; strict: only the cheapest of the "
    "nodes that would do"
)

SPOT_SHARE: Final = (
    "part of a model's price that spot nodes cost, known by the labels of Karpenter, EKS, GKE and "
    "AKS and by node.kubernetes.io/lifecycle=spot"
)


PoolLabels = Annotated[
    tuple[Annotated[str, AfterValidator(check_label)], ...],
    ValueForm("a list of names of labels, such as pool or example.com/pool"),
]

POOL_LABELS: Final = (
    "labels whose value names a node's pool, for groups on the page and for metrics by pool; they "
    "are checked before the labels of cloud providers, which are built in"
)


class Log(Section):
    """Settings of the log."""

    level: Annotated[LogLevel, AnyCase] = Field(
        default=LogLevel.INFO, description="lowest level of the lines that are written"
    )
    format: Annotated[LogFormat, AnyCase] = Field(
        default=LogFormat.JSON, description="one JSON object for each line, or text for people"
    )
