"""Fleets for tests: by default one healthy, idle node."""

from dataclasses import dataclass, field

from simulation.devices import PodRef
from simulation.fleet import SimulatedFleet
from simulation.models import H100, GpuModel
from simulation.nodes import EXPORTER_4_5, ExporterBuild, NodeSpec, Sharing

NOW = 1_800_000_000.0


@dataclass
class Clock:
    """Clock that a test sets."""

    now: float = field(default=NOW)

    def __call__(self) -> float:
        return self.now


def spec(
    name: str = "node-a",
    *,
    model: GpuModel = H100,
    cards: int = 2,
    replicas: int = 1,
    mig: tuple[tuple[str, ...], ...] = (),
    exporter: ExporterBuild = EXPORTER_4_5,
) -> NodeSpec:
    """Build a node's configuration; with replicas it is time-sliced, and node-a is 10.0.0.97."""
    return NodeSpec(
        name=name,
        model=model,
        cards=cards,
        sharing=Sharing.TIME_SLICING if replicas > 1 else Sharing.NONE,
        replicas=replicas,
        mig=mig,
        address=f"10.0.0.{ord(name[-1])}",
        exporter=exporter,
    )


def fleet(*specs: NodeSpec, clock: Clock | None = None) -> SimulatedFleet:
    """Build a fleet of these nodes, or of one."""
    built = SimulatedFleet(clock=clock or Clock())
    for node in specs or (spec(),):
        built.add(node)
    return built


def pod(name: str = "pod-a") -> PodRef:
    return PodRef(namespace="team", name=name, uid=f"uid-{name}")
