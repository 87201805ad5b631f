"""Render settings and health signs as Markdown tables for docs/settings.md."""

from collections.abc import Iterable
from typing import Final

from extender.core.policy import Health, HealthSign
from extender.settings.spec import Setting, SettingKind

_HEADER: Final = "| setting | unit or type | default | bounds | meaning |\n|---|---|---|---|---|"
_SIGNS_HEADER: Final = "| sign | default action | applies if |\n|---|---|---|"
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


def render_signs(health: Health) -> str:
    """Render a Markdown table with one row for each health sign.

    Args:
        health: the default actions.
    """
    rows = (f"| `{sign}` | `{getattr(health, sign)}` | {sign.description} |" for sign in HealthSign)
    return "\n".join([_SIGNS_HEADER, *rows]) + "\n"


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
