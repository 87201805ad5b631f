"""Render the settings as a Markdown table for docs/settings.md."""

from collections.abc import Iterable
from typing import Final

from extender.settings.spec import Kind, Setting

BEGIN: Final = "<!-- settings:begin -->"
END: Final = "<!-- settings:end -->"

_HEADER: Final = "| setting | unit or type | default | bounds | meaning |\n|---|---|---|---|---|"
_TYPES: Final = {
    Kind.BOOLEAN: "true or false",
    Kind.CHOICE: "choice",
    Kind.WHOLE: "count",
    Kind.NUMBER: "number",
    Kind.QUANTITY: "quantity (bytes)",
    Kind.TEXT: "text",
    Kind.PATH: "path",
    Kind.LIST: "list",
    Kind.MAP: "map",
}


def render_table(settings: Iterable[Setting]) -> str:
    """Render a Markdown table with one row for each setting."""
    return "\n".join([_HEADER, *map(_row, settings)]) + "\n"


def _row(setting: Setting) -> str:
    is_plain_number = setting.kind in {Kind.NUMBER, Kind.WHOLE}
    unit = setting.unit if setting.unit and is_plain_number else _TYPES[setting.kind]
    cells = (
        f"`{setting.name}`",
        unit,
        f"`{setting.default}`" if setting.default else "",
        setting.form or setting.bounds,
        setting.description,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
