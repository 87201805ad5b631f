"""Reads the values of an answer that is laid out as an earlier one was.

From one round to the next an answer has the same rows in the same order most of the time: only the
values differ, and the time of evaluation, which all rows have in common. What stands around them
is compared, byte by byte and for all rows at once, which takes a fifth of the time that parsing it
takes. Lives in the worker process.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from extender.core.devices.readings import Column

Text = bytes | memoryview
Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.intp]

_TIME: Final = b'},"value":['
"""Stands before a row's time. No text has it: its quotation marks would be escaped there."""

_MARK: Final = ord("[")
"""Ends it: where one stands, a row's time begins, or a label has one."""

_KEPT: Final = 4
"""Layouts that are kept: metrics that the same devices have share one, and each takes megabytes."""

_BLANK: Final = ord(" ")

_PIECE_BYTES: Final = 1 << 18
"""So much is searched or compared at a time: what that needs stays in the processor's cache."""

_WIDEST: Final = 32
"""Values of more characters are seldom, and read one by one."""

_NUMBERS: Final = msgspec.json.Decoder(list[float])

_SECONDS: Final = re.compile(rb'((?:0|[1-9][0-9]*)(?:\.[0-9]+)?),"')
"""A time as JSON has it, up to where the value begins."""


class Vector(NamedTuple):
    """What a vector says, row by row.

    Attributes:
        places: the place of each row's device in a column; -1 for none.
        values: its values.
        evaluated_at: their time, seconds since the epoch; None where it does not say.
    """

    places: Places
    values: Column
    evaluated_at: float | None


@dataclass(frozen=True, slots=True, eq=False)
class _Gaps:
    """What stands between the values of some rows and those of the next rows, without the times.

    Attributes:
        rows: the rows that have gaps of one length; not more than are compared at a time.
        length: this length.
        word: what is compared of the gaps, one after the other.
    """

    rows: Places
    length: int
    word: bytes


@dataclass(frozen=True, slots=True, eq=False)
class ResponseTemplate:
    """What stands around the values of an answer, and whose they are.

    Attributes:
        first: everything before the first row's time.
        gaps: what stands between the values.
        last: what is behind the last value.
        lengths: by row but the last, how long its gap is.
        marks: how many marks there are in all.
        times: by row, the number of the mark that its time stands behind.
        places: by row, the place of its device in a column; -1 for none.
        word: makes of gaps what is compared.
    """

    first: bytes
    gaps: Sequence[_Gaps]
    last: bytes
    lengths: Places
    marks: int
    times: Places
    places: Places
    word: Callable[[bytes], bytes]

    def read(self, text: Text, marks: Places) -> Vector | None:
        """Read an answer; None unless it is laid out so.

        Args:
            text: the answer.
            marks: where its marks are.
        """
        if len(marks) != self.marks or bytes(text[: len(self.first)]) != self.first:
            return None
        time = _time(text, len(self.first))
        times = marks[self.times] + 1
        starts, ends = times + len(time), np.empty_like(times)
        ends[:-1], ends[-1] = times[1:] - self.lengths, len(text) - len(self.last)
        if not time or (ends < starts).any() or bytes(text[ends[-1] :]) != self.last:
            return None
        if _windows(text, len(time))[times].tobytes() != time * len(times):
            return None
        for gaps in self.gaps:
            if self.word(_windows(text, gaps.length)[ends[gaps.rows]].tobytes()) != gaps.word:
                return None
        try:
            return Vector(self.places, _values(text, starts, ends), float(time[:-2]))
        except ValueError:  # what stands there is no number
            return None

    def is_same(self, other: "ResponseTemplate") -> bool:
        """Tell whether both are of the same rows in the same order."""
        return (
            (self.first, self.last) == (other.first, other.last)
            and np.array_equal(self.lengths, other.lengths)
            and all(
                one.word == another.word for one, another in zip(self.gaps, other.gaps, strict=True)
            )
        )


class ResponseTemplates:
    """The layouts of the latest answers; several threads may use them at once.

    Args:
        word: makes of the text around values what is kept and compared: all of it, or `short`.
    """

    def __init__(self, word: Callable[[bytes], bytes] = bytes) -> None:
        self._known: tuple[ResponseTemplate, ...] = ()
        self._word = word
        self._learning = Lock()  # two that learn at once would forget one of their layouts

    def forget(self) -> None:
        """Forget them all: devices have other places now."""
        self._known = ()

    def read(self, text: Text) -> Vector | None:
        """Read a vector; None where no layout is known that fits.

        Args:
            text: the list of rows as it came.
        """
        if not self._known:
            return None
        marks = _marks(text)
        read = (layout.read(text, marks) for layout in self._known)
        return next((vector for vector in read if vector is not None), None)

    def learn(self, text: bytes, places: Places) -> None:
        """Remember the layout of an answer that was parsed; `places` has one item for each row."""
        layout = _layout(text, places, self._word)
        with self._learning:
            if layout is not None and not any(map(layout.is_same, self._known)):
                self._known = (layout, *self._known)[:_KEPT]


