"""Reduction of a round's answers to columns, devices and tenants."""

from typing import Final

import numpy as np
import pytest
from aiohttp import web

from extender.core.devices.readings import DeviceKey, Signal
from extender.sources.prometheus import collector
from extender.sources.prometheus.dcgm_devices import MOST_ON_NODE, DeviceRow
from extender.sources.prometheus.protocol import PrometheusError
from testkit.collecting import NOW, PLAIN, CollectorState
from testkit.prometheus.fake import FakePrometheus, read_sample, series, util

GIB: Final = 1 << 30


async def test_values_are_in_base_units(fake: FakePrometheus) -> None:
    fake.series = [
        util(40, gpu="3", modelName="NVIDIA H100", DCGM_FI_DRIVER_VERSION="580.95.05"),
        series("DCGM_FI_DEV_FB_USED", 1024, UUID="GPU-1", Hostname="gpu-1"),
        series("DCGM_FI_DEV_POWER_USAGE", "187.330000", UUID="GPU-1", Hostname="gpu-1"),
        series("DCGM_FI_DEV_XID_ERRORS", 79, UUID="GPU-1", Hostname="gpu-1"),
    ]
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert state.value(Signal.GPU_UTILIZATION) == pytest.approx(0.4)
    assert state.value(Signal.MEMORY_USED) == GIB
    assert state.value(Signal.POWER) == pytest.approx(187.33)
    assert state.value(Signal.XID) == 79
    assert state.rows[0] == DeviceRow("gpu-1", "GPU-1", "", 3, "NVIDIA H100", "", "580.95.05")


async def test_only_existing_metrics_are_queried(fake: FakePrometheus) -> None:
    fake.series = [util(1)]

    await CollectorState(fake.url).round(NOW)

    named = [query for query in fake.queries if "DCGM_" in query]
    assert named
    assert all("DCGM_FI_DEV_GPU_UTIL{" in query for query in named)


async def test_new_metric_is_noticed_within_a_minute(fake: FakePrometheus) -> None:
    fake.series = [util(1)]
    state = CollectorState(fake.url)
    await state.round(NOW)
    fake.series.append(series("DCGM_FI_DEV_GPU_TEMP", 60, UUID="GPU-1", Hostname="gpu-1"))

    await state.round(NOW + 10)
    before = Signal.TEMPERATURE in state.found.columns
    await state.round(NOW + 60)

    assert not before
    assert state.value(Signal.TEMPERATURE) == 60


async def test_new_metric_is_noticed_at_once_after_the_clock_was_set_back(
    fake: FakePrometheus,
) -> None:
    fake.series = [util(1)]
    state = CollectorState(fake.url)
    await state.round(NOW)
    fake.series.append(series("DCGM_FI_DEV_GPU_TEMP", 60, UUID="GPU-1", Hostname="gpu-1"))

    await state.round(NOW - 600)

    assert state.value(Signal.TEMPERATURE) == 60


async def test_names_are_queried_if_the_server_does_not_list_them(fake: FakePrometheus) -> None:
    fake.series = [util(30)]
    fake.failing = {"/values"}
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert state.value(Signal.GPU_UTILIZATION) == pytest.approx(0.3)


async def test_a_failed_metric_is_missing_and_the_others_are_not(fake: FakePrometheus) -> None:
    fake.series = [util(30), series("DCGM_FI_DEV_FB_USED", 5, UUID="GPU-1", Hostname="gpu-1")]
    fake.failing = {"max by (UUID, uuid, GPU_I_ID) (DCGM_FI_DEV_FB_USED"}
    state = CollectorState(fake.url)

    found = await state.round(NOW)

    assert state.value(Signal.GPU_UTILIZATION) == pytest.approx(0.3)
    assert Signal.MEMORY_USED not in found.columns
    assert "HTTP 503" in found.failed["DCGM_FI_DEV_FB_USED"]


async def test_a_round_without_the_devices_fails_and_changes_nothing(fake: FakePrometheus) -> None:
    fake.series = [util(30)]
    state = CollectorState(fake.url)
    await state.round(NOW)
    fake.failing = {"timestamp("}

    with pytest.raises(PrometheusError, match="HTTP 503"):
        await state.round(NOW)

    fake.failing = set()
    found = await state.round(NOW)
    assert not found.added
    assert not found.removed


async def test_answer_without_series_has_no_devices(fake: FakePrometheus) -> None:
    state = CollectorState(fake.url)

    found = await state.round(NOW)

    assert state.rows == []
    assert found.columns == {}
    assert found.measured_at.shape == (0,)
    assert found.tenants is None


