"""The JSON API's routes for clients, each with its parameters and its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from extender.answers.advice import Advice
from extender.answers.answer import Answer, Readiness, Session
from extender.answers.decisions import Best, DecisionAnswer, Decisions, Regret
from extender.answers.fleet import Defrag, Gpus, NodeAnswer, Nodes
from extender.answers.holding import Costs, HoldersAnswer, Size, Usage
from extender.answers.pods import BypassedAnswer, Explanation, PendingAnswer, Pods

_Kind = TypeVar("_Kind", bound=Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """Integer query parameter.

    Attributes:
        meaning: what the number is, with its unit.
        default: value if the parameter is absent.
        low: smallest value that is allowed.
        high: largest value that is allowed.
    """

    meaning: str
    default: int
    low: int = 1
    high: int


@dataclass(frozen=True, slots=True)
class Route(Generic[_Kind]):
    """A route of the API.

    Attributes:
        method: HTTP method.
        path: path; `{name}` stands for a path parameter.
        answer: type of the answer; `Answer` for a route that answers no JSON.
        parameters: query parameters by name; the value of a text parameter is its meaning.
        is_open: whether it answers callers without a token even if the API requires one.
        summary: description of the route, "" to use the docstring of its answer.
    """

    method: str
    path: str
    answer: type[_Kind]
    parameters: Mapping[str, str | Number] = field(default_factory=dict)
    is_open: bool = False
    summary: str = ""

    def number(self, name: str) -> Number:
        """Return an integer parameter.

        Raises:
            TypeError: the parameter is not an integer.
        """
        match self.parameters[name]:
            case Number() as number:
                return number
            case _:
                raise TypeError(f"{name} of {self.path} is not a number")


_NAMESPACE: Final = {"namespace": "only pods of this namespace"}
_GPUS: Final = Number(meaning="GPUs that the pod requests", default=1, high=1024)
_MONTH_SECONDS: Final = 30 * 86_400
_RESOURCE: Final = "GPU resource; by default the first one of the setting"
_SOME: Final = {"some": "`true`: also pods that use some of their GPUs"}
_NODES: Final[Mapping[str, str | Number]] = {
    "limit": Number(meaning="nodes in `others`", default=100, low=0, high=10_000),
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
        "gpus": _GPUS,
        "resource": _RESOURCE,
        "memory": "memory that it needs of each GPU, such as `20Gi`",
        "model": "models that it prefers, such as `H100,A100`",
        "strategy": "as `idlegpu.io/strategy`",
        "require_idle": "as `idlegpu.io/require-idle`",
        "max_utilization": "as `idlegpu.io/max-utilization`",
        "max_memory": "as `idlegpu.io/max-memory`",
        "limit": Number(meaning="nodes in `best`", default=20, high=1000),
    },
)
DEFRAG: Final = Route(
    "GET",
    "/v1/defrag",
    Defrag,
    {
        "gpus": Number(meaning="GPUs that must be free on one node", default=1, high=1024),
        "resource": _RESOURCE,
        "limit": Number(meaning="nodes in each list", default=5, high=50),
    },
)
DECISIONS: Final = Route(
    "GET",
    "/v1/decisions",
    Decisions,
    {
        "pod": "`namespace/name`, name or UID",
        "brief": "`true`: without `explained` and `nodes`",
        "limit": Number(meaning="decisions", default=1000, high=1000),
    },
)
DECISION: Final = Route("GET", "/v1/decisions/{id}", DecisionAnswer)
BYPASSED: Final = Route("GET", "/v1/bypassed", BypassedAnswer)
PENDING: Final = Route(
    "GET",
    "/v1/pending",
    PendingAnswer,
    {**_NAMESPACE, "limit": Number(meaning="pods", default=200, high=1000)},
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
        "limit": Number(meaning="pods", default=100, high=500),
        "offset": Number(meaning="pods to skip", default=0, low=0, high=1_000_000),
    },
)


def _idle_for(default: int) -> Number:
    meaning = "shortest idle time in seconds; 0 means every holder"
    return Number(meaning=meaning, default=default, low=0, high=_MONTH_SECONDS)


HOLDERS: Final = Route(
    "GET",
    "/v1/holders",
    HoldersAnswer,
    {
        "idle_for": _idle_for(3600),
        **_SOME,
        **_NAMESPACE,
        "limit": Number(meaning="pods", default=200, high=1000),
    },
)
COSTS: Final = Route(
    "GET",
    "/v1/costs",
    Costs,
    {
        "by": "`pod`, `owner` (the default) or `namespace`",
        "idle_for": _idle_for(0),
        **_SOME,
        **_NAMESPACE,
        "limit": Number(meaning="groups", default=200, high=1000),
    },
)
EXPLAIN: Final = Route(
    "GET",
    "/v1/explain",
    Explanation,
    {
        "pod": "`namespace/name`, a unique name, or a UID",
        "id": "instead of `pod`, the id of a decision, such as `7f3a-812`",
        "number": Number(
            meaning="instead of `pod`, the number of a decision; if several replicas have it, the "
            "answer is 409 with their ids",
            default=0,
            high=10**9,
        ),
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
        "since": Number(
            meaning="period in seconds; it begins at a whole hour",
            default=86_400,
            low=3600,
            high=31 * 86_400,
        ),
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
    "GET",
    "/v1/regret",
    Regret,
    {**_NAMESPACE, "limit": Number(meaning="placements", default=50, high=1000)},
)
ADVICE: Final = Route(
    "GET",
    "/v1/advice",
    Advice,
    {
        "node": "only cards and pods of this node",
        **_NAMESPACE,
        "over": Number(meaning="period in seconds", default=3600, low=900, high=_MONTH_SECONDS),
        "all": "`true`: also cards whose advice is `keep`",
        "limit": Number(
            meaning="cards, pods, and nodes with stranded GPUs", default=200, high=1000
        ),
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
    NODES, NODE, GPUS, BEST, DEFRAG, DECISIONS, DECISION, BYPASSED, PENDING, PODS, HOLDERS, COSTS,
    EXPLAIN, FORESEE, USAGE, SIZE, REGRET, ADVICE, SESSION, LOGIN, LOGOUT, HEALTHZ, READYZ, METRICS,
)  # fmt: skip
"""All routes, in the order of the documentation."""
