"""Build outcomes of placements, as the regret watch computes them."""

from extender.core.request.request import PodRef
from extender.insight.regret_watch import PlacementOutcome


def outcome(name: str, *, got: float, choice: float | None, followed: bool) -> PlacementOutcome:
    return PlacementOutcome(
        pod=PodRef(uid=f"uid-{name}", namespace="team", name=name),
        bound_at=1_800_000_000.0,
        decided_at=1_799_999_999.0,
        seconds=3600.0,
        node="node-1",
        choice="node-1" if followed else "node-2",
        is_shadow=not followed,
        is_known=followed,
        gpus=2,
        got=got,
        choice_since=choice,
        best_since=0.05,
        best="node-3",
        got_then=0.1,
        choice_then=None,
    )


OUTCOMES = (
    outcome("first", got=0.5, choice=0.2, followed=False),
    outcome("second", got=0.1, choice=0.1, followed=True),
    outcome("third", got=0.9, choice=None, followed=False),
)
