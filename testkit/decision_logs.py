"""Write decisions to a decision log and read them again."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

from extender.core.decision.decision import decide
from extender.core.decision.evaluation import Overlay
from extender.core.nodes.snapshot import Snapshot
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from extender.insight.decision_log.lines import LineWriter
from extender.insight.decision_log.reader import Logged, LoggedDecision, read_lines
from extender.placement.history import DecisionRecord
from extender.placement.placer import Weighed
from extender.placement.request_log import FILTER
from testkit.builders import GPU, NOW, pod_ref
from testkit.world import World


def weighed(
    snapshot: Snapshot,
    request: GpuRequest,
    *,
    policy: Policy,
    overlay: Overlay | None = None,
    candidates: Sequence[str] | None = None,
    name: str = "pod",
) -> Weighed:
    """Decide for a pod; return the decision with its inputs."""
    overlays = {GPU: overlay} if overlay else {}
    requested = tuple(snapshot.nodes) if candidates is None else candidates
    return Weighed(
        pod=pod_ref(name),
        request=request,
        decision=decide(snapshot, request, requested, policy, overlays=overlays),
        snapshot=snapshot,
        policy=policy,
        overlays=overlays,
        seconds=0.001,
    )


def record_of(
    made: Weighed, number: int = 1, *, verb: str = FILTER, at: float = NOW
) -> DecisionRecord:
    """Return the record of a decision."""
    return DecisionRecord(
        number=number,
        at=at,
        verb=verb,
        pod=made.pod,
        request=made.request,
        decision=made.decision,
        snapshot_version=made.snapshot.version,
        seconds=made.seconds,
    )


def written(decisions: Iterable[Weighed]) -> bytes:
    """Return the decision log of the given decisions."""
    writer = LineWriter()
    return b"".join(
        line
        for number, made in enumerate(decisions, 1)
        for line in writer.decision(record_of(made, number), made)
    )


def read(log: bytes) -> list[Logged]:
    """Return the contents of a log."""
    return list(read_lines(BytesIO(log), "log"))


def decisions_in(log: bytes) -> list[LoggedDecision]:
    """Return the decisions in a log."""
    return [line for line in read(log) if isinstance(line, LoggedDecision)]


class LoggedWorld:
    """Small cluster whose decisions are all logged in one file."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lines: list[bytes] = []
        self.writer = LineWriter()
        world.placer.decided.subscribe(self._note)

    def _note(self, record: DecisionRecord, made: Weighed) -> None:
        self.lines += self.writer.decision(record, made)

    def bind(self, name: str, node: str, **how: Any) -> None:
        """Bind a pod, and log the binding."""
        record = self.world.bind(name, node, **how)
        self.lines += self.writer.bound(record.uid, node, self.world.clock.now)

    @property
    def log(self) -> bytes:
        """Content of the log so far."""
        return b"".join(self.lines)
