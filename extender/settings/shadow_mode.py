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
    "active: answers filter and score nodes. shadow: decisions are made and recorded, but every "
    "candidate passes without a score, so that kube-scheduler places pods as without the extender"
)


class DecisionLog(Section):
    """Settings of the decision log, which `idlegpu replay` reads."""

    path: str = Field(
        default="",
        description="file that gets one line of JSON for each decision and each state of the "
        "fleet; -: standard output; empty: no log",
    )
    max_size: Annotated[Quantity, Field(ge=MIB, le=TIB)] = Field(
        default=256 * MIB,
        description="size at which the file is renamed to PATH.1 and a new one is started; "
        "standard output has no limit",
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
        description="largest number of pods that are watched after their binding, and of results "
        "that are kept; 0: none",
    )
    after_seconds: float = Field(
        default=3600.0,
        ge=60,
        le=86_400,
        description="time after a pod's binding at which its GPUs are compared with those of the "
        "first choice, and with the best node in hindsight",
    )
