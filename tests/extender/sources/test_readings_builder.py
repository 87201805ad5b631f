"""The extender's readings equal the worker's rounds after any sequence of changes."""

import asyncio
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import DeviceKey, Readings, Signal
from extender.settings.sources import Prometheus
from extender.sources.prometheus import protocol
from extender.sources.prometheus.collector import Round
from extender.sources.prometheus.dcgm_devices import DeviceRow, DeviceTable, changed_tenants
from extender.sources.prometheus.process import _serialize_settings
from extender.sources.prometheus.protocol import Frame
from extender.sources.prometheus.source import ReadingsBuilder
from extender.sources.prometheus.worker import _ITEMS_PER_FRAME, _read_settings, round_frames
from testkit.collecting import vector_of

drivers = st.sampled_from(["580", "590"])
fleets = st.dictionaries(st.integers(0, 8), st.tuples(drivers, st.booleans()))

FULL = Prometheus.model_validate(
    {
        "url": "http://prometheus:9090",
        "bearer_token_file": "/run/token",
        "ca_file": "/run/ca.crt",
        "headers": {"X-Scope-OrgID": "a"},
        "metrics": {
            "my_util": {"signal": "gpu_utilization_ratio", "unit": "percent"},
            "DCGM_FI_DEV_GPU_UTIL": None,
        },
    }
)


def through_a_pipe(frame: Frame) -> Frame:
    pipe = io.BytesIO()
    protocol.write(pipe, frame)
    pipe.seek(0)
    read = protocol.read(pipe)
    assert read is not None
    return read


def device(number: int, driver: str = "580") -> DeviceRow:
    return DeviceRow("gpu-1", f"GPU-{number}", "", number, "H100", "", driver)


def apply(builder: ReadingsBuilder, found: Round) -> Readings:
    answer = [through_a_pipe(frame) for frame in round_frames(found)]
    readings, _ = asyncio.run(builder.apply(answer, at=1.0))
    return readings


def round_of(table: DeviceTable, rows: list[DeviceRow]) -> Round:
    removed, added = table.update({row.key: row for row in rows})
    answer = vector_of({row.uuid: float(row.card_index or 0) for row in rows})
    column = table.column(table.recognize(answer.text) or table.read(answer))
    return Round(
        removed=removed,
        added=added,
        columns={Signal.XID: column},
        measured_at=column + 100,
        tenants={},
        tenants_at=1.5,
    )


def test_memory_of_pods_on_shared_devices_is_sent_once() -> None:
    table, builder = DeviceTable(), ReadingsBuilder()
    found = round_of(table, [device(0)])
    shares = ((device(0).key, "ns/a", 1 << 30), (device(0).key, "ns/b", 0))

    readings = apply(builder, replace(found, shares=shares, divided=(device(0).key,)))

    assert (readings.shares, readings.divided) == (shares, (device(0).key,))
    after = apply(builder, round_of(table, [device(0)]))
    assert (after.shares, after.divided) == ((), ())


@given(st.lists(fleets, max_size=6))
def test_any_sequence_of_changes_is_applied(sequence: list[dict[int, tuple[str, bool]]]) -> None:
    table, builder = DeviceTable(), ReadingsBuilder()
    tenants: dict[DeviceKey, tuple[str, ...]] = {}
    before: Readings | None = None
    for fleet in sequence:
        rows = [device(number, driver) for number, (driver, _) in fleet.items()]
        now: dict[DeviceKey, tuple[str, ...]] = {
            device(number).key: ("ns/a",) for number, (_, held) in fleet.items() if held
        }
        found = round_of(table, rows)
        found = Round(
            removed=found.removed,
            added=found.added,
            columns=found.columns,
            measured_at=found.measured_at,
            tenants=changed_tenants(tenants, now),
            tenants_at=found.tenants_at,
        )
        tenants = now

        readings = apply(builder, found)

        values = readings.columns[Signal.XID].tolist()
        assert [info.uuid for info in readings.devices] == [f"GPU-{value:.0f}" for value in values]
        assert {info.uuid: info.driver_version for info in readings.devices} == {
            row.uuid: row.driver_version for row in rows
        }
        assert readings.measured_at.tolist() == [value + 100 for value in values]
        assert readings.tenants == tenants
        assert (readings.at, readings.tenants_at) == (1.0, 1.5)
        assert readings.changed_tenants is not None
        assert before is None or readings.changed_tenants.since is before.tenants
        assert set(readings.changed_tenants.devices) == set(found.tenants or ())
        before = readings


def test_a_large_fleet_arrives_in_parts_and_complete() -> None:
    rows = [device(number) for number in range(2 * _ITEMS_PER_FRAME + 1)]
    found = round_of(DeviceTable(), rows)

    answer = list(round_frames(found))
    readings = apply(ReadingsBuilder(), found)

    # The last two frames contain the numbers.
    assert [len(frame.header.get("added", ())) for frame in answer] == [500, 500, 1, 0, 0]
    assert len(readings.devices) == len(rows)
    assert not np.isnan(readings.columns[Signal.XID]).any()


def test_a_pipe_that_ends_within_a_frame_has_no_more_frames() -> None:
    pipe = io.BytesIO()
    protocol.write(pipe, Frame(header={"a": 1}, body=b"12345678"))

    assert protocol.read(io.BytesIO(pipe.getvalue()[:-1])) is None
    assert protocol.read(io.BytesIO()) is None


def test_a_header_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(ValueError, match="not a JSON object but list"):
        protocol.decode_header(b"[]")


def test_settings_arrive_unchanged() -> None:
    arrived = _read_settings(_serialize_settings(FULL))

    for name in Prometheus.model_fields.keys() - {"metrics", "node_labels"}:
        assert getattr(arrived, name) == getattr(FULL, name), name
    assert tuple(arrived.node_labels) == FULL.node_labels
    assert isinstance(arrived.bearer_token_file, Path)
    row = arrived.metrics["my_util"]
    assert row is not None
    assert (row.signal, row.unit) == ("gpu_utilization_ratio", "percent")
    assert arrived.metrics["DCGM_FI_DEV_GPU_UTIL"] is None


def test_the_worker_does_not_import_large_libraries() -> None:
    code = (
        "import sys, extender.sources.prometheus.worker as worker;"
        "print(*{'pydantic', 'aiohttp', 'kubernetes_asyncio', 'pandas'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == ""