async def test_a_vanished_device_is_removed_and_the_others_keep_their_order(
    fake: FakePrometheus,
) -> None:
    fake.series = [util(index, UUID=f"GPU-{index}") for index in (1, 2, 3)]
    state = CollectorState(fake.url)
    await state.round(NOW)
    del fake.series[1]
    fake.series.insert(0, util(9, UUID="GPU-9"))

    found = await state.round(NOW)

    assert [row.uuid for row in state.rows] == ["GPU-1", "GPU-3", "GPU-9"]
    assert found.removed == [1]
    assert [row.uuid for row in found.added] == ["GPU-9"]
    assert state.value(Signal.GPU_UTILIZATION, "GPU-9") == pytest.approx(0.09)


async def test_unchanged_devices_are_not_sent_again(fake: FakePrometheus) -> None:
    fake.series = [util(1)]
    state = CollectorState(fake.url)
    await state.round(NOW)

    found = await state.round(NOW)

    assert (found.added, found.removed, found.tenants) == ([], [], None)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("NaN", id="not-a-number"),
        pytest.param("+Inf", id="infinite"),
        pytest.param("-1", id="negative"),
        pytest.param("2147483632", id="blank"),
        pytest.param("9223372036854775794", id="wide-blank"),
    ],
)
async def test_an_invalid_value_is_missing_and_never_zero(fake: FakePrometheus, text: str) -> None:
    fake.series = [util(text)]
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert np.isnan(state.value(Signal.GPU_UTILIZATION))


async def test_age_includes_the_scrape_and_the_exporters_interval(fake: FakePrometheus) -> None:
    fake.series = [util(1, at=NOW - 12)]

    found = await CollectorState(fake.url).round(NOW)

    assert found.measured_at.tolist() == [NOW - 12 - 30]


async def test_sample_from_the_future_is_from_now(fake: FakePrometheus) -> None:
    fake.series = [util(1, at=NOW + 3600)]

    found = await CollectorState(fake.url).round(NOW)

    assert found.measured_at.tolist() == [NOW - 30]


async def test_clock_of_the_server_does_not_change_ages(fake: FakePrometheus) -> None:
    fake.clock = lambda: NOW + 500
    fake.series = [util(1, at=NOW + 500 - 12)]

    found = await CollectorState(fake.url).round(NOW)

    assert found.measured_at[0] == pytest.approx(NOW - 12 - 30, abs=2)


async def test_age_of_a_sample_does_not_depend_on_the_answers_delay(fake: FakePrometheus) -> None:
    fake.series = [util(1, at=NOW - 12)]
    state = CollectorState(fake.url)
    first = await state.round(NOW)
    fake.clock = lambda: NOW + 10.7

    second = await state.round(NOW + 10)

    assert first.measured_at.tolist() == second.measured_at.tolist()


async def test_two_generations_of_exporters_work_side_by_side(fake: FakePrometheus) -> None:
    fake.series = [
        util(40, UUID="GPU-old"),
        series("DCGM_FI_DEV_GPU_UTIL_RATIO", 0.7, UUID="GPU-new", hostname="gpu-2"),
        series("DCGM_FI_DEV_FB_USED", 1024, UUID="GPU-old", Hostname="gpu-1"),
        series("DCGM_FI_DEV_FB_USED_BYTES", 2 * GIB, UUID="GPU-new", hostname="gpu-2"),
        series("dcgm_gpu_utilization", 25, uuid="GPU-1.x", instance="10.244.3.17:9400"),
    ]
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert state.value(Signal.GPU_UTILIZATION, "GPU-old") == pytest.approx(0.4)
    assert state.value(Signal.GPU_UTILIZATION, "GPU-new") == pytest.approx(0.7)
    assert state.value(Signal.GPU_UTILIZATION, "GPU-1.x") == pytest.approx(0.25)
    assert state.value(Signal.MEMORY_USED, "GPU-old") == GIB
    assert state.value(Signal.MEMORY_USED, "GPU-new") == 2 * GIB


async def test_a_users_row_sets_another_unit(fake: FakePrometheus) -> None:
    fake.series = [
        series("DCGM_FI_DEV_GPU_UTIL_RATIO", 70, UUID="GPU-1", Hostname="gpu-1"),
        series("my_memory", 3, UUID="GPU-1", Hostname="gpu-1"),
    ]
    rows = {
        "DCGM_FI_DEV_GPU_UTIL_RATIO": {"signal": "gpu_utilization_ratio", "unit": "percent"},
        "my_memory": {"signal": "memory_used_bytes", "unit": "MiB"},
    }
    state = CollectorState(fake.url, metrics=rows)

    await state.round(NOW)

    assert state.value(Signal.GPU_UTILIZATION) == pytest.approx(0.7)
    assert state.value(Signal.MEMORY_USED) == 3 << 20


