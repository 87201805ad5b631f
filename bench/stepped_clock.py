"""Run the extender with an adjustable clock: `python -m bench.stepped_clock OPTION...`.

`time.time` is shifted by the seconds in the file that `STEPPED_CLOCK` names.
"""

import os
import runpy
import time
from pathlib import Path
from typing import Final

VARIABLE: Final = "STEPPED_CLOCK"


def step(file: Path, seconds: float) -> None:
    """Shift the clock by some seconds; a reader never sees an empty file."""
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(file)


def main() -> None:
    """Run the extender."""
    file = Path(os.environ[VARIABLE])
    real = time.time
    time.time = lambda: real() + float(file.read_text())
    runpy.run_module("extender", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
