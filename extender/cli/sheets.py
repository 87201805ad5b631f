"""Tables in the manner of kubectl: no lines, nothing cut, states told by word and by colour."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from extender.cli.words import clean

RIGHT: Final = ">"
"""Before a column's name: its values stand on the right."""

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


def sheet(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """Return a table.

    Args:
        columns: names; `>` before one puts its values on the right.
        rows: cells; a text of others is shown as it is, never as markup.
    """
    table = Table(
        box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold", show_edge=False
    )
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.startswith(RIGHT) else "left"
        table.add_column(name.removeprefix(RIGHT), justify=justify, overflow="fold")
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
