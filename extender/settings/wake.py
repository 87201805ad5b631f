"""Settings of waking pending pods."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from extender.settings.section import AnyCase, Section, Unit


class WakeTarget(StrEnum):
    """Object that is changed so that kube-scheduler tries rejected pods again."""

    OBJECT = "object"
    """Our own CSIStorageCapacity object, which no other component reads."""
    NODE = "node"
    """A node with room for the pod; needs the right to patch nodes."""
    POD = "pod"
    """The pod to wake, and no other; needs the right to patch pods."""


class Wake(Section):
    """Settings of waking: kube-scheduler tries pods again that the extender rejected."""

    enabled: bool = Field(
        default=True,
        description="wake rejected pods once a node has room for them; false: they wait for "
        "another change in the cluster, or for five minutes",
    )
    target: Annotated[WakeTarget, AnyCase] = Field(
        default=WakeTarget.OBJECT,
        description="object that is changed to wake pods. object: our CSIStorageCapacity object; "
        "node: a node; both make kube-scheduler try all pods that the extender rejected. pod: "
        "each pod that has room; wakes only that pod, and removes its gate idlegpu.io/room",
    )
    namespace: str = Field(
        default="",
        pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$",
        description="namespace of the CSIStorageCapacity object and of the Lease; empty: the "
        "pod's own, or idlegpu if a kubeconfig is set",
    )
    retry_share: Annotated[float, Unit("ratio")] = Field(
        default=0.25,
        ge=0.01,
        le=1,
        description="largest share of kube-scheduler's time that retries of woken pods may take, "
        "as measured; other pods wait during these retries",
    )
