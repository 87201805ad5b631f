"""Parse answers of Prometheus row by row: parsed at once they take ten times the text's memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Generic, TypeVar, overload

import msgspec
from typing_extensions import override  # in typing from Python 3.12 on

from extender.runtime.decoding import MalformedError, decode_with

Row = Mapping[str, Any]
"""One element of a result: `metric` (its labels) and `value` or `values`."""

_Fields = dict[str, msgspec.Raw]

_T = TypeVar("_T")

_FIELDS: Final = msgspec.json.Decoder(_Fields)
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ANYTHING: Final = msgspec.json.Decoder()

_RESULT: Final = b'"result":'
_END: Final = b"]}]"
_PLACEHOLDER: Final = b'["rows"]'


class Rows(Sequence[Row]):
    """Rows of a vector or a matrix; each row is parsed on access and not stored.

    Args:
        text: JSON list of the rows.
    """

    def __init__(self, text: bytes) -> None:
        self.text = text

    @cached_property
    def _raw(self) -> Sequence[msgspec.Raw]:
        """JSON text of each row."""
        return _ITEMS.decode(self.text)

    @override
    def __len__(self) -> int:
        return len(self._raw)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    @override
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return list(map(_ANYTHING.decode, self._raw[index]))
        row: Row = _ANYTHING.decode(self._raw[index])
        return row

    @override
    def __iter__(self) -> Iterator[Row]:
        return map(_ANYTHING.decode, self._raw)


@dataclass(frozen=True, slots=True)
class Recognized(Generic[_T]):
    """Result computed from the rows' JSON text without parsing it."""

    value: _T


def recognize_nothing(_: memoryview) -> None:
    """Recognize no rows."""


def parse_document(body: bytes | bytearray) -> dict[str, Any]:
    """Parse an answer but not its rows; return {} if it is not a JSON object.

    Example:
        >>> document = parse_document(b'{"status": "success", "data": {"result": [{"value": 1}]}}')
        >>> document["status"], list(document["data"]["result"])
        ('success', [{'value': 1}])
    """
    try:
        return decode_with(_read_document, body)
    except MalformedError:
        return {}


def _read_document(body: bytes | bytearray) -> dict[str, Any]:
    fields = _FIELDS.decode(body)
    return {
        name: _read_data(raw) if name == "data" else _ANYTHING.decode(raw)
        for name, raw in fields.items()
    }


def recognize_rows(
    body: bytes | bytearray, recognize: Callable[[memoryview], _T | None]
) -> dict[str, Any] | None:
    """Parse an answer without its rows, and compute a result from the rows' JSON text.

    Args:
        body: the answer.
        recognize: computes the result from the JSON text of all rows; None if it does not know this
            text to be a JSON list.

    Returns:
        As `parse_document`, with the result in place of the rows; None if they are not recognized.

    Example:
        >>> body = b'{"status":"success","data":{"result":[{"value":[1,"2"]}]}}'
        >>> recognize_rows(body, len)
        {'status': 'success', 'data': {'result': Recognized(value=19)}}
    """
    start, end = body.find(_RESULT) + len(_RESULT), body.rfind(_END) + len(_END)
    if start < len(_RESULT) or end <= start:
        return None
    value = recognize(memoryview(body)[start:end])
    if value is None:
        return None
    # The rows are a JSON list, so the document stays valid with another list in their place.
    document = parse_document(body[:start] + _PLACEHOLDER + body[end:])
    data = document.get("data")
    if not isinstance(data, dict):
        return None
    rows = data.get("result")
    if not isinstance(rows, Rows) or rows.text != _PLACEHOLDER:
        return None
    return {**document, "data": {**data, "result": Recognized(value)}}


def _read_data(raw: msgspec.Raw) -> object:
    try:
        fields = _FIELDS.decode(raw)
    except msgspec.ValidationError:  # not an object: a list of names, or nothing usable
        return _ANYTHING.decode(raw)
    return {
        name: _read_result(part) if name == "result" else _ANYTHING.decode(part)
        for name, part in fields.items()
    }


def _read_result(raw: msgspec.Raw) -> object:
    text = bytes(raw)
    return Rows(text) if text.startswith(b"[") else _ANYTHING.decode(text)
