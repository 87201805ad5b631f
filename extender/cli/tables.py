"""Tables in kubectl's style: no borders, no truncated cells, states as colored words."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override  # in typing from Python 3.12 on

from extender.cli.formatting import clean
from extender.cli.session import WIDE

RIGHT: Final = ">"
"""Prefix of a column name: the values are numbers, aligned right and never folded."""
WHOLE: Final = "="
"""Prefix of a column name: the values are single words that are never folded."""

WIDE_GAP: Final = 3
"""Blanks between two columns if the width permits."""

STYLES: Final = {
    "idle": "green",
    "busy": "yellow",
    "stale": "dim yellow",
    "unknown": "dim",
    "unhealthy": "bold red",
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


class Sheet(Table):
    """Table that, in a narrow terminal, narrows its gaps before it folds names and headers."""

    @override
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table's lines, narrowed to the console's width."""
        if options.max_width < WIDE:
            natural = self.__rich_measure__(console, options.update_width(WIDE)).maximum
            if natural > options.max_width:
                self._move_together(options.max_width)
        yield from super().__rich_console__(console, options)

    def _move_together(self, width: int) -> None:
        self.padding = (0, 1, 0, 0)
        whole = [column for column in self.columns if column.no_wrap]
        for column in whole:
            column.header = str(column.header).replace(" ", "\n")
        needed = [max(map(cell_len, _lines(column))) for column in whole]
        # Each column needs a blank after it, and a folded column at least one letter.
        if sum(needed) + 2 * len(self.columns) - len(whole) > width:
            for column in whole:
                column.no_wrap = False  # rich would truncate the column


def _lines(column: Column) -> Iterable[str]:
    """Yield the header's lines and the cells of a column."""
    yield from str(column.header).split("\n")
    yield from map(str, column.cells)


def sheet(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """Build a table from column names and rows.

    Args:
        columns: names, some prefixed with `RIGHT` or `WHOLE`.
        rows: cells; a `str` is printed literally, never as markup.
    """
    table = Sheet(
        box=None, pad_edge=False, padding=(0, WIDE_GAP, 0, 0), header_style="bold", show_edge=False
    )
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.startswith(RIGHT) else "left"
        is_whole = name.startswith((RIGHT, WHOLE))
        table.add_column(
            name.lstrip(RIGHT + WHOLE), justify=justify, overflow="fold", no_wrap=is_whole
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row))
    return table


def word(text: str) -> Text:
    """Return a state word in its color."""
    return Text(clean(text), style=STYLES.get(text, ""))


def line(text: str, style: str = "") -> Text:
    """Return a line of text, printed literally."""
    return Text(clean(text), style=style)


def stack(parts: Iterable[RenderableType | None]) -> Group:
    """Stack renderables vertically, skipping those that are None."""
    return Group(*(part for part in parts if part is not None))
