"""Keys are read only while the program owns the terminal."""

import os
import sys

import pytest

from extender.cli.commands.top import _pressed_keys


@pytest.mark.parametrize(("is_shown", "count", "seconds"), [(True, 1, 60.0), (False, 0, 0.5)])
def test_a_pager_that_reads_the_output_keeps_its_keys(
    monkeypatch: pytest.MonkeyPatch, *, is_shown: bool, count: int, seconds: float
) -> None:
    mine, its = os.openpty()
    with os.fdopen(its) as terminal, os.fdopen(mine, "w") as keyboard:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_shown, raising=False)
        with _pressed_keys() as pressed:
            keyboard.write("q")
            keyboard.flush()
            assert len(pressed(seconds)) == count
