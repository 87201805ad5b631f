"""Detect nodes whose GPUs or driver are being changed by an operator."""

from collections.abc import Mapping

_MIG_STATE_LABEL = "nvidia.com/mig.config.state"
_MIG_STATES_IN_CHANGE = frozenset({"pending", "rebooting"})
"""States in which the MIG manager takes GPUs away from new pods."""

_UPGRADE_STATE_LABEL = "nvidia.com/gpu-driver-upgrade-state"
_UPGRADE_STATES_AT_REST = frozenset({"", "upgrade-done", "upgrade-required", "uncordon-required"})
"""States of the GPU operator's driver upgrade in which the driver works and stays. A node with
`upgrade-required` only queues, in a large cluster for hours. A node with `uncordon-required` has
its new driver, and is cordoned until that state ends."""


def is_reconfiguring(labels: Mapping[str, str]) -> bool:
    """Return whether the node's operator is changing its GPUs or their driver.

    Example:
        >>> is_reconfiguring({"nvidia.com/mig.config.state": "pending"})
        True
    """
    return (
        labels.get(_MIG_STATE_LABEL) in _MIG_STATES_IN_CHANGE
        or labels.get(_UPGRADE_STATE_LABEL, "") not in _UPGRADE_STATES_AT_REST
    )
