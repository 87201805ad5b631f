"""Render the settings as a Markdown table for docs/settings.md."""

from collections.abc import Iterable
from typing import Final

from extender.settings.spec import Setting, SettingKind

BEGIN: Final = "<!-- settings:begin -->"
END: Final = "<!-- settings:end -->"

_HEADER: Final = "| setting | unit or type | default | bounds | meaning |\n|---|---|---|---|---|"
_TYPES: Final = {
    SettingKind.BOOLEAN: "true or false",
    SettingKind.CHOICE: "choice",
    SettingKind.WHOLE: "count",
    SettingKind.NUMBER: "number",
    SettingKind.QUANTITY: "quantity (bytes)",
    SettingKind.TEXT: "text",
    SettingKind.PATH: "path",
    SettingKind.LIST: "list",
    SettingKind.MAP: "map",
}


def render_table(settings: Iterable[Setting]) -> str:
    """Render a Markdown table with one row for each setting."""
    return "\n".join([_HEADER, *map(_row, settings)]) + "\n"


def _row(setting: Setting) -> str:
    is_plain_number = setting.kind in {SettingKind.NUMBER, SettingKind.WHOLE}
    unit = setting.unit if setting.unit and is_plain_number else _TYPES[setting.kind]
    cells = (
        f"`{setting.name}`",
        unit,
        f"`{setting.default}`" if setting.default else "",
        setting.form or setting.bounds,
        setting.description,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
