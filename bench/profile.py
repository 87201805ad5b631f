"""Profile the extender's main thread while it answers requests: `python -m bench.profile`.

py-spy samples the main thread five hundred times a second while pods are placed one after the other
among 5,000 nodes, with new readings every ten seconds. A function's share includes the functions
that it calls, so shares add up to more than 100 %. Samples in which the thread waits are left out.
Sampling stops the process for a moment each time: shares are right, times would not be.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from bench.machine import report
from bench.placing import Scheduler
from bench.world import FleetSpec, open_world

SECONDS: Final = 20
RATE_HZ: Final = 500
SHOWN: Final = 40
WARM_UP_SECONDS: Final = 5.0
_LOOP: Final = (
    *("__main__.py", "extender/__main__.py", "runners.py"),
    *("<frozen runpy>", "asyncio/__init__.py"),
)


def main() -> int:
    """Profile, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    arguments = parser.parse_args()
    spec = FleetSpec(nodes=arguments.nodes, gpu_pods=2 * arguments.nodes)
    with (
        tempfile.TemporaryDirectory(prefix="idlegpu-profile-") as folder,
        open_world(spec) as world,
    ):
        world.wait_ready()
        world.wait_readings(1)
        scheduler = Scheduler(world)
        scheduler.place_for(WARM_UP_SECONDS)
        raw = Path(folder) / "stacks"
        spy = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("py-spy")), "record", "--format", "raw"),
                *("--pid", str(world.extender_pid), "--rate", str(RATE_HZ)),
                *("--duration", str(arguments.seconds), "--output", str(raw)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        placed = scheduler.place_for(arguments.seconds)
        spy.wait()
        shares = inclusive_shares(raw.read_text())
    rows = [{"function": name, "share %": 100 * share} for name, share in shares.most_common(SHOWN)]
    how = f"{len(placed)} pods placed in {arguments.seconds} s, {arguments.nodes:,} nodes."
    notes = [how, (__doc__ or "").partition("\n\n")[2].strip()]
    report("profile", "Where the time goes", rows=rows, bounds=[], notes=notes)
    return 0


def inclusive_shares(stacks: str) -> Counter[str]:
    r"""Return each function's share of the main thread's samples, including its callees.

    Args:
        stacks: py-spy's raw output, lines of frames joined by ";", outermost first, and a count.

    Example:
        >>> inclusive_shares("main (a/x.py:1);f (extender/y.py:2) 3\nmain (a/x.py:1) 1")
        Counter({'extender/y.py f': 1.0})
    """
    counts: Counter[str] = Counter()
    total = 0
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        if "threading.py" in stack or "thread.py" in stack:
            continue
        names = {_name(frame) for frame in stack.split(";") if not any(at in frame for at in _LOOP)}
        names = {name for name in names if name.startswith(("extender/", "aiohttp/"))}
        if names:
            total += int(count)
            counts.update(dict.fromkeys(names, int(count)))
    return Counter({name: count / total for name, count in counts.items()})


def _name(frame: str) -> str:
    """Return file and function of a frame, without the line number."""
    function, _, place = frame.rpartition(" (")
    path = place.partition(":")[0].rpartition(")")[0] or place.partition(":")[0]
    for root in ("extender/", "aiohttp/"):
        at = path.rfind(root)
        if at >= 0:
            path = path[at:]
            break
    return f"{path} {function}"


if __name__ == "__main__":
    sys.exit(main())
