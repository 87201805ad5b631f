"""The settings of waking waiting pods."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from extender.settings.section import AnyCase, Section, Unit


class WakeTarget(StrEnum):
    """What is changed so that kube-scheduler looks at refused pods again."""

    OBJECT = "object"
    """One CSIStorageCapacity object of ours: nobody else looks at it."""
    NODE = "node"
    """The node that would do: needs the right to patch nodes."""
    POD = "pod"
    """The pod that there is room for, and no other: needs the right to patch pods."""


class Wake(Section):
    """How kube-scheduler is made to look again at pods that we refused."""

    enabled: bool = Field(
        default=True,
        description="wake pods that we refused once a node would do for them; without it they wait "
        "for any change in the cluster, or five minutes",
    )
    target: Annotated[WakeTarget, AnyCase] = Field(
        default=WakeTarget.OBJECT,
        description="what is changed: an annotation of a CSIStorageCapacity object of ours, or of "
        "the node, which has kube-scheduler try all pods that we refused; or each pod that there "
        "is room for, which wakes that one alone and takes the gate idlegpu.io/room from it",
    )
    namespace: str = Field(
        default="",
        pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$",
        description="namespace of that object and of the Lease; empty: the pod's own, or idlegpu "
        "where a kubeconfig is set",
    )
    check_seconds: float = Field(
        default=0.5, ge=0.1, le=60, description="time between two looks at the waiting pods"
    )
    confirmations: int = Field(
        default=2,
        ge=1,
        le=100,
        description="so many looks in a row must find a node for a pod before it is woken",
    )
    min_interval_seconds: float = Field(
        default=2.0, ge=0.1, le=3600, description="least time between two wakes ..."
    )
    max_interval_seconds: float = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="... doubled up to this while wakes help no pod",
    )
    retry_share: Annotated[float, Unit("ratio")] = Field(
        default=0.25,
        ge=0.01,
        le=1,
        description="a wake of all waiting pods keeps kube-scheduler busy while it tries them, "
        "and other pods wait behind them: wakes are so rare that this takes at most such a share "
        "of its time, as measured",
    )
    repeat_seconds: float = Field(
        default=10.0,
        ge=0.1,
        le=3600,
        description="a pod that a wake did not help is not woken for the same nodes again for so "
        "long, doubled each time up to five minutes",
    )
    lease_seconds: float = Field(
        default=15.0,
        ge=5,
        le=600,
        description="after this time another replica takes over from one that died as the one "
        "that wakes pods",
    )
