"""Units and validity of DCGM values."""

import math
import tracemalloc

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent.gpu.backend import LINK_COUNTERS
from extender.core.devices.readings import _NVML_ONLY, DeviceKey, Signal
from extender.settings.sources import Prometheus
from extender.sources.prometheus.dcgm import (
    DEFAULT_METRICS,
    Aggregation,
    Metric,
    MetricUnit,
    build_table,
    convert,
)
from extender.sources.prometheus.dcgm_devices import DeviceTable, more_severe, shares_in, xids_of
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.promql import metric_query
from extender.sources.prometheus.responses import Row, Rows

ANY_SIGNAL = {
    MetricUnit.RATIO: Signal.GPU_UTILIZATION,
    MetricUnit.PERCENT: Signal.GPU_UTILIZATION,
    MetricUnit.BYTES: Signal.MEMORY_USED,
    MetricUnit.MIB: Signal.MEMORY_USED,
    MetricUnit.WATTS: Signal.POWER,
    MetricUnit.MILLIWATTS: Signal.POWER,
    MetricUnit.CELSIUS: Signal.TEMPERATURE,
    MetricUnit.COUNT: Signal.ECC_DOUBLE_BIT_VOLATILE,
}

NODES, CARDS = 500, 8

NODE_LABELS = ("Hostname",)

NAN = float("nan")


def converted(value: float, unit: MetricUnit, signal: Signal | None = None) -> float:
    return float(convert(np.array([value]), unit, signal or ANY_SIGNAL[unit])[0])


@pytest.mark.parametrize(
    ("unit", "signal", "highest", "beyond"),
    [
        (MetricUnit.MIB, Signal.MEMORY_USED, 16 << 20, (16 << 20) + 1),
        (MetricUnit.BYTES, Signal.MEMORY_TOTAL, 16 << 40, 9e15),
        (MetricUnit.WATTS, Signal.POWER, 5_000, 5_001),
        (MetricUnit.MILLIWATTS, Signal.POWER_LIMIT, 5_000_000, 5_000_001),
        (MetricUnit.CELSIUS, Signal.TEMPERATURE, 200, 201),
        (MetricUnit.CELSIUS, Signal.MEMORY_TEMPERATURE, 200, 201),
        (MetricUnit.COUNT, Signal.CLOCK_EVENT_REASONS, 0x1FF, 1 << 20),
        (MetricUnit.COUNT, Signal.XID, 1000, 1001),
        (MetricUnit.COUNT, Signal.ROW_REMAP_FAILURE, 1, 2),
        (MetricUnit.COUNT, Signal.ROW_REMAP_PENDING, 1, 2),
        (MetricUnit.COUNT, Signal.UNCORRECTABLE_REMAPPED_ROWS, 100_000, 100_001),
        (MetricUnit.COUNT, Signal.ROWS_REMAPPED_LATELY, 100_000, 100_001),
        (MetricUnit.COUNT, Signal.ECC_DOUBLE_BIT_VOLATILE, 1_000_000, 9e12),
        (MetricUnit.COUNT, Signal.RETIRED_PAGES_PENDING, 64, 9e12),
        (MetricUnit.COUNT, Signal.RETIRED_PAGES_SINGLE_BIT, 64, 9e12),
        (MetricUnit.COUNT, Signal.RETIRED_PAGES_DOUBLE_BIT, 64, 9e12),
        (MetricUnit.COUNT, Signal.RECOVERY_ACTION, 7, 101),
        (MetricUnit.COUNT, Signal.FABRIC_MANAGER_STATUS, 6, 101),
        (MetricUnit.COUNT, Signal.HEALTH_STATUS, 20, 101),
    ],
)
def test_an_impossible_magnitude_is_missing(
    unit: MetricUnit, signal: Signal, highest: float, beyond: float
) -> None:
    assert not math.isnan(converted(highest, unit, signal))
    assert math.isnan(converted(beyond, unit, signal))


