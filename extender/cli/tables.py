"""Tables in kubectl's style: no borders, no truncated cells, states as colored words.

A table is never wider than the terminal. To fit, it narrows its gaps, moves the columns of `-o
wide` under their rows, drops optional columns, and folds names and prose, in this order.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from extender.cli.formatting import NOTHING, clean, listed

_RIGHT: Final = ">"
"""Prefix of a column name: the values are numbers, aligned right and never folded."""
_WHOLE: Final = "="
"""Prefix of a column name: the values are single words that are never folded."""
_OPTIONAL: Final = "?"
"""Prefix of a column name, before the others: the column is dropped in a narrow terminal."""
_UNDER: Final = "_"
"""Prefix of a column name: in a narrow terminal the values are under their row, as with the columns
of `-o wide`."""

_WIDE_GAP: Final = 3
"""Blanks between two columns if the width permits."""

LEAST_PROSE, MOST_WORD = 12, 30
"""Width up to which a folded column is widened by dropping another column: the width of its longest
word, within these limits."""

_INDENT: Final = "    "
"""Indentation of values that are moved under their row."""

_WORD: Final = re.compile(r"\s*\S+")
_PATH: Final = re.compile(r"[^/]*/|[^/]+$")
_PIECE: Final = re.compile(r"[^\-.,:/]*[\-.,:/]+|[^\-.,:/]+$")
"""Parts of a word between which it may be folded."""

STYLES: Final = {
    "idle": "green",
    "held idle": "cyan",
    "busy": "yellow",
    "stale": "dim yellow",
    "unknown": "dim",
    "unhealthy": "bold red",
    "excluded": "red",
    "foreign": "magenta",
    "Ready": "green",
    "Ready,SchedulingDisabled": "yellow",
    "NotReady": "bold red",
    "NotReady,SchedulingDisabled": "bold red",
    "refused": "yellow",
    "unschedulable": "yellow",
    "placing": "cyan",
    "nominated": "cyan",
    "bound": "green",
    "yes": "green",
    "no": "yellow",
    "shadow": "dim",
    "shadow: same": "dim",
    "shadow: another": "dim",
}
"""Color of each state word."""

Cell = str | Text


@dataclass(slots=True, kw_only=True)
class _Column:
    """A column of a table.

    Attributes:
        is_right: whether values are aligned right.
        is_whole: whether values are never folded.
        is_optional: whether it is dropped in a narrow terminal.
        is_extra: whether a narrow terminal shows it under the rows.
        at: index of its cells in a row.
        least: width without a fold inside a word.
        natural: width without any fold.
    """

    name: str
    is_right: bool
    is_whole: bool
    is_optional: bool
    is_extra: bool
    at: int
    least: int = 0
    natural: int = 0
    width: int = 0


class _Sheet:
    """Table that fits the console's width.

    Args:
        columns: names, some with prefixes.
        extra: names of the columns of `-o wide`, after the others.
    """

    def __init__(
        self, columns: Sequence[str], extra: Sequence[str], rows: Sequence[Sequence[Text]]
    ) -> None:
        self._columns = [
            _column(name, at, is_extra=at >= len(columns))
            for at, name in enumerate((*columns, *extra))
        ]
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the table."""
        width = options.max_width
        columns, under, gap = self._layout(width)
        heads = [Text(one.name, style="bold") for one in columns]
        yield from _lines(heads, columns, gap, is_head=True)
        for row in self._rows:
            yield from _lines([row[one.at] for one in columns], columns, gap)
            notes = [
                f"{one.name.lower()}: {row[one.at].plain}"
                for one in under
                if row[one.at].plain not in {"", NOTHING}
            ]
            if notes:
                text = Text("; ".join(notes), style="dim")
                for part in _fold(text, width - len(_INDENT)):
                    yield Text.assemble(_INDENT, part, no_wrap=True)

    def _layout(self, width: int) -> tuple[list[_Column], list[_Column], int]:
        """Return the columns to show, those to move under the rows, and the gap."""
        columns, under, gap = list(self._columns), list[_Column](), _WIDE_GAP
        for one in columns:
            cells = [row[one.at] for row in self._rows]
            one.natural = one.width = max(cell_len(one.name), *(map(_length, cells)), 1)
        if _total(columns, gap) <= width:
            return columns, under, gap
        gap = 1
        for one in columns:
            cells = [row[one.at] for row in self._rows]
            head = max(map(cell_len, one.name.split(" ")))
            one.natural = max(head, *map(_length, cells), 1)
            words = [word for cell in cells for word in cell.plain.split()]
            longest = max(map(cell_len, words), default=0)
            pieces = [piece for word in words for piece in _PIECE.findall(word)]
            one.least = max(head, *map(cell_len, pieces), 1)
            one.width = min(one.natural, max(min(longest, MOST_WORD), one.least, LEAST_PROSE))
            if one.is_whole:
                one.least = one.natural
            if one.is_whole or one.is_extra:
                one.width = one.natural
        if _total(columns, gap) > width:
            under = [one for one in columns if one.is_extra]
            columns = [one for one in columns if not one.is_extra]
        for one in reversed([one for one in columns if one.is_optional]):
            if _total(columns, gap) > width:
                columns.remove(one)
        _fit(columns, width - gap * (len(columns) - 1))
        return columns, under, gap


