"""The JSON API's routes for clients, each with its parameters and its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from extender.answers.advice import Advice
from extender.answers.answer import Answer
from extender.answers.bypassed import BypassedAnswer
from extender.answers.decisions import DecisionAnswer, Decisions
from extender.answers.explanation import Explanation
from extender.answers.fleet import Defrag, Gpus, NodeAnswer, Nodes
from extender.answers.holding import Costs, HoldersAnswer, Size, Usage
from extender.answers.pending import PendingAnswer
from extender.answers.pods import Pods
from extender.answers.regret import Regret
from extender.answers.service import Readiness, Session
from extender.answers.verdicts import Best

_Kind = TypeVar("_Kind", bound=Answer)


@dataclass(frozen=True, slots=True)
class Route(Generic[_Kind]):
    """A route of the API.

    Attributes:
        method: HTTP method.
        path: path; `{name}` is a part that the caller fills in.
        answer: type of the answer; `Answer` for a route that answers no JSON.
        parameters: meaning of each query parameter.
        is_open: whether it answers callers without a token, even where the API requires one.
        summary: what the route does, "" for what its answer's docstring says.
    """

    method: str
    path: str
    answer: type[_Kind]
    parameters: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False
    summary: str = ""


_NAMESPACE: Final = {"namespace": "only pods of this namespace"}
_RESOURCE: Final = "GPU resource; by default the first one of the setting"
_SOME: Final = {"some": "`true`: also pods that use some of their GPUs"}
_NODES: Final = {
    "limit": "bounds `others`, 0 to 10000, default 100",
    "node": "describe this node in full as well",
}

NODES: Final = Route("GET", "/v1/nodes", Nodes)
NODE: Final = Route("GET", "/v1/nodes/{name}", NodeAnswer)
GPUS: Final = Route("GET", "/v1/gpus", Gpus, {"node": "only GPUs of this node"})
BEST: Final = Route(
    "GET",
    "/v1/best",
    Best,
    {
        "gpus": "GPUs that the pod requests, default 1",
        "resource": _RESOURCE,
        "memory": "memory that it needs of each GPU, such as `20Gi`",
        "model": "models that it prefers, such as `H100,A100`",
        "strategy": "as `idlegpu.io/strategy`",
        "require_idle": "as `idlegpu.io/require-idle`",
        "max_utilization": "as `idlegpu.io/max-utilization`",
        "max_memory": "as `idlegpu.io/max-memory`",
        "limit": "nodes in `best`, 1 to 1000, default 20",
    },
)
DEFRAG: Final = Route(
    "GET",
    "/v1/defrag",
    Defrag,
    {
        "gpus": "GPUs that must be free on one node, default 1",
        "resource": _RESOURCE,
        "limit": "nodes in each list, 1 to 50, default 5",
    },
)
DECISIONS: Final = Route(
    "GET",
    "/v1/decisions",
    Decisions,
    {
        "pod": "`namespace/name`, name or UID",
        "brief": "`true`: without `explained` and `nodes`",
        "limit": "decisions, 1 to 100, default 100",
    },
)
DECISION: Final = Route("GET", "/v1/decisions/{id}", DecisionAnswer)
UNASKED: Final = Route("GET", "/v1/unasked", BypassedAnswer)
PENDING: Final = Route(
    "GET", "/v1/pending", PendingAnswer, {**_NAMESPACE, "limit": "pods, 1 to 1000, default 200"}
)
PODS: Final = Route(
    "GET",
    "/v1/pods",
    Pods,
    {
        **_NAMESPACE,
        "search": "at most 10 words that must occur in the pod's name, owner or node",
        "state": "only pods in this state: `holds` or `waits`",
        "sort": "`pod`, `owner` or `node`; `gpus`, `use`, `memory`, `idle` or `wait`: the largest "
        "first. Otherwise waiting pods come first, the longest wait first, then the others by name",
        "limit": "pods, 1 to 500, default 100",
        "offset": "pods to skip, default 0",
    },
)
HOLDERS: Final = Route(
    "GET",
    "/v1/holders",
    HoldersAnswer,
    {
        "idle_for": "shortest idle time in seconds, to 2592000, default 3600; 0 for every holder",
        **_SOME,
        **_NAMESPACE,
        "limit": "pods, 1 to 1000, default 200",
    },
)
COSTS: Final = Route(
    "GET",
    "/v1/costs",
    Costs,
    {
        "by": "`pod`, `owner` (the default) or `namespace`",
        "idle_for": "shortest idle time in seconds, default 0: every holder",
        **_SOME,
        **_NAMESPACE,
        "limit": "groups, 1 to 1000, default 200",
    },
)
EXPLAIN: Final = Route(
    "GET",
    "/v1/explain",
    Explanation,
    {
        "pod": "`namespace/name`, a unique name, or a UID",
        "id": "instead of `pod`, the id of a decision, such as `7f3a-812`",
        "number": "instead of `pod`, the number of a decision; if several replicas have it, the "
        "answer is 409 with their ids",
        **_NODES,
    },
)
FORESEE: Final = Route(
    "POST",
    "/v1/explain",
    Explanation,
    _NODES,
    summary="What would happen to the pod in the body, a Pod object of 1 MiB at most. Nothing is "
    "assumed or remembered.",
)
USAGE: Final = Route(
    "GET",
    "/v1/usage",
    Usage,
    {
        "since": "period in seconds, 3600 to 2678400, default 86400, from whole hours on",
        **_NAMESPACE,
    },
)
SIZE: Final = Route(
    "POST",
    "/v1/size",
    Size,
    {"owner": "kind and name of the owner, such as `Deployment chat`"},
    summary="GPU memory that pods similar to the Pod object in the body were measured to use.",
)
REGRET: Final = Route(
    "GET", "/v1/regret", Regret, {**_NAMESPACE, "limit": "placements, 1 to 1000, default 50"}
)
ADVICE: Final = Route(
    "GET",
    "/v1/advice",
    Advice,
    {
        "node": "only cards and pods of this node",
        **_NAMESPACE,
        "over": "period in seconds, 900 to 2592000, default 3600",
        "all": "`true`: also cards whose advice is `keep`",
        "limit": "cards, pods, and nodes with stranded GPUs, 1 to 1000, default 200",
    },
)
SESSION: Final = Route("GET", "/v1/session", Session)
LOGIN: Final = Route(
    "POST",
    "/v1/session",
    Answer,
    is_open=True,
    summary="Log in with a browser ([api.md](api.md#in-a-browser)).",
)
LOGOUT: Final = Route("DELETE", "/v1/session", Answer, is_open=True, summary="Log out.")
HEALTHZ: Final = Route("GET", "/healthz", Answer, is_open=True, summary="Whether it runs.")
READYZ: Final = Route("GET", "/readyz", Readiness, is_open=True)
METRICS: Final = Route(
    "GET",
    "/metrics",
    Answer,
    is_open=True,
    summary="Prometheus metrics ([metrics.md](metrics.md)).",
)

ROUTES: Final = (
    NODES, NODE, GPUS, BEST, DEFRAG, DECISIONS, DECISION, UNASKED, PENDING, PODS, HOLDERS, COSTS,
    EXPLAIN, FORESEE, USAGE, SIZE, REGRET, ADVICE, SESSION, LOGIN, LOGOUT, HEALTHZ, READYZ, METRICS,
)  # fmt: skip
"""All routes, in the order of the documentation."""
