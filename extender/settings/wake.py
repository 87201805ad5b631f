"""The settings of waking waiting pods."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from extender.settings.section import AnyCase, Section


class WakeTarget(StrEnum):
    """What is changed so that kube-scheduler looks at refused pods again."""

    OBJECT = "object"
    """One CSIStorageCapacity object of ours: nobody else looks at it."""
    NODE = "node"
    """The node that would do: needs the right to patch nodes."""


class Wake(Section):
    """How kube-scheduler is made to look again at pods that we refused."""

    enabled: bool = Field(
        default=True,
        description="wake pods that we refused once a node would do for them; without it they wait "
        "for any change in the cluster, or five minutes",
    )
    target: Annotated[WakeTarget, AnyCase] = Field(
        default=WakeTarget.OBJECT,
        description="where the annotation idlegpu.io/state is changed: on a CSIStorageCapacity "
        "object of ours, or on the node",
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
    retries_per_second: float = Field(
        default=50.0,
        ge=0.1,
        le=10_000,
        description="a wake has kube-scheduler try every waiting pod: with many of them wakes are "
        "so rare that it tries no more than this, on average",
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
        description="a replica that dies is replaced as the one that wakes after so long",
    )