async def test_series_that_name_no_node_are_counted_with_an_example(fake: FakePrometheus) -> None:
    fake.series = [
        util(1),
        util(2, UUID="GPU-2", Hostname="ghost"),
        util(3, UUID="GPU-3", Hostname="ghost"),
    ]
    state = CollectorState(fake.url)

    found = await state.round(NOW)

    assert [row.uuid for row in state.rows] == ["GPU-1"]
    assert found.unmatched_series == 2
    assert found.unmatched_example == 'UUID="GPU-2", Hostname="ghost"'


async def test_a_moved_card_belongs_to_the_node_of_the_newest_series(fake: FakePrometheus) -> None:
    fake.series = [util(1, at=NOW - 200), util(1, at=NOW - 5, Hostname="gpu-2")]
    state = CollectorState(fake.url)

    found = await state.round(NOW)

    assert [row.node for row in state.rows] == ["gpu-2"]
    assert found.measured_at.tolist() == [NOW - 35]


async def test_selector_narrows_every_query(fake: FakePrometheus) -> None:
    fake.series = [util(10, cluster="a"), util(90, UUID="GPU-2", cluster="b")]
    state = CollectorState(fake.url, selector='{cluster="a"}')

    await state.round(NOW)

    assert [row.uuid for row in state.rows] == ["GPU-1"]


async def test_partial_answers_are_used_and_reported(fake: FakePrometheus) -> None:
    fake.series = [util(10)]
    fake.warnings = ["store 2 is down"]
    state = CollectorState(fake.url)

    found = await state.round(NOW)

    assert state.value(Signal.GPU_UTILIZATION) == pytest.approx(0.1)
    assert found.partial_answers > 0
    assert "store 2 is down" in found.warning


async def test_instances_of_a_partitioned_card_are_devices(fake: FakePrometheus) -> None:
    fake.series = read_sample("a100_mig_4.5.x.prom", PLAIN, honor_labels=True)
    state = CollectorState(fake.url)

    await state.round(NOW)

    card = "GPU-5f0d9a3e-11c2-46b7-8a0e-2b8e6d1c7f01"
    whole = "GPU-a2c41b77-93fe-4d0a-b1ce-0f6a1d2e3c02"
    assert {row.key for row in state.rows} == {
        *(DeviceKey((card, instance)) for instance in ("1", "5", "9", "10")),
        DeviceKey((whole, "")),
    }
    assert np.isnan(state.value(Signal.GPU_UTILIZATION, card, "1"))
    assert state.value(Signal.GRAPHICS_ACTIVE, card, "1") == pytest.approx(0.402311)
    assert state.value(Signal.MEMORY_USED, card, "9") == 12 << 20
    assert {row.mig_profile for row in state.rows} == {"3g.20gb", "2g.10gb", "1g.5gb", ""}


async def test_shared_card_has_its_own_value_and_all_its_pods(fake: FakePrometheus) -> None:
    fake.series = read_sample("t4_timesliced_4.8.3.prom", PLAIN, honor_labels=True)
    state = CollectorState(fake.url)

    await state.round(NOW)

    uuid = "GPU-e3b0c442-98fc-1c14-9afb-f4c8996fb924"
    assert [row.node for row in state.rows] == ["ip-10-0-31-7.ec2.internal"]
    assert state.value(Signal.GPU_UTILIZATION, uuid) == pytest.approx(0.71)
    assert state.value(Signal.MEMORY_USED, uuid) == 10812 << 20
    assert state.value(Signal.MEMORY_FREE, uuid) == 4121 << 20
    assert state.held() == {"4": ("dev/whisper-5d8b7c9d4-lq8zn", "dev/yolo-0", "ds/nb-bob-0")}
    assert {(key[0], pod): held >> 20 for key, pod, held in state.found.shares} == {
        (uuid, "dev/whisper-5d8b7c9d4-lq8zn"): 6912,
        (uuid, "dev/yolo-0"): 2480,
        (uuid, "ds/nb-bob-0"): 1410,
    }
    assert state.found.divided == [DeviceKey((uuid, ""))]


