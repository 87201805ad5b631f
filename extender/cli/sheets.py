"""Tables in the manner of kubectl: no lines, nothing cut, states told by word and by colour."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override  # in typing from Python 3.12 on

from extender.cli.session import WIDE
from extender.cli.words import clean

RIGHT: Final = ">"
"""Before a column's name: its values are numbers, stand on the right, and are never folded."""
WHOLE: Final = "="
"""Before a column's name: its values are single words that are never folded."""

WIDE_GAP: Final = 3
"""Blanks between two columns where there is room."""

STYLES: Final = {
    "idle": "green",
    "busy": "yellow",
    "unknown": "dim",
    "unhealthy": "bold red",
    "foreign": "magenta",
    "ready": "green",
    "cordoned": "yellow",
    "not ready": "bold red",
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
"""Colours of words that say how something is."""

Cell = str | Text


class Sheet(Table):
    """A table whose columns move together in a narrow terminal before anything is folded.

    Then names are folded, and of columns of numbers the heads.
    """

    @override
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield its lines."""
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
        # Each column has a blank after it, and one that is folded a letter at least.
        if sum(needed) + 2 * len(self.columns) - len(whole) > width:
            for column in whole:
                column.no_wrap = False  # else it would be cut


def _lines(column: Column) -> Iterable[str]:
    """Yield what stands in a column, line by line; of its texts each is one."""
    yield from str(column.header).split("\n")
    yield from map(str, column.cells)


def sheet(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """Return a table.

    Args:
        columns: names, `RIGHT` or `WHOLE` before some.
        rows: cells; a text of others is shown as it is, never as markup.
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
    """Return a word in its colour."""
    return Text(clean(text), style=STYLES.get(text, ""))


def line(text: str, style: str = "") -> Text:
    """Return a line of text."""
    return Text(clean(text), style=style)


def stack(parts: Iterable[RenderableType | None]) -> Group:
    """Return what is there of these, one below the other."""
    return Group(*(part for part in parts if part is not None))