@pytest.mark.parametrize("metric", DEFAULT_METRICS, ids=lambda metric: metric.name)
def test_invalid_values_are_missing_for_every_metric(metric: Metric) -> None:
    assert math.isnan(converted(9e12 / 0.001, metric.unit, metric.signal))


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        pytest.param(73, MetricUnit.PERCENT, 0.73, id="percent-becomes-ratio"),
        pytest.param(0.73, MetricUnit.RATIO, 0.73, id="ratio-stays"),
        pytest.param(1.03, MetricUnit.RATIO, 1.0, id="overshooting-ratio-is-full"),
        pytest.param(71344, MetricUnit.MIB, 71344 * 2**20, id="mebibytes-become-bytes"),
        pytest.param(2147483632, MetricUnit.BYTES, 2147483632, id="two-gibibytes-are-no-blank"),
        pytest.param(250_500, MetricUnit.MILLIWATTS, 250.5, id="milliwatts-become-watts"),
        pytest.param(0, MetricUnit.COUNT, 0, id="zero-is-a-value"),
    ],
)
def test_value_is_converted_to_base_units(value: float, unit: MetricUnit, expected: float) -> None:
    assert converted(value, unit) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        pytest.param(math.nan, MetricUnit.PERCENT, id="not-a-number"),
        pytest.param(math.inf, MetricUnit.PERCENT, id="infinite"),
        pytest.param(-math.inf, MetricUnit.MIB, id="minus-infinite"),
        pytest.param(-1, MetricUnit.COUNT, id="negative"),
        pytest.param(2147483632, MetricUnit.MIB, id="blank-of-32-bits"),
        pytest.param(2147483647, MetricUnit.COUNT, id="last-blank-of-32-bits"),
        pytest.param(9223372036854775794, MetricUnit.COUNT, id="blank-of-64-bits"),
        pytest.param(9223372036854775794, MetricUnit.BYTES, id="blank-of-64-bits-in-bytes"),
        pytest.param(140737488355330, MetricUnit.WATTS, id="blank-of-doubles"),
        pytest.param(140737488355330, MetricUnit.BYTES, id="blank-of-doubles-in-bytes"),
        pytest.param(50, MetricUnit.RATIO, id="percent-where-a-ratio-is-due"),
        pytest.param(250, MetricUnit.PERCENT, id="more-than-all"),
    ],
)
def test_an_impossible_value_is_missing(value: float, unit: MetricUnit) -> None:
    assert math.isnan(converted(value, unit))


@given(st.floats(), st.sampled_from(MetricUnit))
def test_converted_value_is_missing_or_within_bounds(value: float, unit: MetricUnit) -> None:
    result = converted(value, unit)

    if not math.isnan(result):
        assert result >= 0
        assert result < 9.2e18
        if unit in {MetricUnit.RATIO, MetricUnit.PERCENT}:
            assert result <= 1


@given(st.floats(0, 2e9), st.floats(0, 2e9), st.sampled_from(MetricUnit))
def test_conversion_keeps_order(one: float, other: float, unit: MetricUnit) -> None:
    low, high = converted(min(one, other), unit), converted(max(one, other), unit)

    assert math.isnan(low) or math.isnan(high) or low <= high


def test_each_metric_is_in_the_table_once() -> None:
    names = [metric.name for metric in DEFAULT_METRICS]

    assert len(names) == len(set(names))


def test_table_covers_every_signal() -> None:
    assert {metric.signal for metric in build_table()} == set(Signal) - _NVML_ONLY


