"""Parse answers of Prometheus row by row, or only the values of an answer with known rows.

Parsed at once, an answer takes ten times its text's memory.

Between rounds an answer usually has the same rows in the same order: only the values differ, and
the time of evaluation, which all rows share. The text around the values is compared with a
template, byte by byte for all rows at once. This takes a fifth of the time that parsing takes. Runs
in the worker process.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from threading import Lock
from typing import Any, Final, Generic, NamedTuple, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override  # in typing from Python 3.12 on

from extender.core.devices.readings import Column
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

Text = bytes | memoryview
_Bytes = npt.NDArray[np.uint8]
_Positions = npt.NDArray[np.intp]

_TIME_PREFIX: Final = b'},"value":['
"""Text before a row's time. No label contains it: its quotation marks would be escaped there."""

_MARK: Final = ord("[")
"""Last byte of `_TIME_PREFIX`: a "[" begins a row's time, or is part of a label."""

_MAX_TEMPLATES: Final = 4
"""Limit for the templates, which take megabytes each; metrics of the same devices share one."""

_BLANK: Final = ord(" ")

_CHUNK_BYTES: Final = 1 << 18
"""Bytes that are searched or compared at a time: the working set stays in the processor's cache."""

_MAX_VALUE_LENGTH: Final = 32
"""Longer values, in characters, are rare and parsed one by one."""

_NUMBERS: Final = msgspec.json.Decoder(list[float])

_SECONDS: Final = re.compile(rb'((?:0|[1-9][0-9]*)(?:\.[0-9]+)?),"')
"""A time in JSON, up to the quotation mark of the value."""


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


class Vector(NamedTuple):
    """Values of a vector, row by row.

    Attributes:
        positions: position of each row's device in a column; -1 for none.
        values: value of each row.
        evaluated_at: time of evaluation, seconds since the epoch; None if unknown.
    """

    positions: _Positions
    values: Column
    evaluated_at: float | None


@dataclass(frozen=True, slots=True, eq=False)
class _Gaps:
    """Text between the values of some rows and those of the next rows, without the times.

    Attributes:
        rows: rows whose gaps have the same length; not more than are compared at a time.
        length: length of these gaps.
        fingerprint: the gaps, one after the other, or their fingerprint.
    """

    rows: _Positions
    length: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True, eq=False)
class _ResponseTemplate:
    """Text around the values of an answer, and the devices of its rows.

    Attributes:
        first: text before the first row's time.
        gaps: text between the values.
        last: text after the last value.
        lengths: length of the gap after each row but the last.
        marks: number of marks in the answer.
        times: for each row, the index of the mark before its time.
        positions: position of each row's device in a column; -1 for none.
        fingerprint: computes from gaps the bytes that are compared.
    """

    first: bytes
    gaps: Sequence[_Gaps]
    last: bytes
    lengths: _Positions
    marks: int
    times: _Positions
    positions: _Positions
    fingerprint: Callable[[bytes], bytes]

    def read(self, text: Text, marks: _Positions) -> Vector | None:
        """Parse the values of an answer; return None if its text differs from the template.

        Args:
            text: the answer.
        """
        if len(marks) != self.marks or bytes(text[: len(self.first)]) != self.first:
            return None
        time = _time_at(text, len(self.first))
        times = marks[self.times] + 1
        starts, ends = times + len(time), np.empty_like(times)
        ends[:-1], ends[-1] = times[1:] - self.lengths, len(text) - len(self.last)
        if not time or (ends < starts).any() or bytes(text[ends[-1] :]) != self.last:
            return None
        if _windows(text, len(time))[times].tobytes() != time * len(times):
            return None
        for gaps in self.gaps:
            if (
                self.fingerprint(_windows(text, gaps.length)[ends[gaps.rows]].tobytes())
                != gaps.fingerprint
            ):
                return None
        try:
            return Vector(self.positions, _parse_values(text, starts, ends), float(time[:-2]))
        except ValueError:  # a value is not a number
            return None

    def is_same(self, other: "_ResponseTemplate") -> bool:
        """Return whether both templates are for the same rows in the same order."""
        return (
            (self.first, self.last) == (other.first, other.last)
            and np.array_equal(self.lengths, other.lengths)
            and all(
                ours.fingerprint == theirs.fingerprint
                for ours, theirs in zip(self.gaps, other.gaps, strict=True)
            )
        )


class ResponseTemplates:
    """Templates of the latest answers; thread-safe.

    Args:
        fingerprint: computes from the text around values the bytes that are stored and compared:
            the text itself, or `short_fingerprint`.
    """

    def __init__(self, fingerprint: Callable[[bytes], bytes] = bytes) -> None:
        self._templates: tuple[_ResponseTemplate, ...] = ()
        self._fingerprint = fingerprint
        self._lock = Lock()  # two threads that learn at once would lose a template

    def clear(self) -> None:
        """Remove all templates: the positions of devices have changed."""
        self._templates = ()

    def read(self, text: Text) -> Vector | None:
        """Read a vector; return None if no template matches.

        Args:
            text: JSON list of the rows.
        """
        if not self._templates:
            return None
        marks = _find_marks(text)
        read = (template.read(text, marks) for template in self._templates)
        return next((vector for vector in read if vector is not None), None)

    def learn(self, text: bytes, positions: _Positions) -> None:
        """Add a template of a parsed answer; `positions` has one item per row."""
        template = _build_template(text, positions, self._fingerprint)
        with self._lock:
            if template is not None and not any(map(template.is_same, self._templates)):
                self._templates = (template, *self._templates)[:_MAX_TEMPLATES]