def _column(name: str, at: int, *, is_extra: bool) -> _Column:
    bare = name.lstrip(_OPTIONAL + _UNDER)
    return _Column(
        name=bare.lstrip(_RIGHT + _WHOLE),
        is_right=bare.startswith(_RIGHT),
        is_whole=bare.startswith((_RIGHT, _WHOLE)),
        is_optional=name.startswith(_OPTIONAL),
        is_extra=is_extra or name.startswith(_UNDER),
        at=at,
    )


def _fit(columns: Sequence[_Column], width: int) -> None:
    """Reduce column widths to a sum of at most `width`; fold inside words as the last resort."""
    for one in columns:
        one.width = one.natural
    for least in ([one.least for one in columns], [1] * len(columns)):
        while sum(one.width for one in columns) > width:
            wide = [one for one, bound in zip(columns, least, strict=True) if one.width > bound]
            if not wide:
                break
            widest = max(wide, key=lambda one: one.width)
            over = sum(one.width for one in columns) - width
            bound = least[columns.index(widest)]
            others = [one.width for one in wide if one is not widest]
            next_width = max(others, default=bound)
            step = max(1, min(over, widest.width - next_width, widest.width - bound))
            widest.width -= step


def _total(columns: Sequence[_Column], gap: int) -> int:
    return sum(one.width for one in columns) + gap * (len(columns) - 1)


def _length(cell: Text) -> int:
    return cell_len(cell.plain)


def _lines(
    cells: Sequence[Text], columns: Sequence[_Column], gap: int, *, is_head: bool = False
) -> Iterator[Text]:
    """Yield the lines of one row; short cells align with the first lines of folded ones.

    A short header aligns with the last line of a folded header.
    """
    folded = [_fold(cell, one.width) for cell, one in zip(cells, columns, strict=True)]
    height = max(map(len, folded))
    if is_head:
        folded = [[Text()] * (height - len(parts)) + parts for parts in folded]
    for number in range(height):
        joined = Text(no_wrap=True)
        for column, parts in zip(columns, folded, strict=True):
            part = parts[number] if number < len(parts) else Text()
            blanks = " " * (column.width - _length(part))
            before, after = (blanks, "") if column.is_right else ("", blanks)
            joined.append(before).append_text(part).append(after + " " * gap)
        joined.rstrip()
        yield joined


def _fold(text: Text, width: int) -> list[Text]:
    """Fold a text into lines: between words, else between the parts of a name, else anywhere.

    Example:
        >>> [part.plain for part in _fold(Text("gpu-h100-03 is busy"), 11)]
        ['gpu-h100-03', 'is busy']
    """
    offsets, used = list[int](), 0
    for match in _WORD.finditer(text.plain):
        at, end = match.span()
        length = cell_len(match.group())
        if used and used + length > width:
            offsets.append(at)
            word = match.group().lstrip()
            at, used, length = end - len(word), 0, cell_len(word)
        for piece in [text.plain[at:end]] if length <= width else _parts(text.plain[at:end], width):
            if used and used + cell_len(piece) > width:
                offsets.append(at)
                used = 0
            at += len(piece)
            used += cell_len(piece)
    parts = list(text.divide(offsets))
    for number, part in enumerate(parts):
        part.rstrip()
        if number:
            blanks = len(part.plain) - len(part.plain.lstrip())
            parts[number] = part[blanks:]
    return parts


def _parts(word: str, width: int) -> list[str]:
    """Split a word that is longer than a line: after slashes, at punctuation, or anywhere."""
    for pattern in (_PATH, _PIECE):
        parts: list[str] = pattern.findall(word)
        if max(map(cell_len, parts)) <= width:
            return parts
    return list(word)


def sheet(
    columns: Sequence[str], rows: Iterable[Sequence[Cell]], extra: Sequence[str] = ()
) -> _Sheet:
    """Build a table from column names and rows.

    Args:
        columns: names, some with the prefix `_OPTIONAL` or `_UNDER`, then `_RIGHT` or `_WHOLE`.
        rows: cells; a `str` is printed literally, never as markup.
        extra: names of the columns of `-o wide`, whose cells follow the others.
    """
    texts = [
        [cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row] for row in rows
    ]
    return _Sheet(columns, extra, texts)


def word(text: str) -> Text:
    """Return a state word in its color."""
    return Text(clean(text), style=STYLES.get(text, ""))


def line(text: str, style: str = "") -> Text:
    """Return a line of text, printed literally."""
    return Text(clean(text), style=style)


def left_out(count: int, what: str = "") -> Text | None:
    """Return a note on the rows that `--limit` left out, None if there are none."""
    return line(f"and {count} more{what} (--limit)", "dim") if count > 0 else None


def unanswered(replicas: Sequence[str]) -> Text | None:
    """Return a note on the replicas that did not answer, None if there are none."""
    return line(f"replicas that do not answer: {listed(replicas)}", "yellow") if replicas else None


def stack(parts: Iterable[RenderableType | None]) -> Group:
    """Stack renderables vertically, skipping those that are None."""
    return Group(*(part for part in parts if part is not None))
