"""Settings of the server around the decision: answers, sources, events and log."""

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from extender.runtime.log_choices import LogFormat, LogLevel
from extender.settings.section import AnyCase, Section, ValueForm

_LABEL: Final = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)


class Wire(Section):
    """Settings of the answers to kube-scheduler."""

    max_score: int = Field(
        default=400,
        ge=1,
        le=1_000_000,
        description="score of the first choice; kube-scheduler adds score x weight x 10 to the "
        "points of its own plugins: with 400 and weight 1 one GPU of fit is 40 points, and idle "
        "instead of busy is more than all other points (docs/decision.md); twice the score counts "
        "twice",
    )
    shortlist: int = Field(
        default=100,
        ge=0,
        le=100_000,
        description="number of best nodes that filter passes, so that kube-scheduler scores only "
        "them; above 1 also all nodes that the pod's soft spread or preferred affinity could pick. "
        "0 passes all: set it if another extender comes after this one and may refuse nodes",
    )


class Ready(Section):
    """Conditions under which a replica is ready."""

    wait_seconds: float = Field(
        default=10.0,  # beside some 3 s for 5,000 nodes: ready within 15 s without Prometheus too
        ge=0,
        le=300,
        description="a replica that starts is ready once it knows nodes and pods, has first "
        "readings, and has messages from other replicas; for readings and messages it waits at "
        "most this long",
    )


class ClusterSettings(Section):
    """Settings of the lists and watches of nodes and pods."""

    max_backoff_seconds: float = Field(
        default=30.0, ge=1, le=600, description="longest wait before the next try after failures"
    )
    exporter_words: tuple[str, ...] = Field(
        default=("dcgm-exporter",),
        description="pods whose name or app label contains one of these export telemetry: their "
        "names and addresses identify the node of a series",
    )


class Events(Section):
    """Settings of the Events that explain decisions in `kubectl describe pod`."""

    enabled: bool = Field(default=True, description="write events")
    placements: bool = Field(
        default=True,
        description="write one event on each bound pod that says where and why; if more pods are "
        "bound than `rate_per_second` allows, only on some",
    )
    rate_per_second: float = Field(
        default=5.0, ge=0.01, le=1000, description="most events that are written, on average"
    )

    @property
    def writes_placements(self) -> bool:
        """Whether the extender writes an Event for placements."""
        return self.enabled and self.placements


class DecisionsSettings(Section):
    """Settings of the history behind `GET /v1/decisions`."""

    history: int = Field(
        default=1000, ge=1, le=100_000, description="number of remembered decisions"
    )
    detailed_nodes: int = Field(
        default=20,
        ge=1,
        le=1000,
        description="number of best nodes that are remembered in full for each decision",
    )


def _check_entry(entry: str) -> str:
    key, separator, _ = entry.removeprefix("label/").partition("=")
    if entry.startswith("label/") and not (_LABEL.fullmatch(key) and separator):
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


def _check_label(label: str) -> str:
    if not _LABEL.fullmatch(label):
        raise ValueError(f"{label!r} is not allowed: must be a label's name, such as pool")
    return label


PoolLabels = Annotated[
    tuple[Annotated[str, AfterValidator(_check_label)], ...],
    ValueForm("a list of names of labels, such as pool or example.com/pool"),
]

POOL_LABELS: Final = (
    "labels of nodes that say which pool they are of, for the page's groups and the metrics by "
    "pool; they come before the labels of clouds, which are known anyway"
)


class Log(Section):
    """Settings of the log."""

    level: Annotated[LogLevel, AnyCase] = Field(
        default=LogLevel.INFO, description="lowest level that is written"
    )
    format: Annotated[LogFormat, AnyCase] = Field(
        default=LogFormat.JSON, description="one JSON object for each line, or text for people"
    )