def short_fingerprint(text: bytes) -> bytes:
    """Return a short fingerprint of a text."""
    return blake2b(text, digest_size=16).digest()


def fingerprint_rows(text: Text) -> bytes:
    """Return a short fingerprint of the rows of a vector with constant values, without its time."""
    whole = bytes(text)
    start = whole.find(_TIME_PREFIX)
    time = _time_at(whole, start + len(_TIME_PREFIX)) if start >= 0 else b""
    return short_fingerprint(whole.replace(_TIME_PREFIX + time, _TIME_PREFIX))


def evaluated_at(text: bytes) -> float | None:
    """Return the evaluation time of a vector, seconds since the epoch; None if it has none.

    Example:
        >>> evaluated_at(b'[{"metric":{},"value":[1700000000.5,"1"]}]')
        1700000000.5
    """
    start = text.find(_TIME_PREFIX)
    time = _time_at(text, start + len(_TIME_PREFIX)) if start >= 0 else b""
    return float(time[:-2]) if time else None


def _build_template(
    text: bytes, positions: _Positions, fingerprint: Callable[[bytes], bytes]
) -> _ResponseTemplate | None:
    """Return the template of an answer; None if its text has an unexpected form."""
    start = text.find(_TIME_PREFIX) + len(_TIME_PREFIX)
    time = _time_at(text, start) if start >= len(_TIME_PREFIX) else b""
    if not time:
        return None
    _, *parts = text.split(_TIME_PREFIX + time)
    after = [piece[piece.find(b'"') :] for piece in parts]
    if len(parts) != len(positions) or not all(piece.startswith(b'"') for piece in after):
        return None
    first, last = text[:start], after.pop()
    between = [piece + _TIME_PREFIX for piece in after]
    lengths = np.array([len(gap) for gap in between], dtype=np.intp)
    marks = np.cumsum([first.count(_MARK), *(gap.count(_MARK) for gap in between)])
    gaps = []
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        at_once = max(1, _CHUNK_BYTES // length)
        gaps += [
            _Gaps(some, length, fingerprint(b"".join(between[row] for row in some.tolist())))
            for some in np.split(rows, range(at_once, len(rows), at_once))
        ]
    return _ResponseTemplate(
        first=first,
        gaps=gaps,
        last=last,
        lengths=lengths,
        marks=int(marks[-1]) + last.count(_MARK),
        times=marks - 1,
        positions=positions,
        fingerprint=fingerprint,
    )


def _time_at(text: Text, start: int) -> bytes:
    """Return the time at `start`, up to the quotation mark of the value; empty if there is none."""
    match = _SECONDS.match(bytes(text[start : start + 64]))
    return match[0] if match else b""


def _find_marks(text: Text) -> _Positions:
    whole = np.frombuffer(text, dtype=np.uint8)
    starts = range(0, len(whole), _CHUNK_BYTES)
    return np.concatenate(
        [np.flatnonzero(whole[at : at + _CHUNK_BYTES] == _MARK) + at for at in starts]
    )


def _windows(text: Text, width: int) -> npt.NDArray[np.void]:
    """Return a view of `width` bytes, not more than the text has, from each position on."""
    count = len(text) - width + 1
    return np.ndarray((count,), dtype=f"V{width}", buffer=text, strides=(1,))


def _parse_values(text: Text, starts: _Positions, ends: _Positions) -> Column:
    """Parse the numbers between these positions."""
    lengths = ends - starts
    width = int(lengths.max())
    if width <= min(_MAX_VALUE_LENGTH, int(ends[0])):
        # Each value with the text before it, which is blanked, and the quotation mark after it.
        table = _windows(text, width + 1)[ends - width].view(np.uint8).reshape(-1, width + 1)
        table[:, -1] = ord(",")
        table[:, :-1][np.arange(width, 0, -1) > lengths[:, np.newaxis]] = _BLANK
        if (table == table[0]).all():  # common for faults: 0 on all devices
            return np.full(len(lengths), _parse_number(bytes(text[starts[0] : ends[0]])))
        if table.min() < _BLANK:
            raise ValueError("a value contains control characters")
        try:
            values = _NUMBERS.decode(b"[%b]" % table.tobytes()[:-1])
        except msgspec.DecodeError:  # NaN, infinity, or not a number
            values = []
        if len(values) == len(lengths):
            return np.array(values, dtype=np.float64)
    whole = bytes(text)
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    return np.array([_parse_number(whole[start:end]) for start, end in spans], dtype=np.float64)


def _parse_number(text: bytes) -> float:
    if min(text, default=0) < _BLANK:
        raise ValueError("a value is empty or contains control characters")
    return float(text)
