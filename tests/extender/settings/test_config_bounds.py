import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.quantity import parse_whole
from extender.settings.config import all_settings, load_settings
from extender.settings.loading import ConfigError
from extender.settings.spec import Setting, SettingKind, render_table
from tests.extender.settings.settings_files import write_settings

NUMERIC = {SettingKind.NUMBER, SettingKind.WHOLE, SettingKind.QUANTITY}
BOUNDED = [setting for setting in all_settings().values() if setting.kind in NUMERIC]


def as_file(setting: Setting, value: object) -> str:
    """Return a settings file with one setting."""
    text = str(value)
    for name in reversed(setting.path):
        text = f"{{{name}: {text}}}"
    return text


def limits(setting: Setting) -> tuple[float, float]:
    """Return the documented bounds of a setting."""
    low, high = re.findall(r"[0-9.]+(?:[KMGT]i)?", setting.bounds)
    return float(parse_whole(low) if "i" in low else low), float(
        parse_whole(high) if "i" in high else high
    )


@given(
    setting=st.sampled_from(BOUNDED),
    beyond=st.integers(min_value=1, max_value=10**6),
    is_above=st.booleans(),
    is_in_file=st.booleans(),
)
def test_any_value_out_of_bounds_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory,
    setting: Setting,
    beyond: int,
    is_above: bool,
    is_in_file: bool,
) -> None:
    low, high = limits(setting)
    value = int(high) + beyond if is_above else int(low) - beyond
    environ = {} if is_in_file else {setting.variable: str(value)}
    folder = tmp_path_factory.getbasetemp()
    path = write_settings(folder, as_file(setting, value)) if is_in_file else None

    with pytest.raises(ConfigError) as caught:
        load_settings(path, environ)

    (found,) = caught.value.problems
    assert found.startswith(f"{path}: {setting.name}:" if is_in_file else f"{setting.variable}:")
    assert setting.bounds in found or setting.kind is SettingKind.QUANTITY


@pytest.mark.parametrize("setting", BOUNDED, ids=lambda setting: setting.name)
def test_the_documented_bounds_themselves_are_allowed(setting: Setting) -> None:
    low, high = limits(setting)
    within = [high] if setting.bounds.startswith("more than") else [low, high]

    for value in within:
        text = str(int(value)) if value == int(value) else str(value)
        said = ""
        try:
            load_settings(None, {setting.variable: text})
        except ConfigError as error:  # two settings may limit each other
            said = str(error)
        assert setting.name not in said.split(":")[0]
        assert "out of bounds" not in said


@pytest.mark.parametrize("setting", all_settings().values(), ids=lambda setting: setting.name)
def test_every_setting_is_documented(setting: Setting) -> None:
    assert len(setting.description) > 10
    assert setting.bounds or setting.kind not in NUMERIC | {SettingKind.CHOICE}
    if setting.kind is SettingKind.NUMBER:
        assert setting.unit


def test_every_setting_is_one_row_of_the_table() -> None:
    rows = render_table(all_settings().values()).splitlines()

    assert len(rows) == len(all_settings()) + 2
    assert {row.count(" | ") for row in rows[2:]} <= {4, 5}
    assert (
        "| `thresholds.utilization` | percent | `30` | 1 to 100 | a GPU is idle if it is busy for "
        "less than this share of time, and uses less memory than thresholds.memory |" in rows
    )


def test_two_ports_with_one_address_are_refused_by_name(tmp_path: Path) -> None:
    path = write_settings(tmp_path, "{listen: 127.0.0.1:8888, status_listen: 127.0.0.1:8888}")

    with pytest.raises(
        ConfigError, match=r"status_listen \(127.0.0.1:8888\) must differ from listen"
    ):
        load_settings(path, {})


def test_any_free_port_may_be_wanted_twice(tmp_path: Path) -> None:
    path = write_settings(tmp_path, "{listen: 127.0.0.1:0, status_listen: 127.0.0.1:0}")

    assert load_settings(path, {}).status_listen == "127.0.0.1:0"
