"""Several XIDs of one device, and the growth of counters."""

import numpy as np
import pytest

from extender.core.devices.readings import DeviceKey
from extender.sources.prometheus.dcgm import DEFAULT_METRICS, Metric
from extender.sources.prometheus.dcgm_devices import more_severe, xids_of
from extender.sources.prometheus.promql import metric_query
from extender.sources.prometheus.responses import Row

NAN = float("nan")


def row(uuid: str, **labels: str) -> Row:
    return {"metric": {"UUID": uuid, **labels}, "value": (1.0, "1")}


def metric(name: str) -> Metric:
    return next(one for one in DEFAULT_METRICS if one.name == name)


def test_the_most_severe_recent_xid_counts() -> None:
    rows = [row("GPU-1", xid="79"), row("GPU-1", xid="31"), row("GPU-2", xid="13")]

    assert dict(xids_of(rows)) == {
        DeviceKey(("GPU-1", "")): 79.0,
        DeviceKey(("GPU-2", "")): 13.0,
    }


def test_a_changed_recovery_action_does_not_hide_its_cause() -> None:
    rows = [row("GPU-1", xid="154"), row("GPU-1", xid="95")]

    assert dict(xids_of(rows)) == {DeviceKey(("GPU-1", "")): 95.0}


@pytest.mark.parametrize(
    "label", ["", "none", "-1", "1001", "7.5", "\u00b2", "9" * 5000], ids=range(7)
)
def test_an_invalid_xid_is_ignored(label: str) -> None:
    assert dict(xids_of([row("GPU-1", xid=label)])) == {}


def test_a_series_without_the_xid_label_has_no_xid() -> None:
    assert dict(xids_of([row("GPU-1")])) == {}


def test_the_last_xid_does_not_hide_a_more_severe_one() -> None:
    last = np.array([31.0, 154.0, NAN, NAN, 0.0])
    lately = np.array([79.0, 31.0, 48.0, NAN, 63.0])

    np.testing.assert_array_equal(more_severe(last, lately), [79.0, 154.0, 48.0, NAN, 63.0])


def test_xids_are_queried_by_label() -> None:
    assert metric_query(metric("DCGM_EXP_XID_ERRORS_COUNT"), "") == (
        "max by (UUID, uuid, GPU_I_ID, xid) (DCGM_EXP_XID_ERRORS_COUNT{} > 0)"
    )


@pytest.mark.parametrize(
    "name",
    ["DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"],
)
def test_the_growth_of_counters_is_queried(name: str) -> None:
    assert metric_query(metric(name), 'a="b"') == (
        f'max by (UUID, uuid, GPU_I_ID) (rate({name}{{a="b"}}[300s]) > 0)'
    )
