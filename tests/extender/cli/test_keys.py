"""Keys are read where a terminal is ours alone, and nowhere else."""

import os
import sys

import pytest

from extender.cli import keys


@pytest.mark.parametrize(("is_shown", "count"), [(True, 1), (False, 0)])
def test_a_pager_that_reads_the_output_keeps_its_keys(
    monkeypatch: pytest.MonkeyPatch, *, is_shown: bool, count: int
) -> None:
    mine, its = os.openpty()
    with os.fdopen(its) as terminal, os.fdopen(mine, "w") as keyboard:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_shown, raising=False)
        with keys.pressed_keys() as pressed:
            keyboard.write("q")
            keyboard.flush()
            assert len(pressed(0.5)) == count
