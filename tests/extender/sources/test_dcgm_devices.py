"""Devices, their nodes and their pods, from the labels of series."""

from typing import Any, Final

import numpy as np
import orjson
import pytest

from extender.core.devices.readings import DeviceKey
from extender.sources.prometheus.dcgm_devices import (
    MOST_ON_NODE,
    DeviceRow,
    DeviceTable,
    device_key,
    merge_tenants,
    pods_of,
    tenants_in,
    without_exporters,
)
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.responses import Row, Rows
from testkit.collecting import vector_of

NODES: Final = NodeIdentity(names=frozenset({"a", "b"}))


def series(at: float, uuid: str = "GPU-1", node: str = "a", **labels: str) -> Row:
    """Return a row of the answer about devices: the time of the last sample is its value."""
    return {"metric": {"UUID": uuid, "Hostname": node, **labels}, "value": [100.0, str(at)]}


def devices(*rows: Row) -> Any:
    return DeviceTable().read_devices(Rows(orjson.dumps(rows)), NODES, ("Hostname",))


@pytest.mark.parametrize(
    ("labels", "key"),
    [
        ({"UUID": "GPU-1"}, ("GPU-1", "")),
        ({"uuid": "GPU-1", "GPU_I_ID": "3"}, ("GPU-1", "3")),
        ({"UUID": "G" * 127, "GPU_I_ID": "3"}, ("G" * 127, "3")),
        ({"UUID": "G" * 128, "GPU_I_ID": "3"}, None),
        ({"UUID": "GPU-1", "GPU_I_ID": "\x9b"}, None),
        ({"GPU_I_ID": "3"}, None),
    ],
)
def test_a_device_has_a_uuid_and_perhaps_an_instance_of_printable_text(
    labels: dict[str, str], key: tuple[str, str] | None
) -> None:
    assert device_key(labels) == key


FULL: Final = {
    "gpu": "0",
    "modelName": "H100",
    "GPU_I_PROFILE": "1g.10gb",
    "DCGM_FI_SYSTEM_DRIVER_VERSION": "580",
}


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        ([series(9.0, **FULL), series(8.0)], ("a", 0, "H100", "1g.10gb", "580")),
        ([series(8.0), series(9.0, **FULL)], ("a", 0, "H100", "1g.10gb", "580")),
        ([series(9.0), series(8.0, **FULL)], ("a", 0, "H100", "1g.10gb", "580")),
        ([series(9.0, gpu="7"), series(8.0, **FULL)], ("a", 7, "H100", "1g.10gb", "580")),
        ([series(9.0, modelName="L4"), series(8.0, **FULL)], ("a", 0, "L4", "1g.10gb", "580")),
        ([series(9.0, DCGM_FI_DRIVER_VERSION="590"), series(8.0, **FULL)],
         ("a", 0, "H100", "1g.10gb", "590")),
        ([series(9.0, node="b"), series(8.0, **FULL)], ("b", None, "", "", "")),
        ([series(9.0, gpu="1"), series(9.0, gpu="2")], ("a", 1, "", "", "")),
    ],
)  # fmt: skip
def test_the_newest_of_several_series_counts_and_an_older_one_of_the_node_adds_fields(
    rows: list[Row], row: tuple[str, int | None, str, str, str]
) -> None:
    found = devices(*rows)

    node, index, model, profile, driver = row
    assert found.added == [DeviceRow(node, "GPU-1", "", index, model, profile, driver)]
    assert found.scraped.tolist() == [9.0]
    assert found.evaluated_at == 100.0


def test_series_of_no_node_are_counted_and_the_first_is_the_example() -> None:
    found = devices(series(1.0, "GPU-2", "x"), series(1.0), series(1.0, "GPU-3", "y"))

    assert [row.uuid for row in found.added] == ["GPU-1"]
    assert (found.unmatched_series, found.unmatched_example) == (2, 'UUID="GPU-2", Hostname="x"')


