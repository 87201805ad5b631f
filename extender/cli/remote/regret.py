"""The answer of the JSON API that tells how placements turned out, typed."""

from extender.cli.remote.answers import Answer


class RegretMeans(Answer):
    """Means over placements of which the activity on our first choice is known, too."""

    placements: int
    got_ratio: float | None
    choice_ratio: float | None
    best_ratio: float | None
    got_then_ratio: float | None
    choice_then_ratio: float | None


class TurnedOut(Answer):
    """How one placement turned out: activity since, and when it was decided (`then`)."""

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
    """How placements turned out, the newest first; replicas that did not answer are named."""

    after_seconds: float
    watched: int
    left_out: int
    total: int
    all: RegretMeans
    followed: RegretMeans
    not_followed: RegretMeans
    placements: list[TurnedOut]
    unreachable: list[str] = []  # noqa: RUF012 - msgspec makes a new one each time
