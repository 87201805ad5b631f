"""Meaning of each XID, NVIDIA's number of a fault: the built-in table, or a setting."""

from collections.abc import Mapping
from types import MappingProxyType

from extender.core.policy import Health, HealthAction

IGNORE, PENALTY = HealthAction.IGNORE, HealthAction.PENALTY
EXCLUDE, EXCLUDE_NODE = HealthAction.EXCLUDE, HealthAction.EXCLUDE_NODE
EXCLUDE_MULTI_GPU = HealthAction.EXCLUDE_MULTI_GPU

_XID_GROUPS: tuple[tuple[HealthAction, tuple[int, ...]], ...] = (
    # The application's fault, or information only.
    (IGNORE, (0, 8, 11, 13, 14, 25, 31, 32, 37, 38, 39, 40, 41, 43, 44, 45, 60, 66, 67, 68)),
    (IGNORE, (*range(69, 73), *range(75, 78), 80, *range(82, 87), 88, 89, 93)),
    (IGNORE, (*range(96, 109), 121, *range(126, 136), 137, 139, 141, 152, 153, 157, 160, 161)),
    # Memory rows remapped, many corrected errors, a contained error; reduced capacity.
    (PENALTY, (63, 92, 94, 168)),
    # Double-bit errors, GSP faults, uncontained errors: nothing works until a reset.
    (EXCLUDE, (46, 48, 54, 62, 64, 78, 95, 109, 110, 119, 120, 136, 140, 142, 143)),
    (EXCLUDE, (151, 154, 155, 156, 158, 167, 171, 172)),
    # NVLink: a single GPU still works.
    (EXCLUDE_MULTI_GPU, (74, *range(144, 151))),
    # Fallen off the bus: the machine needs a restart.
    (EXCLUDE_NODE, (79,)),
)

_DEFAULT_XID_ACTIONS: Mapping[int, HealthAction] = MappingProxyType(
    {xid: action for action, xids in _XID_GROUPS for xid in xids}
)
"""Default action by XID. Source: NVIDIA's XID catalog and the rules that device plugins share."""

SEVERITY: Mapping[HealthAction, int] = MappingProxyType(
    {IGNORE: 0, PENALTY: 1, EXCLUDE_MULTI_GPU: 2, EXCLUDE: 3, EXCLUDE_NODE: 4}
)
"""Rank of each action: the cause with the most severe action is reported."""

RECOVERY_CHANGED = 154
"""XID of a changed recovery action; it carries no other information."""


def xid_action(health: Health, xid: int) -> HealthAction:
    """Return the action for an XID: from the settings, the default table, or `unknown_xid`.

    Example:
        >>> xid_action(Health(), 79)
        <HealthAction.EXCLUDE_NODE: 'exclude-node'>
    """
    return health.xid.get(xid, _DEFAULT_XID_ACTIONS.get(xid, health.unknown_xid))


def is_of_recovery(health: Health, xid: int) -> bool:
    """Return whether an XID only repeats the recovery action and has no configured action."""
    return xid == RECOVERY_CHANGED and xid not in health.xid
