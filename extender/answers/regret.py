"""Answer about the outcome of placements."""

from extender.answers.answer import Answer


class RegretMeans(Answer):
    """Mean activity over the placements for which `choice_ratio` is known; ratios from 0 to 1.

    Attributes:
        placements: number of placements.
        got_ratio: activity of the GPUs that the pods got.
        choice_ratio: activity of the GPUs of the first choice.
        best_ratio: activity of the GPUs of the node that turned out best.
        got_then_ratio: activity, at the decision, of the GPUs that the pods got.
        choice_then_ratio: activity, at the decision, of the GPUs of the first choice.
    """

    placements: int
    got_ratio: float | None
    choice_ratio: float | None
    best_ratio: float | None
    got_then_ratio: float | None
    choice_then_ratio: float | None


class OutcomeAnswer(Answer):
    """Outcome of one placement; ratios are mean activities from 0 to 1.

    Attributes:
        pod: the pod, as `namespace/name`.
        uid: its UID.
        bound_at: time of its binding.
        seconds: time for which it was watched.
        node: its node.
        choice: node of the first choice.
        best: node with the least active GPUs, among the 10 best of the decision and the pod's own
            node; no other node is watched.
        is_followed: whether the pod is on the first choice.
        is_shadow: whether the answer changed nothing, because of shadow mode.
        is_known: whether it is known which GPUs the pod got.
        gpus: number of its GPUs.
        got_ratio: activity of the GPUs that the pod got.
        choice_ratio: activity of the GPUs of the first choice.
        best_ratio: activity of the GPUs of `best`.
        got_then_ratio: `got_ratio` at the decision.
        choice_then_ratio: `choice_ratio` at the decision.
        regret_ratio: `got_ratio` minus `choice_ratio`.
        hindsight_ratio: `got_ratio` minus `best_ratio`.
    """

    pod: str
    uid: str | None
    bound_at: str
    seconds: float
    node: str
    choice: str | None
    best: str
    is_followed: bool
    is_shadow: bool
    is_known: bool
    gpus: int
    got_ratio: float
    choice_ratio: float | None
    best_ratio: float
    got_then_ratio: float | None
    choice_then_ratio: float | None
    regret_ratio: float | None
    hindsight_ratio: float


class Regret(Answer):
    """Outcomes of placements, newest first.

    [trusting.md](trusting.md#regret) explains the meaning and the limits of these values. The
    answer covers all replicas, at most the newest 10,000 placements of each. If two replicas
    decided about a pod, the later decision counts.

    Attributes:
        after_seconds: time after the binding at which a placement is compared.
        watched: pods that are being watched.
        left_out: pods that were not compared.
        total: number of placements, also of those beyond the limit.
        all: means over all placements.
        followed: means over the pods that are on the first choice.
        not_followed: means over the other pods.
        placements: the placements.
        unreachable: addresses of the replicas that did not answer.
    """

    after_seconds: float
    watched: int
    left_out: int
    total: int
    all: RegretMeans
    followed: RegretMeans
    not_followed: RegretMeans
    placements: list[OutcomeAnswer]
    unreachable: list[str] = []