def short(text: bytes) -> bytes:
    """Return a word in place of a text: equal for equal texts alone."""
    return blake2b(text, digest_size=16).digest()


def digest(text: Text) -> bytes:
    """Return a short word for a vector whose values never change: equal for equal rows."""
    whole = bytes(text)
    start = whole.find(_TIME)
    time = _time(whole, start + len(_TIME)) if start >= 0 else b""
    return short(whole.replace(_TIME + time, _TIME))


def evaluated_at(text: bytes) -> float | None:
    """Return the time of a vector's values, seconds since the epoch; None where it has none.

    Example:
        >>> evaluated_at(b'[{"metric":{},"value":[1700000000.5,"1"]}]')
        1700000000.5
    """
    start = text.find(_TIME)
    time = _time(text, start + len(_TIME)) if start >= 0 else b""
    return float(time[:-2]) if time else None


def _layout(text: bytes, places: Places, word: Callable[[bytes], bytes]) -> ResponseTemplate | None:
    """Return the layout of an answer; None where it has none that can be told."""
    start = text.find(_TIME) + len(_TIME)
    time = _time(text, start) if start >= len(_TIME) else b""
    if not time:
        return None
    _, *pieces = text.split(_TIME + time)
    behind = [piece[piece.find(b'"') :] for piece in pieces]
    if len(pieces) != len(places) or not all(piece.startswith(b'"') for piece in behind):
        return None
    first, last = text[:start], behind.pop()
    between = [piece + _TIME for piece in behind]
    lengths = np.array([len(gap) for gap in between], dtype=np.intp)
    marks = np.cumsum([first.count(_MARK), *(gap.count(_MARK) for gap in between)])
    gaps = []
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        at_once = max(1, _PIECE_BYTES // length)
        gaps += [
            _Gaps(some, length, word(b"".join(between[row] for row in some.tolist())))
            for some in np.split(rows, range(at_once, len(rows), at_once))
        ]
    return ResponseTemplate(
        first=first,
        gaps=gaps,
        last=last,
        lengths=lengths,
        marks=int(marks[-1]) + last.count(_MARK),
        times=marks - 1,
        places=places,
        word=word,
    )


def _time(text: Text, start: int) -> bytes:
    """Return the time that stands here, up to where the value does; empty where none does."""
    match = _SECONDS.match(bytes(text[start : start + 64]))
    return match[0] if match else b""


def _marks(text: Text) -> Places:
    """Return where a text has marks."""
    whole = np.frombuffer(text, dtype=np.uint8)
    starts = range(0, len(whole), _PIECE_BYTES)
    return np.concatenate(
        [np.flatnonzero(whole[at : at + _PIECE_BYTES] == _MARK) + at for at in starts]
    )


def _windows(text: Text, width: int) -> npt.NDArray[np.void]:
    """Return a view of so many bytes from each place on; places near the end have none."""
    count = max(0, len(text) - width + 1)
    return np.ndarray((count,), dtype=f"V{width}", buffer=text, strides=(1,))


def _values(text: Text, starts: Places, ends: Places) -> Column:
    """Read the numbers that stand between these places.

    Raises:
        ValueError: one of them is none.
    """
    lengths = ends - starts
    width = int(lengths.max())
    if width <= min(_WIDEST, int(ends[0])):
        # Each with what stands before it, which is blanked, and the quotation mark behind it.
        table = _windows(text, width + 1)[ends - width].view(np.uint8).reshape(-1, width + 1)
        table[:, -1] = ord(",")
        if int(lengths.min()) < width:
            table[:, :-1][np.arange(width, 0, -1) > lengths[:, np.newaxis]] = _BLANK
        elif (table == table[0]).all():  # most faults: no device has them
            return np.full(len(lengths), _number(bytes(text[starts[0] : ends[0]])))
        if table.min() < _BLANK:
            raise ValueError("control characters are in no text")
        try:
            values = _NUMBERS.decode(b"[%b]" % table.tobytes()[:-1])
        except msgspec.DecodeError:  # NaN, infinities, and what is no number
            values = []
        if len(values) == len(lengths):
            return np.array(values, dtype=np.float64)
    whole = bytes(text)
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    return np.array([_number(whole[start:end]) for start, end in spans], dtype=np.float64)


def _number(text: bytes) -> float:
    if min(text, default=0) < _BLANK:
        raise ValueError("neither is nothing a number, nor are control characters in any text")
    return float(text)
