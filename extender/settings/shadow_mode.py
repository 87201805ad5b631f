"""Settings of shadow mode, the decision log and the regret watch."""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from extender.settings.section import MIB, TIB, Quantity, Section

STDOUT: Final = "-"


class Mode(StrEnum):
    """Whether answers influence kube-scheduler."""

    ACTIVE = "active"
    """Answers filter and score nodes."""
    SHADOW = "shadow"
    """Decisions are made and recorded, but answers change nothing."""


MODE: Final = (
    "shadow: every candidate passes and none gets a score, so that kube-scheduler places pods as "
    "without the extender, while decisions are made and recorded; active: answers filter and "
    "score nodes"
)


class DecisionLog(Section):
    """Settings of the decision log, which `idlegpu replay` reads."""

    path: str = Field(
        default="",
        description="file that gets one line of JSON for each decision, and for the state of the "
        "fleet behind it; -: standard output; empty: none",
    )
    max_size: Annotated[Quantity, Field(ge=MIB, le=TIB)] = Field(
        default=256 * MIB,
        description="a file that would grow larger is renamed to PATH.1, and a new one is "
        "started; standard output has no limit",
    )
    files: int = Field(
        default=4,
        ge=1,
        le=100,
        description="number of renamed files that are kept",
    )


class RegretSettings(Section):
    """Settings of the regret watch, which compares placements with the load that followed."""

    pods: int = Field(
        default=1000,
        ge=0,
        le=100_000,
        description="most pods that are watched after their binding, and most results that are "
        "kept; 0: none",
    )
    after_seconds: float = Field(
        default=3600.0,
        ge=60,
        le=86_400,
        description="time after a pod's binding at which its GPUs are compared with those of the "
        "first choice and of the best node in hindsight",
    )
