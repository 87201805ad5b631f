"""A recognized answer gives the values of a JSON parser, and any other is parsed."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from extender.core.devices.readings import Signal
from extender.sources.prometheus import promql
from extender.sources.prometheus.dcgm_devices import DeviceRow, DeviceTable
from extender.sources.prometheus.protocol import PrometheusError, reduce_rows
from extender.sources.prometheus.responses import Recognized, Vector, parse_document, recognize_rows
from testkit.collecting import NOW, CollectorState
from testkit.prometheus.fake import FakePrometheus

Labels = dict[str, str]

UUIDS = ("GPU-1", "GPU-2", 'GPU-"3"', "GPU-[4]", "GPU-\\5", "GPU-ü", '"},"value":[1.5,"', "")
VALUES = ("0", "7", "0.367200", "81920", "-1", "NaN", "+Inf", "-Inf", "1e+30", "", "N/A", "1_0")
EDGES = (" 7", "1,2", "1],[2", "007", ".5", "1.", "0x10", "null", "true", "9" * 40, "0." + "0" * 60)

labels = st.builds(
    lambda uuid, instance, xid: {
        name: text for name, text in (("UUID", uuid), ("GPU_I_ID", instance), ("xid", xid)) if text
    },
    st.sampled_from(UUIDS),
    st.sampled_from(("", "", "3", "11")),
    st.sampled_from(("", "", "79", "[")),
)
values = st.sampled_from(VALUES + EDGES) | st.floats().map(repr) | st.integers().map(str)
rows = st.lists(st.tuples(labels, values), min_size=1, max_size=8)
times = st.sampled_from((1_700_000_000, 1_700_000_000.5, 1_700_000_010.123))


def answer(result: list[tuple[Labels, str]], at: float = 1.5, **others: object) -> bytes:
    """Return a whole answer as Prometheus writes it."""
    vector = [{"metric": metric, "value": [at, value]} for metric, value in result]
    data = {"resultType": "vector", "result": vector}
    document = {"status": "success", "data": data, **others}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def table_of(result: list[tuple[Labels, str]]) -> DeviceTable:
    """Return the table of the devices of an answer."""
    keys = {(metric.get("UUID", ""), metric.get("GPU_I_ID", "")) for metric, _ in result}
    devices = [DeviceRow("node", *key, None, "", "", "") for key in sorted(keys) if key[0]]
    table = DeviceTable()
    table.update({device.key: device for device in devices[:5]})
    return table


def parsed(table: DeviceTable, body: bytes) -> tuple[Mapping[str, Any], Vector] | None:
    """Parse a whole answer; return None if that fails."""
    document = parse_document(body)
    try:
        return document, reduce_rows(lambda whole: table.read(whole["data"]["result"]), document)
    except PrometheusError:
        return None


def assert_recognized_or_left(table: DeviceTable, body: bytes) -> bool:
    """Compare a recognized answer with a parsed one; return whether it was recognized."""
    found = recognize_rows(body, table.recognize)
    if found is None:
        return False
    plain = parsed(table, body)
    assert plain is not None
    document, vector = plain
    recognized = found["data"].pop("result")
    del document["data"]["result"]
    assert isinstance(recognized, Recognized)
    assert found == document
    assert recognized.value.positions.tolist() == vector.positions.tolist()
    np.testing.assert_array_equal(recognized.value.values, vector.values)
    assert recognized.value.evaluated_at == vector.evaluated_at
    return True


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@given(rows=rows, at=times, later=times, data=st.data())
def test_other_values_of_the_same_rows_are_recognized(
    rows: list[tuple[Labels, str]], at: float, later: float, data: st.DataObject
) -> None:
    table = table_of(rows)
    is_learned = parsed(table, answer(rows, at)) is not None and len(rows) >= len(table) / 2
    next_rows = [(metric, data.draw(values)) for metric, _ in rows]

    is_recognized = assert_recognized_or_left(table, answer(next_rows, later))

    # Numbers never need a parser, or recognizing would not be faster.
    if is_learned and all(is_number(value) for _, value in next_rows):
        assert is_recognized


alike = st.sampled_from("123456789").map(lambda digit: {"UUID": f"GPU-{digit}"})
"""Labels of equal length."""


@given(
    rows=st.lists(st.tuples(labels | alike, st.just("1")), min_size=1, max_size=8), data=st.data()
)
def test_changed_rows_are_never_mistaken_for_others(
    rows: list[tuple[Labels, str]], data: st.DataObject
) -> None:
    table = table_of(rows)
    parsed(table, answer(rows))
    changed = list(rows)
    for change in data.draw(
        st.lists(st.sampled_from(("drop", "add", "twice", "swap", "relabel")), max_size=3)
    ):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        if change == "add":
            changed.insert(at, (data.draw(labels), "1"))
        elif not changed:
            continue
        elif change == "drop":
            del changed[at]
        elif change == "twice":
            changed.append(changed[at])
        elif change == "swap":
            changed[at - 1], changed[at] = changed[at], changed[at - 1]
        else:
            changed[at] = (data.draw(labels | alike), "1")

    is_recognized = assert_recognized_or_left(table, answer(changed, 2.25))

    if [metric for metric, _ in changed] != [metric for metric, _ in rows]:
        assert not is_recognized


@given(rows=rows, data=st.data())
def test_a_damaged_answer_is_recognized_only_if_a_parser_agrees(
    rows: list[tuple[Labels, str]], data: st.DataObject
) -> None:
    rows = [(metric, "12.5") for metric, _ in rows]
    table = table_of(rows)
    parsed(table, answer(rows))
    body = bytearray(answer(rows, 2.25))
    pieces = st.sampled_from([b"[", b"]", b'"', b"{", b"}", b",", b"\\", b"\n", b"\0", b" ", b"7"])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(pieces | st.just(b""))

    assert_recognized_or_left(table, bytes(body))


@given(rows=rows, cut=st.integers(1, 400))
def test_a_truncated_answer_is_not_recognized(rows: list[tuple[Labels, str]], cut: int) -> None:
    rows = [(metric, "1") for metric, _ in rows]
    table = table_of(rows)
    parsed(table, answer(rows))

    assert not assert_recognized_or_left(table, answer(rows)[:-cut])


@pytest.mark.parametrize(
    "others",
    [
        {"warnings": ["a store is down"]},
        {"warnings": ["why }]} and []"], "infos": []},
        {"stats": {"seriesFetched": "2", "executionTimeMsec": 3}},
        {"status": "error", "errorType": "execution", "error": "too much"},
        {"data": {"resultType": "matrix", "result": []}},
        {"isPartial": True},
    ],
)
def test_the_text_around_the_rows_is_parsed_each_time(others: Mapping[str, object]) -> None:
    result = [({"UUID": "GPU-1"}, "1"), ({"UUID": "GPU-2"}, "2")]
    table = table_of(result)
    parsed(table, answer(result))

    is_recognized = assert_recognized_or_left(table, answer(result, 2.0, **others))

    assert is_recognized == ("data" not in others)


def test_a_second_result_counts_as_it_does_for_a_parser() -> None:
    result = [({"UUID": "GPU-1"}, "1")]
    table = table_of(result)
    parsed(table, answer(result))

    assert not assert_recognized_or_left(
        table, answer(result).removesuffix(b"}}") + b',"result":[]}}'
    )


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(5e-324)
@example(1.7976931348623157e308)
@example(9007199254740993.0)
def test_numbers_are_parsed_exactly(value: float) -> None:
    """Prometheus writes them without exponents, at any length."""
    result = [({"UUID": "GPU-1"}, "0"), ({"UUID": "GPU-2"}, "0")]
    table = table_of(result)
    parsed(table, answer(result))
    text = np.format_float_positional(value, trim="-")

    found = recognize_rows(
        answer([({"UUID": "GPU-1"}, text), ({"UUID": "GPU-2"}, repr(value))]), table.recognize
    )

    assert found is not None
    assert found["data"]["result"].value.values.tolist() == [value, value]


def test_after_the_devices_changed_nothing_is_recognized() -> None:
    result = [({"UUID": "GPU-1"}, "1"), ({"UUID": "GPU-2"}, "2")]
    table = table_of(result)
    parsed(table, answer(result))
    row = DeviceRow("node", "GPU-3", "", None, "", "", "")

    table.update({row.key: row})

    assert recognize_rows(answer(result), table.recognize) is None


def test_a_large_answer_is_recognized() -> None:
    def result(number: int) -> list[tuple[Labels, str]]:
        return [
            ({"UUID": f"GPU-{row:032d}", **({"GPU_I_ID": "7"} if row % 3 else {})}, str(row * row))
            for row in range(number, number + 9_000)
        ]

    table = table_of(result(0))
    parsed(table, answer(result(0)))

    assert assert_recognized_or_left(table, answer(result(0), 2.0))
    other = answer(result(0), 2.0).replace(b"%032d" % 8_900, b"%032d" % 8_999_999)
    assert not assert_recognized_or_left(table, other)


class Compact:
    """A Prometheus that writes JSON as the real one does.

    Attributes:
        rows: rows by a part of their query; the first match counts.
        others: other fields of its answers.
        at: its clock.
    """

    def __init__(self, fake: FakePrometheus) -> None:
        self.rows: dict[str, list[tuple[Labels, str]]] = {}
        self.others: dict[str, object] = {}
        self.at = NOW
        fake.handler = self._answer

    async def _answer(self, request: web.Request) -> web.Response:
        query = request.query.get("query", "")
        if not query:
            body = msgspec.json.encode(
                {"status": "success", "data": ["DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_XID_ERRORS"]}
            )
        else:
            is_of_shares = f"{promql.SHARE_LABEL}!=" in query  # this query names other metrics, too
            rows = next((rows for word, rows in self.rows.items() if word in query), [])
            rows = [] if is_of_shares else rows
            body = answer(rows, self.at, **self.others)
        return web.Response(body=body, content_type="application/json")


def two_gpus(seen: str = f"{NOW:.3f}", *, node: str = "gpu-1") -> list[tuple[Labels, str]]:
    return [({"UUID": f"GPU-{gpu}", "Hostname": node, "gpu": gpu}, seen) for gpu in "12"]


async def test_a_round_like_the_one_before_parses_no_rows(
    fake: FakePrometheus, parsing: list[int]
) -> None:
    compact = Compact(fake)
    held = {"UUID": "GPU-1", "exported_namespace": "ns", "exported_pod": "a"}
    compact.rows = {
        "modelName": two_gpus(),
        "timestamp(": [({"UUID": f"GPU-{gpu}"}, f"{NOW:.3f}") for gpu in "12"],
        "exported_pod!=": [(held, "1")],
        "exported_pod=": [],
        "XID": [({"UUID": "GPU-2"}, "79")],
        "GPU_UTIL": [({"UUID": "GPU-1"}, "40"), ({"UUID": "GPU-2"}, "60")],
    }
    state = CollectorState(fake.url)
    for moment in (0, 10):
        await state.round(NOW + moment)
    parsing.clear()
    compact.at = NOW + 20
    compact.rows["GPU_UTIL"] = [({"UUID": "GPU-1"}, "41"), ({"UUID": "GPU-2"}, "NaN")]

    await state.round(NOW + 20)

    assert parsing == []
    assert state.value(Signal.GPU_UTILIZATION) == pytest.approx(0.41)
    assert np.isnan(state.value(Signal.GPU_UTILIZATION, "GPU-2"))
    assert state.value(Signal.XID, "GPU-2") == 79
    assert state.held() == {"1": ("ns/a",)}


async def test_unchanged_devices_are_not_parsed_again(
    fake: FakePrometheus, parsing: list[int]
) -> None:
    compact = Compact(fake)
    compact.rows = {"modelName": two_gpus()}
    state = CollectorState(fake.url)
    await state.round(NOW)
    parsing.clear()
    compact.at = NOW + 60
    compact.rows = {"modelName": two_gpus(f"{NOW + 55:.3f}")}

    found = await state.round(NOW + 60)

    assert parsing == []
    assert (list(found.removed), list(found.added)) == ([], [])
    assert found.measured_at.tolist() == [NOW + 25] * 2

    compact.at = NOW + 120
    compact.rows = {"modelName": two_gpus(f"{NOW + 115:.3f}", node="gpu-h100-01")}
    found = await state.round(NOW + 120)

    assert [row.node for row in found.added] == ["gpu-h100-01"] * 2


async def test_a_recognized_answer_with_a_warning_is_partial(
    fake: FakePrometheus, parsing: list[int]
) -> None:
    compact = Compact(fake)
    compact.rows = {
        "modelName": two_gpus(),
        "timestamp(": [({"UUID": f"GPU-{gpu}"}, f"{NOW:.3f}") for gpu in "12"],
    }
    state = CollectorState(fake.url)
    for moment in (0, 10):
        assert (await state.round(NOW + moment)).partial_answers == 0
    parsing.clear()
    fake.queries.clear()
    compact.others = {"warnings": ["a store is down"]}

    found = await state.round(NOW + 20)

    assert parsing == []
    assert found.partial_answers == len(fake.queries)
    assert found.warning == "['a store is down']"
