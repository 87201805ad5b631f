"""A template reads exactly the values that a JSON parser reads, or does not match."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.sources.prometheus.responses import (
    ResponseTemplates,
    _parse_number,
    evaluated_at,
    fingerprint_rows,
)

labels = st.dictionaries(st.sampled_from(["UUID", "GPU_I_ID", "pod"]), st.text(max_size=8))
numbers = st.floats(width=32, allow_nan=False) | st.sampled_from([float("inf"), 0.0])
rows = st.lists(st.tuples(labels, numbers), min_size=1, max_size=8)


def vector(rows: list[tuple[dict[str, str], float]], at: float = 1_700_000_000.123) -> bytes:
    """Return rows as Prometheus writes them."""
    result = [{"metric": metric, "value": [at, f"{value:g}"]} for metric, value in rows]
    return json.dumps(result, separators=(",", ":"), ensure_ascii=False).encode()


@given(rows=rows, data=st.data())
def test_values_equal_those_of_a_parser(
    rows: list[tuple[dict[str, str], float]], data: st.DataObject
) -> None:
    templates = ResponseTemplates()
    templates.learn(vector(rows), np.arange(len(rows)))
    later = [(metric, data.draw(numbers)) for metric, _ in rows]
    text = vector(later, at=1_700_000_010.5)

    read = templates.read(text)

    assert read is not None
    assert read.positions.tolist() == list(range(len(rows)))
    assert read.values.tolist() == [float(row["value"][1]) for row in json.loads(text)]
    assert read.evaluated_at == 1_700_000_010.5


def test_a_value_may_be_longer_than_the_text_up_to_the_end_of_the_first() -> None:
    values = ["1", "0." + "2" * 29]
    rows = ",".join(f'{{"metric":{{}},"value":[1,"{value}"]}}' for value in values)
    text = f"[{rows}]".encode()
    templates = ResponseTemplates()
    templates.learn(text, np.arange(2))

    read = templates.read(text)

    assert read is not None
    assert read.values.tolist() == [float(value) for value in values]


@given(rows=rows, other=rows)
def test_rows_of_other_devices_do_not_match(
    rows: list[tuple[dict[str, str], float]], other: list[tuple[dict[str, str], float]]
) -> None:
    templates = ResponseTemplates()
    templates.learn(vector(rows), np.arange(len(rows)))

    read = templates.read(vector(other))

    is_same = [metric for metric, _ in rows] == [metric for metric, _ in other]
    assert (read is not None) == is_same


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'[{"metric":{"UUID":"a"},"value":[1.5,"N/A"]}]',
        b'[{"metric":{"UUID":"a"},"value":[1.5,7]}]',
        b'[{"metric":{"UUID":"a"},"values":[[1.5,"7"]]}]',
        b'[{"value":[1.5,"7"],"metric":{"UUID":"a"}}]',
        b'[{"metric":{"UUID":"a"},"value":[1.5,"7"]},{"metric":{"UUID":"b"},"value":[2.5,"8"]}]',
    ],
)
def test_an_answer_of_another_form_does_not_match(text: bytes) -> None:
    templates = ResponseTemplates()
    templates.learn(vector([({"UUID": "a"}, 1.0)]), np.zeros(1, dtype=np.intp))

    assert templates.read(text) is None
    templates.learn(text, np.zeros(7, dtype=np.intp))
    assert templates.read(text) is None


def test_no_answer_matches_that_differs_in_a_byte_around_its_numbers() -> None:
    text = vector([({"UUID": "a"}, 1.0), ({"UUID": "b"}, 2.0)])
    templates = ResponseTemplates()
    templates.learn(text, np.arange(2))

    for at, byte in enumerate(text):
        if chr(byte) not in "0123456789.":
            assert templates.read(text[:at] + b"~" + text[at + 1 :]) is None, at
    assert templates.read(text + b" ") is None


@pytest.mark.parametrize("other", ["xyz", "xyw", "zyx"])
def test_answers_that_differ_in_one_name_have_two_templates(other: str) -> None:
    """Names of different lengths: the texts between values are compared by their length."""
    templates = ResponseTemplates()
    texts = [
        vector([({"UUID": name}, 1.0) for name in ("a", "bb", last)]) for last in ("xyz", other)
    ]
    for text in texts:
        templates.learn(text, np.arange(3))

    assert all(templates.read(text) is not None for text in texts)
    assert len(templates._templates) == len(set(texts))


def test_after_clear_nothing_matches() -> None:
    templates = ResponseTemplates()
    text = vector([({"UUID": "a"}, 1.0)])
    templates.learn(text, np.zeros(1, dtype=np.intp))

    templates.clear()

    assert templates.read(text) is None


def test_the_latest_four_templates_are_kept() -> None:
    """Templates of all devices, of whole cards, of those with a memory temperature, and more."""
    templates = ResponseTemplates()
    texts = [vector([({"UUID": name}, 1.0)]) for name in "abcde"]
    for text in texts:
        templates.learn(text, np.zeros(1, dtype=np.intp))
        templates.learn(text, np.zeros(1, dtype=np.intp))

    assert [templates.read(text) is not None for text in texts] == [False, *[True] * 4]


def test_a_fingerprint_depends_on_the_rows_and_not_on_the_time() -> None:
    one, other = ({"pod": "a"}, 1.0), ({"pod": "b"}, 1.0)

    assert fingerprint_rows(vector([one, other], at=1.5)) == fingerprint_rows(
        vector([one, other], at=20.25)
    )
    assert fingerprint_rows(vector([one, other])) != fingerprint_rows(vector([other, one]))
    assert fingerprint_rows(b"[]") != fingerprint_rows(vector([one]))


@pytest.mark.parametrize("text", [b"[]", b'[{"metric":{}}]', b'[{"metric":{},"value":["?","1"]}]'])
def test_a_vector_without_a_time_has_none(text: bytes) -> None:
    assert evaluated_at(text) is None


@pytest.mark.parametrize("text", [b"", b"1\n", b"\t1", b"x"], ids=repr)
def test_a_value_is_a_number_without_control_characters(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"control characters|could not convert"):
        _parse_number(text)

    assert (_parse_number(b"-1.5"), _parse_number(b"+Inf")) == (-1.5, float("inf"))
