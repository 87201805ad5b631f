"""Health of devices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extender.core.decision.health import (
    HealthColumns,
    Sign,
    _encode,
    decode,
    ill_health,
    judge,
    short_words,
    shown_by,
    words,
)
from extender.core.devices.readings import Column, Signal
from extender.core.nodes.snapshot import Telemetry
from extender.core.policy import Health, HealthAction

NAN = float("nan")
IGNORE, PENALTY = HealthAction.IGNORE, HealthAction.PENALTY
EXCLUDE, EXCLUDE_NODE = HealthAction.EXCLUDE, HealthAction.EXCLUDE_NODE
EXCLUDE_MULTI_GPU = HealthAction.EXCLUDE_MULTI_GPU


def one(**values: float) -> dict[Signal, Column]:
    return {Signal[name]: np.array([value]) for name, value in values.items()}


def verdict(
    health: Health | None = None,
    /,
    *,
    is_recent: float = True,  # booleans are numbers, too, and a signal is given by name
    is_suspect: float = False,
    **values: float,
) -> HealthColumns:
    flags = np.array([bool(is_recent)]), np.array([bool(is_suspect)])
    return judge(one(**values), 1, health or Health(), *flags)


def action(found: HealthColumns) -> HealthAction:
    """Return the action in the columns."""
    if found.is_node_excluded[0]:
        return EXCLUDE_NODE
    if found.is_excluded[0]:
        return EXCLUDE
    if found.is_excluded_multi[0]:
        return EXCLUDE_MULTI_GPU
    return PENALTY if found.penalty[0] else IGNORE


XIDS = {
    # Of one engine or application, or only information: "restart app" or "ignore" in the catalog.
    IGNORE: {
        *(0, 8, 11, 13, 14, 25, 31, 32, *range(37, 42), *range(43, 46), 60, *range(66, 73)),
        *(75, 76, 77, 80, *range(82, 87), 88, 89, 93, *range(96, 109), 121, *range(126, 136)),
        *(137, 139, 141, 152, 153, 157, 160, 161),
    },
    PENALTY: {63, 92, 94, 168},
    # "Reset GPU", "contact support" or "restart VM" in NVIDIA's catalog; 54 (no power), 62 and 64.
    EXCLUDE: {
        *(46, 48, 54, 62, 64, 78, 95, 109, 110, 119, 120, 136, 140, 142, 143, 151, 154, 155),
        *(156, 158, 167, 171, 172),
    },
    EXCLUDE_MULTI_GPU: {74, *range(144, 151)},  # NVLink
    EXCLUDE_NODE: {79},
}


@pytest.mark.parametrize("unknown", [IGNORE, EXCLUDE_NODE])
def test_each_xid_counts_as_its_class(unknown: HealthAction) -> None:
    """With two policies for unknown XIDs, no row can be missing in the table unnoticed."""
    health = Health(unknown_xid=unknown)
    listed = {xid: means for means, xids in XIDS.items() for xid in xids}

    found = {xid: action(verdict(health, XID=float(xid))) for xid in range(200)}

    assert found == {xid: listed.get(xid, unknown) for xid in range(200)}


def test_an_xid_that_nothing_lists_costs_a_little() -> None:
    assert action(verdict(XID=999.0)) is PENALTY


def test_setting_decides_meaning_of_an_xid() -> None:
    health = Health(xid={79: IGNORE}, unknown_xid=EXCLUDE)

    assert health.xid_action(79) is IGNORE
    assert health.xid_action(999) is EXCLUDE
    assert health.xid_action(48) is EXCLUDE


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, EXCLUDE), ({"RECOVERY_ACTION": 5.0}, PENALTY), ({"RECOVERY_ACTION": 0.0}, IGNORE)],
)
def test_changed_recovery_action_counts_only_without_its_reading(
    values: dict[str, Any], expected: HealthAction
) -> None:
    assert action(verdict(XID=154.0, **values)) is expected


def test_setting_decides_meaning_of_a_changed_recovery_action() -> None:
    health = Health(xid={154: EXCLUDE_NODE})

    assert action(verdict(health, XID=154.0, RECOVERY_ACTION=0.0)) is EXCLUDE_NODE


def test_an_old_xid_no_longer_counts() -> None:
    assert action(verdict(is_recent=False, XID=79.0)) is IGNORE


@pytest.mark.parametrize(
    ("values", "means", "cause"),
    [
        ({"is_suspect": True}, EXCLUDE_NODE, "XID 79: fallen off the bus"),
        ({"ROW_REMAP_FAILURE": 1.0}, EXCLUDE_NODE, "XID 79: fallen off the bus"),
        ({"RECOVERY_ACTION": 2.0}, EXCLUDE_NODE, "XID 79: fallen off the bus"),
        ({"HEALTH_STATUS": 20.0}, EXCLUDE_NODE, "XID 79: fallen off the bus"),
        ({"HEALTH_STATUS": 10.0}, PENALTY, "DCGM health: warning"),
        ({"ROW_REMAP_PENDING": 1.0}, PENALTY, "a remapped row waits for a reset"),
    ],
)
def test_old_excluding_xid_counts_again_with_another_hard_sign(
    values: dict[str, Any], means: HealthAction, cause: str
) -> None:
    found = verdict(is_recent=False, XID=79.0, **values)

    assert (action(found), words(int(found.cause[0]))) == (means, cause)


@pytest.mark.parametrize("xid", [31, 94])
def test_an_old_xid_that_excludes_nothing_never_counts_again(xid: int) -> None:
    assert action(verdict(is_recent=False, is_suspect=True, XID=float(xid))) is IGNORE


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"XID": 79}, "XID 79: fallen off the bus"),
        ({"XID": 999}, "XID 999"),
        ({"XID": 31, "ROW_REMAP_FAILURE": 1}, "row remapping failed (RMA)"),
        ({"XID": 94, "ROW_REMAP_FAILURE": 1}, "row remapping failed (RMA)"),
        ({"UNCORRECTABLE_REMAPPED_ROWS": 512}, "512 uncorrectable remapped rows"),
        ({"ROWS_REMAPPED_LATELY": 4}, "memory rows remapped within a day: 4"),
        ({"ROWS_REMAPPED_LATELY": 1}, "memory rows remapped within a day: 1"),
        ({"ECC_DOUBLE_BIT_VOLATILE": 3}, "3 double-bit memory errors since the last reset"),
        ({"RETIRED_PAGES_DOUBLE_BIT": 70}, "70 retired memory pages"),
        ({"RETIRED_PAGES_PENDING": 1}, "a memory page waits to be retired"),
        ({"RECOVERY_ACTION": 1}, "recovery action: reset"),
        ({"RECOVERY_ACTION": 3, "HEALTH_STATUS": 10}, "recovery action: drain P2P"),
        ({"HEALTH_STATUS": 20}, "DCGM health: failure"),
        ({"FABRIC_MANAGER_STATUS": 4}, "fabric manager failed"),
        ({"FABRIC_MANAGER_STATUS": 2}, "fabric manager still starting"),
        ({"HEALTH_STATUS": 10, "FABRIC_MANAGER_STATUS": 4}, "fabric manager failed"),
        ({"XID": 31}, ""),
        ({}, ""),
    ],
)
def test_the_most_severe_cause_is_reported(values: dict[str, Any], cause: str) -> None:
    found = verdict(**{name: float(value) for name, value in values.items()})

    assert words(int(found.cause[0])) == cause


def test_xids_are_described_in_words_where_their_meaning_is_known() -> None:
    described = {xid: words(int(_encode(Sign.XID, xid))) for xid in range(200)}

    known = {xid for xid, text in described.items() if text != f"XID {xid}"}
    assert known == {
        *(46, 48, 54, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 140),
        *(*range(144, 151), 154, 167, 168),
    }
    assert described[79] == "XID 79: fallen off the bus"
    assert described[144] == "XID 144: NVLink error"


@pytest.mark.parametrize(
    ("signal", "values"),
    [
        ("RECOVERY_ACTION", range(1, 8)),
        ("FABRIC_MANAGER_STATUS", (1, 2, 4, 5, 6)),
        ("HEALTH_STATUS", (10, 20)),
        ("FABRIC_HEALTH", (2, 3)),
    ],
)
def test_each_state_of_a_status_has_its_words(signal: str, values: Sequence[int]) -> None:
    causes = [verdict(**{signal: float(value)}).cause[0] for value in values]

    described = {words(int(cause)) for cause in causes}
    assert len(described) == len(values)
    assert not any(text[-1].isdigit() for text in described)


def test_signs_keep_their_numbers_which_decision_logs_contain() -> None:
    assert [int(sign) for sign in Sign] == list(range(len(Sign)))


@pytest.mark.parametrize(
    ("setting", "signal", "value"),
    [
        ("row_remap_failure", "ROW_REMAP_FAILURE", 1),
        ("row_remap_pending", "ROW_REMAP_PENDING", 1),
        ("double_bit_error", "ECC_DOUBLE_BIT_VOLATILE", 1),
        ("worn_memory", "UNCORRECTABLE_REMAPPED_ROWS", 512),
        ("worn_memory", "RETIRED_PAGES_DOUBLE_BIT", 63),
        ("retired_pages_pending", "RETIRED_PAGES_PENDING", 1),
        *[("recovery_reset", "RECOVERY_ACTION", wanted) for wanted in (1, 2, 4, 6, 7)],
        ("recovery_drain_p2p", "RECOVERY_ACTION", 3),
        ("recovery_imex", "RECOVERY_ACTION", 5),
        ("dcgm_fail", "HEALTH_STATUS", 20),
        ("dcgm_warn", "HEALTH_STATUS", 10),
        ("fabric_manager_failed", "FABRIC_MANAGER_STATUS", 4),
        ("fabric_manager_starting", "FABRIC_MANAGER_STATUS", 2),
        ("sram_errors", "SRAM_THRESHOLD_EXCEEDED", 1),
        ("fabric_unhealthy", "FABRIC_HEALTH", 2),
        ("fabric_limited", "FABRIC_HEALTH", 3),
        ("nvlink_down", "NVLINKS_DOWN", 1),
        ("inforom_corrupted", "INFOROM_CORRUPTED", 1),
        ("nvlink_errors", "NVLINK_RECOVERY_RATE", 0.01),
        ("nvlink_errors", "NVLINK_CRC_RATE", 100),
        ("link_replays", "NVLINK_REPLAY_RATE", 1),
        ("link_replays", "PCIE_REPLAY_RATE", 1),
    ],
)
@pytest.mark.parametrize("means", [EXCLUDE_NODE, EXCLUDE_MULTI_GPU])
def test_setting_decides_meaning_of_a_health_sign(
    setting: str, signal: str, value: float, means: HealthAction
) -> None:
    health = replace(Health(), **{setting: means})  # type: ignore[arg-type] # an action

    assert action(verdict(health, **{signal: float(value)})) is means


def test_limits_of_rows_and_pages_are_settings() -> None:
    health = Health(remapped_rows_limit=4, retired_pages_warn=2, retired_pages_limit=4)

    for signal, few in (
        ("UNCORRECTABLE_REMAPPED_ROWS", IGNORE),
        ("RETIRED_PAGES_SINGLE_BIT", PENALTY),
    ):
        found = [action(verdict(health, **{signal: float(rows)})) for rows in (1, 2, 4)]
        assert found == [IGNORE, few, EXCLUDE]


def test_penalty_grows_with_recently_remapped_rows() -> None:
    health = Health(penalty=0.4, remapped_rows_per_day=2)

    found = [verdict(health, ROWS_REMAPPED_LATELY=float(rows)).penalty[0] for rows in range(4)]

    assert found == [0.0, 0.2, 0.4, 0.4]


def test_a_graver_penalty_is_not_lightened_by_rows_remapped_lately() -> None:
    found = verdict(ROWS_REMAPPED_LATELY=1.0, ROW_REMAP_PENDING=1.0)

    assert found.penalty[0] == Health().penalty
    assert words(int(found.cause[0])) == "a remapped row waits for a reset"


def test_retired_pages_of_both_kinds_count_together() -> None:
    pages = {"RETIRED_PAGES_SINGLE_BIT": 60.0, "RETIRED_PAGES_DOUBLE_BIT": 3.0}

    assert action(verdict(**pages)) is EXCLUDE


def test_siblings_of_a_device_that_excludes_its_node_say_which_it_is() -> None:
    found = judge(
        {Signal.XID: np.array([0.0, 48.0, 79.0, 0.0])},
        4,
        Health(),
        np.ones(4, dtype=np.bool_),
        np.zeros(4, dtype=np.bool_),
    )

    found.exclude_siblings(np.array([7, 7, 7, 3]))

    assert found.is_excluded.tolist() == [True, True, True, False]
    assert [decode(int(cause)) for cause in found.cause] == [
        (Sign.SIBLING, 2),
        (Sign.XID, 48),
        (Sign.XID, 79),
        (Sign.NONE, 0),
    ]


def telemetry(**changes: Any) -> Telemetry:
    return replace(Telemetry.missing(2), **changes)


@pytest.mark.parametrize(
    ("effect", "words_before"),
    [
        ({"is_excluded": np.array([True, True])}, "cannot work: "),
        ({"is_excluded_multi": np.array([True, True])}, "cannot work for pods with several GPUs: "),
        ({"penalty": np.array([0.5, 0.5])}, "counts less: "),
    ],
)
def test_ill_health_states_its_consequence(effect: dict[str, object], words_before: str) -> None:
    cause = np.array([_encode(Sign.XID, 79), _encode(Sign.NONE)])
    seen = telemetry(cause=cause, **effect)

    assert ill_health(seen, 0) == f"{words_before}XID 79: fallen off the bus"


def test_a_device_that_another_excludes_names_the_other() -> None:
    cause = np.array([_encode(Sign.XID, 79), _encode(Sign.SIBLING, 0)])
    seen = telemetry(cause=cause, is_excluded=np.array([True, True]))

    fault = "has XID 79: fallen off the bus"
    assert ill_health(seen, 1) == f"excluded with its node: another GPU {fault}"
    assert ill_health(seen, 1, lambda row: f"GPU {row + 2}") == (
        f"excluded with its node: GPU 2 {fault}"
    )


def test_a_healthy_device_has_no_ill_health() -> None:
    assert ill_health(telemetry(), 0) == ""


@pytest.mark.parametrize(
    ("signal", "value", "expected"),
    [
        ("ROW_REMAP_FAILURE", 1, EXCLUDE),
        ("ROW_REMAP_PENDING", 1, PENALTY),
        ("ECC_DOUBLE_BIT_VOLATILE", 2, EXCLUDE),
        ("RETIRED_PAGES_PENDING", 1, PENALTY),
        ("RETIRED_PAGES_SINGLE_BIT", 14, IGNORE),
        ("RETIRED_PAGES_SINGLE_BIT", 15, PENALTY),
        ("RETIRED_PAGES_DOUBLE_BIT", 63, EXCLUDE),
        ("UNCORRECTABLE_REMAPPED_ROWS", 511, IGNORE),
        ("UNCORRECTABLE_REMAPPED_ROWS", 512, EXCLUDE),
        ("ROWS_REMAPPED_LATELY", 0, IGNORE),
        ("ROWS_REMAPPED_LATELY", 1, PENALTY),
        ("ROWS_REMAPPED_LATELY", 9, PENALTY),
        *[("FABRIC_MANAGER_STATUS", status, EXCLUDE_NODE) for status in (1, 4, 5, 6)],
        *[("FABRIC_MANAGER_STATUS", status, IGNORE) for status in (0, 3)],
        ("FABRIC_MANAGER_STATUS", 2, PENALTY),
        *[("RECOVERY_ACTION", wanted, EXCLUDE) for wanted in (1, 2, 4, 6, 7)],
        ("RECOVERY_ACTION", 3, EXCLUDE_MULTI_GPU),
        ("RECOVERY_ACTION", 5, PENALTY),
        ("RECOVERY_ACTION", 0, IGNORE),
        ("HEALTH_STATUS", 20, EXCLUDE),
        ("HEALTH_STATUS", 10, PENALTY),
        ("HEALTH_STATUS", 0, IGNORE),
        ("SRAM_THRESHOLD_EXCEEDED", 1, EXCLUDE),
        ("SRAM_THRESHOLD_EXCEEDED", 0, IGNORE),
        ("FABRIC_HEALTH", 1, IGNORE),
        ("FABRIC_HEALTH", 2, EXCLUDE),
        ("FABRIC_HEALTH", 3, PENALTY),
        ("NVLINKS_DOWN", 0, IGNORE),
        ("NVLINKS_DOWN", 2, EXCLUDE_MULTI_GPU),
        ("INFOROM_CORRUPTED", 1, PENALTY),
        ("NVLINK_CRC_RATE", 99, IGNORE),
        ("NVLINK_CRC_RATE", 100, EXCLUDE_MULTI_GPU),
        ("NVLINK_RECOVERY_RATE", 0, IGNORE),
        ("NVLINK_RECOVERY_RATE", 0.004, EXCLUDE_MULTI_GPU),
        ("NVLINK_REPLAY_RATE", 8 / 60, IGNORE),
        ("NVLINK_REPLAY_RATE", 9 / 60, PENALTY),
        ("PCIE_REPLAY_RATE", 8 / 60, IGNORE),
        ("PCIE_REPLAY_RATE", 9 / 60, PENALTY),
    ],
)
def test_each_other_sign_has_its_consequence(
    signal: str, value: float, expected: HealthAction
) -> None:
    found = verdict(**{signal: float(value)})

    assert action(found) is expected
    assert action(verdict(**{signal: NAN})) is IGNORE
    signals = [] if expected is IGNORE else [Signal[signal]]
    assert set(signals) <= set(shown_by(int(found.cause[0]), 0, {})[0])


def test_a_device_that_is_about_to_switch_itself_off_is_excluded() -> None:
    hot = verdict(TEMPERATURE=95.0, TEMPERATURE_SHUTDOWN=95.0)

    assert action(hot) is EXCLUDE
    assert words(int(hot.cause[0])) == "95 °C, at which it switches itself off"
    assert action(verdict(TEMPERATURE=94.0, TEMPERATURE_SHUTDOWN=95.0)) is IGNORE
    assert action(verdict(TEMPERATURE=95.0)) is IGNORE


def test_zeros_and_missing_values_are_no_sign_of_ill_health() -> None:
    zeros = {signal.name: 0.0 for signal in Signal if "TEMPERATURE" not in signal.name}

    assert action(verdict()) is IGNORE
    assert action(verdict(**zeros)) is IGNORE


def test_a_penalty_comes_with_the_exclusion_for_several_gpus() -> None:
    found = verdict(Health(penalty=0.3), XID=74.0)

    assert (bool(found.is_excluded[0]), found.penalty[0]) == (False, 0.3)


@pytest.mark.parametrize(
    ("sign", "value", "words"),
    [
        (Sign.REMAPPED_ROWS, 3, "remapped rows"),
        (Sign.XID, 79, "XID 79: fallen off the bus"),
        (Sign.ROW_REMAP_PENDING, 1, "a remapped row waits for a reset"),
    ],
)
def test_labels_of_metrics_contain_no_counts(sign: Sign, value: int, words: str) -> None:
    assert short_words(int(_encode(sign, value))) == words