async def test_without_the_memory_by_pod_the_rest_is_known(fake: FakePrometheus) -> None:
    fake.series = read_sample("t4_timesliced_4.8.3.prom", PLAIN, honor_labels=True)
    fake.failing = {"vgpu"}
    state = CollectorState(fake.url)

    found = await state.round(NOW)

    assert set(found.failed) == {"shares"}
    assert "HTTP 503" in found.failed["shares"]
    assert (list(found.shares), list(found.divided)) == ([], [])
    assert "4" in state.held()


@pytest.mark.parametrize(("few", "queried"), [(3, [0, 44, 45]), (2, [0, 45])])
async def test_many_shares_are_not_queried_in_each_round(
    fake: FakePrometheus, monkeypatch: pytest.MonkeyPatch, few: int, queried: list[int]
) -> None:
    monkeypatch.setattr(collector, "_FEW_SHARES", few)
    fake.series = read_sample("t4_timesliced_4.8.3.prom", PLAIN, honor_labels=True)
    state = CollectorState(fake.url)

    found = {later: await state.round(NOW + later) for later in (0, 44, 45)}

    assert [later for later, one in found.items() if one.shares] == queried
    assert [later for later, one in found.items() if one.divided] == queried


async def test_labels_that_messages_show_have_no_control_characters_and_are_short(
    fake: FakePrometheus,
) -> None:
    fake.series = [util(1, modelName="H100\x9b31m\u202e", DCGM_FI_DRIVER_VERSION="5" * 4_000)]
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert (state.rows[0].model, state.rows[0].driver_version) == ("H100\ufffd31m\ufffd", "5" * 128)


async def test_series_with_a_uuid_that_no_driver_writes_are_ignored(fake: FakePrometheus) -> None:
    names = ("GPU-\x9b31m", "GPU-" + "1" * 200, "GPU-1")
    fake.series = [util(40, UUID=name) for name in names]
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert [row.uuid for row in state.rows] == ["GPU-1"]
    assert state.value(Signal.GPU_UTILIZATION) == pytest.approx(0.4)


async def test_pods_in_labels_are_bounded_in_length_and_number(fake: FakePrometheus) -> None:
    names = [f"p{number:04}" + "\x9b" * 400 for number in range(1030)]
    fake.series = [util(1, exported_namespace="ns", exported_pod=name) for name in names]
    state = CollectorState(fake.url)

    await state.round(NOW)

    (pods,) = state.tenants.values()
    assert len(pods) == 1024
    assert {len(pod) for pod in pods} == {317}
    assert "".join(pods).isprintable()


async def test_devices_beyond_the_limit_of_a_node_are_ignored_and_reported(
    fake: FakePrometheus,
) -> None:
    known = [util(1, UUID="GPU-z"), util(2, UUID="GPU-other", Hostname="gpu-2")]
    fake.series = known
    state = CollectorState(fake.url)
    await state.round(NOW)

    fake.series = [*(util(3, UUID=f"GPU-{number:03}") for number in range(300)), *known]
    found = await state.round(NOW + 60.0)

    assert len(state.rows) == MOST_ON_NODE + 1
    assert [row.uuid for row in state.rows[:2]] == ["GPU-z", "GPU-other"]
    assert state.value(Signal.GPU_UTILIZATION, "GPU-other") == pytest.approx(0.02)
    assert "more than 256 devices of gpu-1" in found.failed["devices"]

    fake.series = known
    found = await state.round(NOW + 120.0)

    assert [row.uuid for row in state.rows] == ["GPU-z", "GPU-other"]
    assert not found.failed


async def test_value_that_is_text_is_missing(fake: FakePrometheus) -> None:
    fake.series = [util("broken")]
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert np.isnan(state.value(Signal.GPU_UTILIZATION))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"metric": {"UUID": "GPU-1"}}, id="no-value"),
        pytest.param({"metric": {"UUID": "GPU-1"}, "value": [1]}, id="half-a-value"),
        pytest.param({"metric": None, "value": [1, "2"]}, id="no-labels"),
        pytest.param("row", id="text"),
    ],
)
async def test_an_answer_of_another_shape_is_a_failure_and_not_a_crash(
    fake: FakePrometheus, row: object
) -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.path.endswith("/values"):
            return web.json_response({"status": "success", "data": ["DCGM_FI_DEV_GPU_UTIL"]})
        data = {"resultType": "vector", "result": [row]}
        return web.json_response({"status": "success", "data": data})

    fake.handler = handler

    with pytest.raises(PrometheusError, match="cannot read the answer"):
        await CollectorState(fake.url).round(NOW)
