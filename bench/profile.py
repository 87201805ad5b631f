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

CHANGED: Final = """What was changed because of such profiles, each with its share before:

- Eight requests were evaluated for all nodes again every five seconds (47 % of all): estimates are
  renewed every ten seconds, and when readings came.
- Each binding copied some forty arrays of 40,000 devices (a third of filter), and evaluated its
  node once more: rows are patched, readings are estimated again only if their
  inputs changed, and a pod that is bound where it was assumed changes nothing.
- One evaluation for each of the requests that take turns, while they waited for it (a fifth of
  filter): one for all of them, before anybody asks.
- Names of the question were read twice, and hashed by gathers of whole matrices (a quarter of
  filter): they are read once, where they stand.
- Reasons against nodes that the shortlist leaves out anyhow (a third of filter where many nodes are
  refused): left out too.
- What explains a decision was gathered for both verbs, log lines and counts came before the answer:
  once, and after it.
- Each of the recent requests was evaluated for all devices from the first column on at a renewal
  (27 %): memory, load and landing set, which they have in common, are worked out once.
- Prioritize asks what can be foreseen: it is decided while kube-scheduler's own plugins score.
- The pod was decoded and read in each question (an eighth of filter): where the API server has sent
  of the very same before, that is gone by, and pods that say the same are read once.
- Of a request that had not been asked before, filter waited for the evaluation of every device
  (three quarters of it): that is done when the API server sends the pod.
- What the last pod's binding changed was evaluated three milliseconds after it, when the next pod
  was asked about already (a quarter of filter): at once, with a rest afterwards."""


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
    notes = [how, (__doc__ or "").partition("\n\n")[2].strip(), CHANGED]
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
