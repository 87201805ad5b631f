"""Filter nodes: find the first reason to reject each node."""

from enum import IntEnum, StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.decision.assessment import Assessment, DeviceRequests
from extender.core.decision.device_sets import is_misaligned
from extender.core.nodes.snapshot import Batch, Flags, Rows

Codes = npt.NDArray[np.uint8]

SIGNATURE = " (idlegpu)"
"""End of each reason in a webhook's answer: kube-scheduler's events name no extender."""


class Rejection(StrEnum):
    """Reason to reject a node: a constant text, worded to follow a count of nodes."""

    UNHEALTHY = "node(s) had too few working GPUs"
    FOREIGN_USE = "node(s) had GPUs in use by processes outside Kubernetes"
    GPU_TOO_SMALL = "node(s) had GPUs with less memory than the pod requests"
    NO_MEMORY = "node(s) had too little free GPU memory"
    NOT_IDLE = "node(s) had too few GPUs known to be idle"
    BUSY = "node(s) had busier GPUs than other nodes"
    RECONFIGURING = "node(s) had GPUs that are being reconfigured"
    WRONG_MODEL = "node(s) had GPUs of other models than the pod requires"
    NOT_TARGET = "node(s) were not named in the pod's idlegpu.io/target"
    DEARER = "node(s) had more expensive GPUs than other suitable nodes"
    MISALIGNED = "node(s) had too few free GPUs on one NUMA node for their kubelet's policy"
    GROUP_TOO_LARGE = "node(s) could not hold the pod's whole group, even without other pods"

    @property
    def is_resolvable(self) -> bool:
        """Whether preemption could help: evicting pods frees only their memory.

        kube-scheduler counts GPUs without their NUMA nodes, so it would evict no pod for these.
        """
        return self is Rejection.NO_MEMORY


class Code(IntEnum):
    """A rejection as a number, for columns; 0 means that the node passes."""

    PASSES = 0
    UNHEALTHY = 1
    FOREIGN_USE = 2
    GPU_TOO_SMALL = 3
    NO_MEMORY = 4
    NOT_IDLE = 5
    BUSY = 6
    RECONFIGURING = 7
    WRONG_MODEL = 8
    NOT_TARGET = 9
    DEARER = 10
    MISALIGNED = 11
    GROUP_TOO_LARGE = 12

    @property
    def rejection(self) -> Rejection | None:
        """The rejection of the code, None if the node passes."""
        return None if self is Code.PASSES else Rejection[self.name]

    @property
    def text(self) -> str:
        """The rejection's text, "" if the node passes."""
        return "" if self is Code.PASSES else Rejection[self.name].value


RELATIVE_CODES: Final = (Code.BUSY, Code.NOT_TARGET, Code.DEARER, Code.GROUP_TOO_LARGE)
"""Rejections that depend on the other candidates."""


def reject(
    batch: Batch,
    requested: DeviceRequests,
    assessment: Assessment,
    *,
    requires_idle: Flags,
    is_wrong_model: Flags,
) -> Codes:
    """Return the first rejection of each node, `Code.PASSES` without one.

    Load alone rejects a node only if the pod requires idle devices.
    """
    needed = assessment.landing.needed
    too_small = assessment.full_bytes < assessment.requested_bytes
    foreign = _uncounted_foreign(batch, assessment)
    checks = (
        (Code.WRONG_MODEL, is_wrong_model),
        (Code.RECONFIGURING, batch.is_reconfiguring),
        (Code.UNHEALTHY, assessment.working < needed),
        (Code.MISALIGNED, is_misaligned(batch, requested, assessment)),
        (Code.GPU_TOO_SMALL, (assessment.works & ~too_small).sum(axis=1) < needed),
        (Code.FOREIGN_USE, assessment.is_clean.sum(axis=1) - foreign < needed),
        (Code.NO_MEMORY, _lacks_room(batch, requested, assessment)),
        (Code.NOT_IDLE, ~assessment.is_sure & requires_idle),
    )
    codes = np.zeros(len(batch), dtype=np.uint8)
    for code, is_refused in reversed(checks):
        codes[is_refused] = code
    return codes


def _fitting_needed(batch: Batch, requested: DeviceRequests, assessment: Assessment) -> Rows:
    """Return the number of landing devices that must have enough memory.

    Shared devices: one per share. Whole devices: if our count leaves fewer free than the pod
    requests, some are being released, and their memory with them.
    """
    devices = np.minimum(requested.count, batch.present.sum(axis=1))
    whole = np.maximum(devices - _given_back(batch, requested), 0)
    needed: Rows = np.where(batch.is_shared, np.maximum(assessment.landing.needed, 1), whole)
    return needed


def _given_back(batch: Batch, requested: DeviceRequests) -> Rows:
    """Return the number of devices or replicas that pods released and the extender still counts."""
    given_back: Rows = np.maximum(
        requested.count - np.maximum(batch.allocatable - batch.held, 0), 0
    )
    return given_back


def _lacks_room(batch: Batch, requested: DeviceRequests, assessment: Assessment) -> Flags:
    """Return per node whether too few landing devices have the memory that the pod requests.

    If shares of a device are being released, memory that is only estimated may belong to them and
    is ignored. Declared memory still counts, because it is unknown which pod leaves.
    """
    lacks: Flags = assessment.fits.sum(axis=1) < _fitting_needed(batch, requested, assessment)
    at = np.flatnonzero(lacks & batch.is_shared)
    if at.size:
        at = at[_given_back(batch, requested)[at] > 0]
        needed_bytes = np.broadcast_to(assessment.requested_bytes, (len(batch), 1))[at]
        room = assessment.declared_room_bytes[at]
        lacks[at] = ~(assessment.is_clean[at] & (room >= needed_bytes)).any(axis=1)
    return lacks


def _uncounted_foreign(batch: Batch, assessment: Assessment) -> Rows:
    """Return per node the number of landing devices in foreign use that no flag marks.

    Without known device holders, more devices in use than pods hold still prove foreign use.
    """
    landing = assessment.landing
    in_use = (landing.devices & batch.telemetry.is_in_use).sum(axis=1)
    beyond = np.maximum(in_use - landing.taken, 0)
    # Each of them reduces the number of devices left for pods.
    spare = np.maximum(landing.size - landing.taken, 0)
    left = assessment.is_clean.sum(axis=1) - (spare - beyond)
    is_unclear = ~batch.is_agreed & ~batch.is_shared & (beyond > 0)
    return np.where(is_unclear, left, 0)
