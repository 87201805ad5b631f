"""Test descriptions of settings, their rows in docs/settings.md, and messages about values."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

import pytest
from pydantic import BaseModel, Field

from extender.core.quantity import MIB
from extender.settings.config import Settings, all_settings
from extender.settings.section import Quantity, Section, Share, Unit, ValueForm
from extender.settings.spec import Setting, SettingKind, list_settings, show_value
from tests.extender.settings.settings_files import load, problems
from tests.files import ROOT

PAGE: Final = (ROOT / "docs/settings.md").read_text(encoding="utf-8")


class _Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class _Inner(Section):
    window_seconds: float = Field(default=2.5, ge=0.5, le=90, description="a window")
    bare: int = Field(default=0, description="a number")


class _Model(Section):
    inner: _Inner = _Inner()
    is_on: bool = False
    color: _Color = _Color.BLUE
    size: Literal["small", "large"] | None = None
    pages: Annotated[int, Field(ge=1024, le=2048)] = 1024
    room: Annotated[Quantity, Field(ge=1024, le=3 * MIB)] | None = 2048
    least: Annotated[int, Field(ge=3)] = 4
    most: Annotated[int, Field(le=5)] = 4
    part: Annotated[float, Field(gt=0, le=1), Unit("ratio")] = 1.0
    below: Annotated[float, Field(ge=2, lt=3)] = 2.0
    share: Share = 0.25
    file: Path | None = None
    names: tuple[str, ...] = ("a", "b")
    words: list[str] = Field(default=["c"])
    prices: Annotated[dict[str, float], ValueForm("a map of prices")] = Field(default={"a": 1.0})


@pytest.mark.parametrize(
    ("name", "kind", "unit", "bounds", "default", "allowed"),
    [
        (
            "inner.window_seconds",
            SettingKind.NUMBER,
            "seconds",
            "0.5 to 90",
            "2.5",
            "a number from 0.5 to 90 seconds",
        ),
        ("inner.bare", SettingKind.WHOLE, "", "", "0", "a whole number"),
        ("is_on", SettingKind.BOOLEAN, "", "", "false", "true or false"),
        ("color", SettingKind.CHOICE, "", "red, blue", "blue", "one of red, blue"),
        ("size", SettingKind.CHOICE, "", "small, large", "", "one of small, large"),
        (
            "pages",
            SettingKind.WHOLE,
            "",
            "1024 to 2048",
            "1024",
            "a whole number from 1024 to 2048",
        ),
        (
            "room",
            SettingKind.QUANTITY,
            "bytes",
            "1024 to 3Mi",
            "2Ki",
            "a quantity from 1024 to 3Mi",
        ),
        ("least", SettingKind.WHOLE, "", "3", "4", "a whole number 3"),
        ("most", SettingKind.WHOLE, "", "5", "4", "a whole number 5"),
        (
            "part",
            SettingKind.NUMBER,
            "ratio",
            "more than 0, at most 1",
            "1",
            "a number more than 0, at most 1",
        ),
        (
            "below",
            SettingKind.NUMBER,
            "",
            "at least 2, less than 3",
            "2",
            "a number at least 2, less than 3",
        ),
        ("share", SettingKind.NUMBER, "ratio", "0 to 1", "0.25", "a number from 0 to 1"),
        ("file", SettingKind.PATH, "", "", "", "a path"),
        ("names", SettingKind.LIST, "", "", "a, b", "a list"),
        ("words", SettingKind.LIST, "", "", "c", "a list"),
        ("prices", SettingKind.MAP, "", "", "a: 1.0", "a map of prices"),
    ],
)
def test_a_setting_is_described_by_its_type_and_bounds(
    name: str, kind: SettingKind, unit: str, bounds: str, default: str, allowed: str
) -> None:
    setting = list_settings(_Model)[tuple(name.split("."))]

    described = (setting.kind, setting.unit, setting.bounds, setting.default, setting.allowed)
    assert described == (kind, unit, bounds, default, allowed)
    assert setting.variable == "IDLEGPU_" + name.replace(".", "_").upper()


def documented(name: str) -> dict[str, list[str]]:
    """Return the cells of each row of a table in docs/settings.md, by setting."""
    table = PAGE.partition(f"<!-- {name}:begin -->")[2].partition("<!--")[0]
    rows = (line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `"))
    return {cells[0].strip("`"): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_the_settings_in_force_are_the_documented_defaults(tmp_path: Path) -> None:
    sections = dict.fromkeys(path[0] for path in all_settings() if len(path) > 1)
    empty = "".join(f"{section}: {{}}\n" for section in sections)
    loaded, rows = load(tmp_path, f"listen: 127.0.0.1:8888\n{empty}"), documented("settings")
    assert loaded == Settings()

    in_force = {
        setting.name: (show_value(loaded, setting), setting.form or setting.bounds)
        for setting in all_settings().values()
    }

    assert in_force == {name: (row[1].strip("`"), row[2]) for name, row in rows.items()}


def test_a_type_is_documented_by_its_unit_or_its_kind() -> None:
    units = {name: row[0] for name, row in documented("settings").items()}

    assert {name: units[name] for name in UNITS} == UNITS


UNITS: Final = {
    "listen": "text",
    "allow_plain": "true or false",
    "kubeconfig": "path",
    "mode": "choice",
    "mps_share": "quantity (bytes)",
    "decisions.history": "count",
    "recent_seconds": "seconds",
    "resources": "list",
    "prices": "map",
    "spot_share": "ratio",
}


@pytest.mark.parametrize("value", ["yes", "true"])
@pytest.mark.parametrize("name", ["recent_seconds", "max_connections", "spot_share"])
def test_a_boolean_is_not_a_number(tmp_path: Path, name: str, value: str) -> None:
    (found,) = problems(tmp_path, f"{name}: {value}")

    assert found.startswith(f"settings.yaml: {name}: true is not allowed: must be a")


@pytest.mark.parametrize("value", ["[1]", "{a: 1}", "lots"])
def test_a_quantity_is_a_number_with_a_unit(tmp_path: Path, value: str) -> None:
    (found,) = problems(tmp_path, f"mps_share: {value}")

    assert found.endswith("is not allowed: must be a quantity from 1Mi to 1Ti")


@pytest.mark.parametrize(("length", "shown"), [(78, "x" * 78 + "'"), (79, "x" * 79 + "...")])
def test_a_long_value_is_shown_up_to_a_limit(tmp_path: Path, length: int, shown: str) -> None:
    (found,) = problems(tmp_path, f"strategy: {'x' * length}")

    assert found.startswith(f"settings.yaml: strategy: '{shown} is not allowed")


def test_an_unknown_section_is_named_as_such(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "freshnes: {}")

    assert found == "settings.yaml: freshnes: is no known setting: did you mean freshness?"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("prometheus: {headers: {a: b}}", {"prometheus.headers": "(hidden)"}),
        ("prometheus: {headers: {}}", {"prometheus.headers": ""}),
        ("prometheus: {bearer_token_file: /t}", {"prometheus.bearer_token_file": "/t"}),
        ("prometheus: {url: 'http://a:b@c/d'}", {"prometheus.url": "http://(hidden)@c/d"}),
        ("mps_share: 20Gi", {"mps_share": "20Gi"}),
        ("recent_seconds: 60.5", {"recent_seconds": "60.5"}),
        ("resources: [a.b/c, d.e/f]", {"resources": "a.b/c, d.e/f"}),
        ("prices: {H100: 2}", {"prices": "H100: 2.0"}),
        ("allow_plain: true", {"allow_plain": "true"}),
        ("kubeconfig: /k", {"kubeconfig": "/k"}),
    ],
)
def test_a_value_is_shown_as_in_the_file_without_secrets(
    tmp_path: Path, text: str, shown: dict[str, str]
) -> None:
    loaded, settings = load(tmp_path, text), all_settings()

    assert {name: show_value(loaded, settings[tuple(name.split("."))]) for name in shown} == shown


def test_a_model_of_its_own_has_variables_of_its_own() -> None:
    class One(BaseModel):
        port: int = 7

    (setting,) = list_settings(One, "OTHER_").values()

    assert setting == Setting(
        path=("port",),
        kind=SettingKind.WHOLE,
        unit="",
        bounds="",
        form="",
        default="7",
        description="",
        prefix="OTHER_",
    )
