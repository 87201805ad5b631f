"""Settings files for tests, and the problems in them."""

from pathlib import Path

import pytest

from extender.settings.config import Settings, load_settings
from extender.settings.loading import ConfigError


def write_settings(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str, **environ: str) -> Settings:
    return load_settings(write_settings(folder, text), environ)


def problems(folder: Path, text: str, **environ: str) -> tuple[str, ...]:
    """Return the problems of a settings file, without the folder's name."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, **environ)
    assert str(caught.value).splitlines() == list(caught.value.problems)
    return tuple(problem.removeprefix(f"{folder}/") for problem in caught.value.problems)
