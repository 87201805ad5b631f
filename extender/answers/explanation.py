"""Answer that explains a placement."""

from extender.answers.answer import Answer
from extender.answers.decisions import DecisionAnswer
from extender.answers.pending import ReasonCount, Waiting
from extender.answers.verdicts import RankedVerdict, VerdictAnswer


class ReasonNodes(ReasonCount):
    """Number of nodes with one reason, and some of them.

    Attributes:
        nodes: names of some of the nodes.
    """

    nodes: list[str] = []


class Other(Answer):
    """Candidate whose evaluation is not recorded in full.

    Attributes:
        node: name of the node.
        score: score from 0 to 1.
        rejection: null, because it passed.
    """

    node: str
    score: float
    rejection: str | None = None


class StoredAnswer(Answer):
    """Extent of a decision's record.

    Attributes:
        in_full: candidates that are recorded in full.
        in_short: number of candidates that are recorded with score and reason only.
        note: the same in words.
    """

    in_full: int
    in_short: int
    note: str


class NodeReport(Answer):
    """Record of the requested node.

    Attributes:
        node: name of the node.
        kept: `in-full` (the node is in `nodes`), `in-short` (rank and score, or the reason for its
            rejection), `no-candidate` (not a candidate) or `unknown` (no such node).
        rank: rank among the nodes that passed, from 1.
        score: score from 0 to 1.
        rejection: why it was refused; null if it passed.
        why: reason why no further detail is recorded.
        now: for `in-short`, its evaluation with current readings.
    """

    node: str
    kept: str
    rank: int | None = None
    score: float | None = None
    rejection: str | None = None
    why: str | None = None
    now: list[VerdictAnswer] = []


class ProblemAnswer(Answer):
    """An invalid annotation, variable or argument.

    Attributes:
        kind: `annotation`, `variable` or `argument`.
        annotation: its name.
        value: its value.
        allowed: values that are allowed.
        default_used: value that counts instead.
        message: the same in words.
    """

    kind: str
    annotation: str
    value: str
    allowed: str
    default_used: str
    message: str


class Explanation(Answer):
    """Reasons for a pod's placement or wait; or the prediction for a pod that does not exist.

    The status is 404 if no decision about the pod is remembered and there is no such GPU pod. Other
    replicas are queried for their decisions. A decision records at most `decisions.detailed_nodes`
    nodes in full. `others` and `rejected` refer to the filter call if any replica remembers it,
    because prioritize only sees the nodes that passed filter.

    Attributes:
        pod: the pod, as `namespace/name`.
        uid: its UID.
        is_hypothetical: whether the pod does not exist (POST).
        state: `bound`, `gone`, `placeable`, `unplaceable`, or the state of a waiting pod.
        bound_node: its node.
        is_followed: whether that is the first choice.
        pending: for a waiting pod, the reasons why it waits.
        decision: the latest decision about it.
        filter: the filter decision of the same attempt, of any replica.
        kept: extent of the decision's record.
        nodes: nodes that are recorded in full, best first, including the pod's own node. If few
            nodes pass, some rejected nodes follow, including those that filter rejected.
        others: the other candidates that passed, best first.
        others_left: number of those beyond the limit.
        rejected: the refused candidates by reason, with up to 20 names each, or up to `limit` if it
            is above 100.
        closed: POST only: nodes that kube-scheduler would not offer, as far as idlegpu knows:
            cordoned, not ready, excluded by the pod's `nodeSelector` or required node affinity,
            tainted without a toleration, or with too few free GPUs by the API's count, or too
            little CPU, memory or ephemeral storage left.
        problems: POST only: invalid annotations.
        not_checked: POST only: fields of the pod that only kube-scheduler evaluates: `affinity`
            except required node affinity, labels of node feature discovery, topology spread,
            volumes, quotas; `nodeSelector` and `affinity` as a whole if they name more than 100
            labels.
        requested_node: record of the requested node.
        gpus: indexes of the GPUs that the pod holds, if a source reports them.
    """

    pod: str
    uid: str | None
    is_hypothetical: bool
    state: str
    bound_node: str | None
    is_followed: bool | None
    pending: Waiting | None
    decision: DecisionAnswer | None
    filter: DecisionAnswer | None
    kept: StoredAnswer | None
    nodes: list[RankedVerdict]
    others: list[Other]
    others_left: int
    rejected: list[ReasonNodes]
    closed: list[ReasonNodes] = []
    problems: list[ProblemAnswer] = []
    not_checked: list[str] = []
    requested_node: NodeReport | None = None
    gpus: list[int] = []