@pytest.mark.parametrize(
    "names",
    [
        "DCGM_FI_DEV_GPU_UTIL=50 DCGM_FI_DEV_GPU_UTIL_RATIO=0.5 dcgm_gpu_utilization=50",
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE=0.5 DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO=0.5",
        "DCGM_FI_PROF_SM_ACTIVE=0.5 DCGM_FI_PROF_SM_UTIL_RATIO=0.5",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE=0.5 DCGM_FI_PROF_TENSOR_UTIL_RATIO=0.5",
        "DCGM_FI_PROF_DRAM_ACTIVE=0.5 DCGM_FI_PROF_DRAM_UTIL_RATIO=0.5",
        "DCGM_FI_DEV_MEM_COPY_UTIL=50 DCGM_FI_DEV_MEMORY_UTIL_RATIO=0.5",
        "DCGM_FI_DEV_FB_USED=1 DCGM_FI_DEV_FB_USED_BYTES=1048576 dcgm_fb_used=1",
        "DCGM_FI_DEV_FB_FREE=1 DCGM_FI_DEV_FB_FREE_BYTES=1048576 dcgm_fb_free=1",
        "DCGM_FI_DEV_FB_RESERVED=1 DCGM_FI_DEV_FB_RESERVED_BYTES=1048576 dcgm_fb_reserved=1",
        "DCGM_FI_DEV_FB_TOTAL=1 DCGM_FI_DEV_FB_CAPACITY_BYTES=1048576 dcgm_fb_total=1",
        "DCGM_FI_DEV_POWER_USAGE=9 DCGM_FI_DEV_BOARD_POWER_WATTS=9 dcgm_power_usage=9",
        "DCGM_FI_DEV_POWER_MGMT_LIMIT=9 DCGM_FI_DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS=9",
        "DCGM_FI_DEV_ENFORCED_POWER_LIMIT=9 DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS=9",
        "DCGM_FI_DEV_GPU_TEMP=60 DCGM_FI_DEV_GPU_TEMP_CELSIUS=60 dcgm_gpu_temp=60",
        "DCGM_FI_DEV_MEMORY_TEMP=60 DCGM_FI_DEV_MEMORY_TEMP_CELSIUS=60 dcgm_memory_temp=60",
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS=4 DCGM_FI_DEV_CLOCKS_EVENT_REASONS=4",
        "DCGM_FI_DEV_XID_ERRORS=79 DCGM_FI_DEV_XID_ERROR=79 dcgm_xid_errors=79",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE=1 DCGM_FI_DEV_ROW_REMAP_FAILED=1",
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS=1 DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL=1",
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL=1 dcgm_ecc_dbe_volatile_total=1",
        "DCGM_FI_DEV_RETIRED_SBE=1 dcgm_retired_pages_sbe=1",
        "DCGM_FI_DEV_RETIRED_DBE=1 dcgm_retired_pages_dbe=1",
        "DCGM_FI_DEV_RETIRED_PENDING=1 DCGM_FI_DEV_PAGE_RETIRED_PENDING=1",
        "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION=1 DCGM_FI_DEV_GPU_RECOVERY_ACTION=1",
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER=5 DCGM_FI_DEV_PCIE_REPLAY_TOTAL=5",
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL=5 DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL=5",
    ],
)
def test_all_generations_of_exporters_give_the_same_value(names: str) -> None:
    by_name = {metric.name: metric for metric in DEFAULT_METRICS}
    found = set()
    for name, _, text in (one.partition("=") for one in names.split()):
        metric = by_name[name]
        found.add((metric.signal, converted(float(text), metric.unit, metric.signal)))

    assert len(found) == 1


def test_every_counter_of_links_that_an_agent_exports_is_read() -> None:
    exported = {counter.dcgm for counter in LINK_COUNTERS.values()}

    assert exported <= {metric.name for metric in DEFAULT_METRICS if metric.is_counter}


def test_a_users_row_replaces_the_default() -> None:
    name = "DCGM_FI_DEV_GPU_UTIL_RATIO"
    row = Metric(name=name, signal=Signal.GPU_UTILIZATION, unit=MetricUnit.PERCENT)

    table = build_table([(name, row)])

    assert [metric.unit for metric in table if metric.name == name] == [MetricUnit.PERCENT]


def test_a_users_row_may_remove_a_metric() -> None:
    table = build_table([("DCGM_FI_DEV_XID_ERRORS", None)])

    assert "DCGM_FI_DEV_XID_ERRORS" not in {metric.name for metric in table}


