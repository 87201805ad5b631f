"""Types of the answer about the outcome of placements."""

from extender.cli.remote.answers import Answer


class RegretMeans(Answer):
    """Means over the placements for which the activity on our first choice is also known."""

    placements: int
    got_ratio: float | None
    choice_ratio: float | None
    best_ratio: float | None
    got_then_ratio: float | None
    choice_then_ratio: float | None


class PlacementOutcome(Answer):
    """Outcome of one placement: activity since then, and at the decision (`then`)."""

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
    """Outcomes of placements, newest first, and replicas that did not answer."""

    after_seconds: float
    watched: int
    left_out: int
    total: int
    all: RegretMeans
    followed: RegretMeans
    not_followed: RegretMeans
    placements: list[PlacementOutcome]
    unreachable: list[str] = []  # noqa: RUF012 - msgspec makes a new one each time