@pytest.mark.parametrize(("count", "crowded"), [(MOST_ON_NODE, ""), (MOST_ON_NODE + 1, "a")])
def test_a_node_has_a_limited_number_of_devices(count: int, crowded: str) -> None:
    found = devices(*(series(1.0, f"GPU-{number}") for number in range(count)))

    assert (len(found.added), found.crowded_node) == (MOST_ON_NODE, crowded)


def table_of(*uuids: str) -> DeviceTable:
    table = DeviceTable()
    table.update(
        {row.key: row for row in (DeviceRow("a", one, "", 0, "", "", "") for one in uuids)}
    )
    return table


@pytest.mark.parametrize(
    ("values", "column", "of_all"),
    [
        ({"GPU-2": 7.0, "GPU-1": 5.0}, [5.0, 7.0], [5.0, 7.0]),
        ({"GPU-2": 7.0}, [np.nan, 7.0], None),
        ({"GPU-2": 7.0, "GPU-9": 5.0}, [np.nan, 7.0], None),
        ({"GPU-1": 5.0, "GPU-9": 6.0}, [5.0, np.nan], None),
        ({"GPU-1": 5.0, "GPU-2": np.nan}, [5.0, np.nan], None),
        ({"GPU-1": 5.0, "GPU-2": 7.0, "GPU-9": 6.0}, [5.0, 7.0], None),
        ({}, [np.nan, np.nan], None),
    ],
)
def test_a_column_has_the_value_of_each_device(
    values: dict[str, float], column: list[float], of_all: list[float] | None
) -> None:
    table = table_of("GPU-1", "GPU-2")

    vector = table.read(vector_of(values))

    np.testing.assert_array_equal(table.column(vector), column)
    found = table.column_of_all(vector)
    assert (None if found is None else found.tolist()) == of_all


@pytest.mark.parametrize(("count", "is_learned"), [(1, False), (2, True)])
def test_an_answer_about_half_of_the_devices_may_come_again(count: int, is_learned: bool) -> None:
    table = table_of("GPU-1", "GPU-2", "GPU-3", "GPU-4")
    answer = vector_of({f"GPU-{number + 1}": 5.0 for number in range(count)})
    table.read(answer)

    assert (table.recognize(answer.text) is not None) == is_learned


@pytest.mark.parametrize(
    ("labels", "is_exporter"),
    [
        ({"pod": "train-0", "container": "main", "service": "train"}, False),
        ({"pod": "train-0", "container": "dcgm-exporter"}, True),
        ({"pod": "my-dcgm-exporter-x"}, True),
        ({"pod": "dcgm-x7", "service": "dcgm"}, True),
        ({"pod": "dcgm", "service": "dcgm"}, False),
        ({"pod": "gpus-x7", "service": "gpus"}, False),
        ({"pod": "dcgm-x7"}, False),
        ({"pod": "listed"}, True),
        ({"pod": "up"}, True),
    ],
)
def test_an_exporter_is_known_by_the_server_the_cluster_or_its_names(
    labels: dict[str, str], is_exporter: bool
) -> None:
    rows = [{"metric": {"namespace": "ns", **labels}}]

    kept = without_exporters(rows, frozenset({"ns/up"}), frozenset({"ns/listed"}))

    assert kept == ([] if is_exporter else rows)


def test_pods_are_read_from_two_labels() -> None:
    rows = [
        {"metric": {"UUID": "GPU-1", "ns": "team", "pod": "a"}},
        {"metric": {"UUID": "GPU-1", "pod": "b"}},
        {"metric": {"UUID": "GPU-2", "ns": "team", "pod": ""}},
        {"metric": {"ns": "team", "pod": "c"}},
    ]

    tenants = tenants_in(rows, "ns", "pod")

    assert pods_of(rows, "ns", "pod") == {"team/a", "/b", "team/c"}
    assert tenants == {DeviceKey(("GPU-1", "")): {"team/a", "/b"}}
    others = {DeviceKey(("GPU-1", "")): ["a/z"], DeviceKey(("GPU-3", "")): ["a/y"]}
    assert merge_tenants([tenants, others]) == {
        DeviceKey(("GPU-1", "")): ("/b", "a/z", "team/a"),
        DeviceKey(("GPU-3", "")): ("a/y",),
    }
