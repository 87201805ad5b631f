"""Shorter intervals of the source, for tests that wait for them."""

import pytest

from extender.sources.agents import source


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_ROUTINE_SECONDS", 0.2)
    monkeypatch.setattr(source, "_SWEEP_SECONDS", 0.1)
