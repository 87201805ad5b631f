"""Judge from health telemetry whether a device can work, and which penalty it gets."""

from collections.abc import Callable, Mapping

import numpy as np

from extender.core.decision.health_causes import Sign, encode
from extender.core.devices.readings import Column, Signal
from extender.core.fast_numpy import known
from extender.core.nodes.snapshot import Flags, Ratios, Rows
from extender.core.policy import Health, HealthAction
from extender.core.xids import (
    EXCLUDE,
    EXCLUDE_MULTI_GPU,
    EXCLUDE_NODE,
    IGNORE,
    PENALTY,
    SEVERITY,
    is_of_recovery,
    xid_action,
)

# Values of DCGM's field 1523: reset, reboot, drain and reset, bus reset, system reboot.
_RECOVERY_RESETS = (1, 2, 4, 6, 7)
_RECOVERY_DRAIN_P2P = 3
_RECOVERY_IMEX = 5
_FABRIC_MANAGER_FAILED = (1, 4, 5, 6)
_FABRIC_MANAGER_STARTING = 2
_DCGM_WARN, _DCGM_FAIL = 10.0, 20.0
_FABRIC_UNHEALTHY, _FABRIC_LIMITED = 2.0, 3.0
_FEW_ROWS = 0.5
"""Share of the penalty for recently remapped memory rows, below the configured number."""


class HealthColumns:
    """Health verdicts, one row per device, filled action by action.

    Attributes:
        is_excluded: the device cannot work.
        is_excluded_multi: the device cannot work for a pod with several devices.
        is_node_excluded: no device of its node can work.
        penalty: share of its certainty that the device loses, 0 to 1.
        cause: cause of the most severe action, encoded by `core.decision.health_causes`; the first
            cause wins a tie.
    """

    def __init__(self, count: int, penalty: float) -> None:
        self.is_excluded = np.zeros(count, dtype=np.bool_)
        self.is_excluded_multi = np.zeros(count, dtype=np.bool_)
        self.is_node_excluded = np.zeros(count, dtype=np.bool_)
        self.penalty: Ratios = np.zeros(count)
        self.cause: Rows = np.zeros(count, dtype=np.intp)
        self._severity = np.zeros(count, dtype=np.int8)
        self._weight = penalty

    def apply(
        self,
        action: HealthAction,
        which: Flags,
        sign: Sign,
        values: Column | float = 0.0,
        share: float = 1.0,
    ) -> None:
        """Apply an action to the devices in `which`.

        Args:
            action: the action.
            which: flags of the devices.
            sign: sign of ill health that caused the action.
            values: value to encode with the sign, one for all devices or one per device.
            share: share of the penalty to apply, for a penalty action.
        """
        if action is IGNORE or not which.any():
            return
        if action in {EXCLUDE, EXCLUDE_NODE}:
            self.is_excluded |= which
            self.is_excluded_multi |= which
        if action is EXCLUDE_NODE:
            self.is_node_excluded |= which
        if action is EXCLUDE_MULTI_GPU:
            self.is_excluded_multi |= which
        if action in {PENALTY, EXCLUDE_MULTI_GPU}:
            weight = self._weight * share
            self.penalty = np.where(which, np.maximum(self.penalty, weight), self.penalty)
        is_graver = which & (self._severity < SEVERITY[action])
        at_these = values[is_graver] if isinstance(values, np.ndarray) else values
        self.cause[is_graver] = encode(sign, at_these)
        self._severity[is_graver] = SEVERITY[action]

    def exclude_siblings(self, node_row: Rows) -> None:
        """Exclude every device of a node if one of its devices excludes the node.

        Args:
            node_row: number of each device's node.
        """
        culprits = np.flatnonzero(self.is_node_excluded)
        if not culprits.size:
            return
        nodes, first = np.unique(node_row[culprits], return_index=True)
        culprit_of = np.full(int(node_row.max()) + 1, -1, dtype=np.intp)
        culprit_of[nodes] = culprits[first]
        culprit = culprit_of[node_row]
        self.apply(EXCLUDE, culprit >= 0, Sign.SIBLING, culprit.astype(np.float64))


def judge(
    columns: Mapping[Signal, Column],
    count: int,
    health: Health,
    xid_is_recent: Flags,
    is_suspect: Flags,
) -> HealthColumns:
    """Judge the health of each device; a missing value is never a sign of ill health.

    Telemetry reports the last XID for ever, so it counts only while recent. An XID that excludes
    also counts while another severe sign confirms it. The XID "recovery action changed" counts only
    if the recovery action itself is not reported.

    Args:
        columns: values by signal; NaN for a missing value.
        count: number of devices.
        health: the settings.
        xid_is_recent: whether the XID is recent enough to count by itself.
        is_suspect: whether evidence outside `columns` confirms an XID that excludes.
    """
    verdict = HealthColumns(count, health.penalty)

    def column(signal: Signal) -> Column:
        return columns.get(signal, np.full(count, np.nan))

    for action, which, sign, values in _signs(column, health):
        verdict.apply(action, which, sign, values)
    lately = column(Signal.ROWS_REMAPPED_LATELY)
    verdict.apply(PENALTY, lately > 0, Sign.ROWS_REMAPPED_LATELY, lately, _FEW_ROWS)
    agrees = (
        is_suspect
        | (column(Signal.ROW_REMAP_FAILURE) > 0)
        | np.isin(column(Signal.RECOVERY_ACTION), _RECOVERY_RESETS)
        | (column(Signal.HEALTH_STATUS) >= _DCGM_FAIL)
    )
    xids = column(Signal.XID)
    for xid in np.unique(xids[~np.isnan(xids)]):
        action = xid_action(health, int(xid))
        counts = xid_is_recent | agrees if SEVERITY[action] > SEVERITY[PENALTY] else xid_is_recent
        if is_of_recovery(health, int(xid)):
            counts &= np.isnan(column(Signal.RECOVERY_ACTION))
        verdict.apply(action, counts & (xids == xid), Sign.XID, float(xid))
    return verdict


