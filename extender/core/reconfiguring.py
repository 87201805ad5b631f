"""Which nodes have their GPUs, or their driver, changed under the pods that would come."""

from collections.abc import Mapping

MIG_STATE_LABEL = "nvidia.com/mig.config.state"
MIG_STATES_IN_CHANGE = frozenset({"pending", "rebooting"})
"""States of the MIG manager in which it takes the GPUs away from whoever comes."""

UPGRADE_STATE_LABEL = "nvidia.com/gpu-driver-upgrade-state"
UPGRADE_STATES_AT_REST = frozenset({"", "upgrade-done", "upgrade-required", "uncordon-required"})
"""States of the GPU operator's driver upgrade in which the driver works and stays. A node with
`upgrade-required` only queues, and in a large cluster most do so for hours; one with
`uncordon-required` has its new driver, and is cordoned for as long as that takes."""


def is_reconfiguring(labels: Mapping[str, str]) -> bool:
    """Tell whether the node's operator is changing its GPUs or their driver.

    Example:
        >>> is_reconfiguring({"nvidia.com/mig.config.state": "pending"})
        True
    """
    return (
        labels.get(MIG_STATE_LABEL) in MIG_STATES_IN_CHANGE
        or labels.get(UPGRADE_STATE_LABEL, "") not in UPGRADE_STATES_AT_REST
    )