def test_the_busier_of_several_values_counts() -> None:
    by_name = {metric.name: metric.aggregation for metric in DEFAULT_METRICS}

    assert by_name["DCGM_FI_DEV_FB_FREE"] is Aggregation.MIN
    assert by_name["DCGM_FI_DEV_FB_USED"] is Aggregation.MAX


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param(
            {"metrics": {"mine": {"signal": "speed", "unit": "count"}}},
            "signal 'speed' must be one of gpu_utilization_ratio, ",
            id="unknown-signal",
        ),
        pytest.param({"metrics": {"a b": None}}, "'a b' is not a metric's name", id="no-metric"),
        pytest.param({"node_labels": ["no de"]}, "'no de' is not a label's name", id="no-label"),
    ],
)
def test_a_setting_that_would_break_a_query_is_refused(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Prometheus.model_validate(values)


def answer() -> Rows:
    """Return all cards of all nodes, parsed from a new text."""
    rows = [
        {
            "metric": {
                "UUID": f"GPU-{node:08x}-0000-0000-0000-{card:012x}",
                "Hostname": f"node-{node}",
                "gpu": str(card),
                "modelName": "NVIDIA H100 80GB HBM3",
            },
            "value": [1_700_000_000.0, str(1_699_999_990 + card)],
        }
        for node in range(NODES)
        for card in range(CARDS)
    ]
    return Rows(orjson.dumps(rows))


def nodes(*, without: int | None = None) -> NodeIdentity:
    return NodeIdentity(names=frozenset(f"node-{it}" for it in range(NODES) if it != without))


def test_removing_a_node_keeps_the_devices_of_others() -> None:
    table = DeviceTable()
    table.read_devices(answer(), nodes(), NODE_LABELS)
    before = {id(row): row.node for row in table._rows.values()}

    changes = table.read_devices(answer(), nodes(without=3), NODE_LABELS)

    assert list(changes.removed) == [3 * CARDS + card for card in range(CARDS)]
    assert not changes.added
    after = {id(row): row.node for row in table._rows.values()}
    assert after == {at: node for at, node in before.items() if node != "node-3"}
    assert len(changes.scraped) == (NODES - 1) * CARDS


def test_an_invalid_index_costs_neither_its_device_nor_others() -> None:
    labels = {"UUID": "GPU-1", "Hostname": "node-1"}
    sample = [1_700_000_000.0, "1699999990"]
    indexes = ("9" * 5000, "\u00b2", "7")
    rows = [
        {"metric": labels | {"UUID": f"GPU-{at}", "gpu": index}, "value": sample}
        for at, index in enumerate(indexes)
    ]
    table = DeviceTable()

    table.read_devices(Rows(orjson.dumps(rows)), nodes(), NODE_LABELS)

    assert [row.card_index for row in table._rows.values()] == [None, None, 7]


def test_reading_an_answer_again_needs_little_memory() -> None:
    table, again = DeviceTable(), answer()
    table.read_devices(answer(), nodes(), NODE_LABELS)
    rows = len(again)  # the first fields of each row are cached now

    tracemalloc.start()
    try:
        table.read_devices(again, nodes(without=3), NODE_LABELS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # New objects among the parsed ones would keep the memory of the whole answer alive.
    assert peak_bytes / rows < 400


def row(uuid: str, **labels: str) -> Row:
    return {"metric": {"UUID": uuid, **labels}, "value": (1.0, "1")}


def metric(name: str) -> Metric:
    return next(one for one in DEFAULT_METRICS if one.name == name)


def test_the_most_severe_recent_xid_counts() -> None:
    rows = [row("GPU-1", xid="79"), row("GPU-1", xid="31"), row("GPU-2", xid="13")]

    assert dict(xids_of(rows)) == {DeviceKey(("GPU-1", "")): 79.0, DeviceKey(("GPU-2", "")): 13.0}


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
    "name", ["DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"]
)
def test_the_growth_of_counters_is_queried(name: str) -> None:
    assert metric_query(metric(name), 'a="b"') == (
        f'max by (UUID, uuid, GPU_I_ID) (rate({name}{{a="b"}}[300s]) > 0)'
    )


def test_of_several_shares_of_a_pod_on_a_device_the_largest_counts() -> None:
    labels = {"UUID": "GPU-1", "Hostname": "node", "exported_pod": "a", "exported_namespace": "ns"}
    rows: list[Row] = [{"metric": labels, "value": (0.0, used)} for used in ("3", "7", "5")]
    metric = Metric(name="used", signal=Signal.MEMORY_USED, unit=MetricUnit.BYTES)

    ((_, pod, used),) = shares_in(rows, metric)

    assert (pod, used) == ("ns/a", 7)