_Rule = tuple[HealthAction, Flags, Sign, Column | float]


def _signs(column: Callable[[Signal], Column], health: Health) -> tuple[_Rule, ...]:
    """Return the rules for all signs except XIDs: action, affected devices, sign and values."""
    rows = column(Signal.UNCORRECTABLE_REMAPPED_ROWS)
    lately = column(Signal.ROWS_REMAPPED_LATELY)
    pages = known(column(Signal.RETIRED_PAGES_SINGLE_BIT))
    pages = pages + known(column(Signal.RETIRED_PAGES_DOUBLE_BIT))
    double_bit = column(Signal.ECC_DOUBLE_BIT_VOLATILE)
    recovery = column(Signal.RECOVERY_ACTION)
    fabric = column(Signal.FABRIC_MANAGER_STATUS)
    status = column(Signal.HEALTH_STATUS)
    is_failed = np.isin(fabric, _FABRIC_MANAGER_FAILED)
    is_starting = fabric == _FABRIC_MANAGER_STARTING
    needs_reset = np.isin(recovery, _RECOVERY_RESETS)
    is_warned = (status >= _DCGM_WARN) & (status < _DCGM_FAIL)
    remap_failed = column(Signal.ROW_REMAP_FAILURE) > 0
    remap_pending = column(Signal.ROW_REMAP_PENDING) > 0
    page_pending = column(Signal.RETIRED_PAGES_PENDING) > 0
    return (
        (health.row_remap_failure, remap_failed, Sign.ROW_REMAP_FAILURE, 0.0),
        (health.double_bit_error, double_bit > 0, Sign.DOUBLE_BIT_ERRORS, double_bit),
        (health.worn_memory, rows >= health.remapped_rows_limit, Sign.REMAPPED_ROWS, rows),
        (PENALTY, lately >= health.remapped_rows_per_day, Sign.ROWS_REMAPPED_LATELY, lately),
        (health.worn_memory, pages >= health.retired_pages_limit, Sign.RETIRED_PAGES, pages),
        (PENALTY, pages >= health.retired_pages_warn, Sign.RETIRED_PAGES, pages),
        (health.fabric_manager_failed, is_failed, Sign.FABRIC_MANAGER, fabric),
        (health.fabric_manager_starting, is_starting, Sign.FABRIC_MANAGER, fabric),
        (health.recovery_reset, needs_reset, Sign.RECOVERY_ACTION, recovery),
        (
            health.recovery_drain_p2p,
            recovery == _RECOVERY_DRAIN_P2P,
            Sign.RECOVERY_ACTION,
            recovery,
        ),
        (health.recovery_imex, recovery == _RECOVERY_IMEX, Sign.RECOVERY_ACTION, recovery),
        (health.row_remap_pending, remap_pending, Sign.ROW_REMAP_PENDING, 0.0),
        (health.retired_pages_pending, page_pending, Sign.RETIRED_PAGES_PENDING, 0.0),
        (health.dcgm_fail, status >= _DCGM_FAIL, Sign.DCGM_HEALTH, _DCGM_FAIL),
        (health.dcgm_warn, is_warned, Sign.DCGM_HEALTH, _DCGM_WARN),
        *_signs_of_nvml(column, health),
        *_signs_of_links(column, health),
    )


def _signs_of_nvml(column: Callable[[Signal], Column], health: Health) -> tuple[_Rule, ...]:
    """Return the rules for signs that only the node agent reports."""
    summary = column(Signal.FABRIC_HEALTH)
    links = column(Signal.NVLINKS_DOWN)
    celsius = column(Signal.TEMPERATURE)
    too_hot = celsius >= column(Signal.TEMPERATURE_SHUTDOWN)
    sram = column(Signal.SRAM_THRESHOLD_EXCEEDED) > 0
    inforom = column(Signal.INFOROM_CORRUPTED) > 0
    return (
        (health.sram_errors, sram, Sign.SRAM_ERRORS, 0.0),
        (health.fabric_unhealthy, summary == _FABRIC_UNHEALTHY, Sign.FABRIC_HEALTH, summary),
        (health.fabric_limited, summary == _FABRIC_LIMITED, Sign.FABRIC_HEALTH, summary),
        (health.nvlink_down, links > 0, Sign.NVLINKS_DOWN, links),
        (health.inforom_corrupted, inforom, Sign.INFOROM_CORRUPTED, 0.0),
        (health.shutdown_temperature, too_hot, Sign.SHUTDOWN_TEMPERATURE, celsius),
    )


def _signs_of_links(column: Callable[[Signal], Column], health: Health) -> tuple[_Rule, ...]:
    """Return the rules for packet loss on links, by rate of errors rather than their total."""
    pcie = column(Signal.PCIE_REPLAY_RATE) * 60.0
    again = column(Signal.NVLINK_REPLAY_RATE) * 60.0
    recovers = column(Signal.NVLINK_RECOVERY_RATE) > 0
    crc = column(Signal.NVLINK_CRC_RATE)
    limit = health.link_replays_per_minute
    return (
        (health.link_replays, pcie > limit, Sign.PCIE_REPLAYS, pcie),
        (health.link_replays, again > limit, Sign.NVLINK_REPLAYS, again),
        (health.nvlink_errors, recovers, Sign.NVLINK_RECOVERIES, 0.0),
        (health.nvlink_errors, crc >= health.nvlink_crc_per_second, Sign.NVLINK_CRC_ERRORS, crc),
    )
