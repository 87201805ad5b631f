"""How fast the real kube-scheduler places pods, with and without the extender.

`python -m bench.scheduler` needs no cluster: it starts a real etcd, kube-apiserver and
kube-scheduler and the extender as its own process, all on this machine. 5,000 nodes with 8 GPUs
each are registered, half of the GPUs held by 5,000 pods; every GPU is in a Prometheus (a stand-in
of its own process) whose values move every 10 s, and that the extender asks at its default
interval. Some nodes have foreign use on their free GPUs, so that filter has something to refuse.

A run: kube-scheduler is restarted with the shipped configuration (names only, every node looked
at, `httpTimeout` 1 s), with or without its extender's entry, and places 20 pods that do not count.
Then it is made to stand still, 300 pods are created that ask for one GPU each, and it is let go.
The rate is (300 - 1) pods by the time from the first to the last binding, as a watch of the API
server reports it. kube-scheduler stands still meanwhile because creating pods is the same work with
and without an extender, and would make the two more alike than they are. Without an extender means
that it and its workers stand still (SIGSTOP): what the extender does by itself, following the API
server and asking Prometheus about 40,000 GPUs, counts against it, for it shares these cores; with
`--unasked` it runs in both, and the ratio is that of asking alone. What it does in the first
minutes after its start, having Prometheus' past read, is over before the first run. A run in which
kube-scheduler did not get the extender's answer for every pod is an error, not a result.

A pair is a run without and a run with the extender, one right after the other, in either order by
turns; the ratio is that of a pair. With `--trivial` a run with the trivial handler in the
extender's place follows, while the extender stands still: `bench.trivial` knows and follows
nothing, parses every name and names the first nodes of the question. That is what an extender costs
which decides nothing, and no bound: the extender does not make strings of names that it only gives
back. The shortlists take turns, so that a machine that gets slower does so for all of them.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from bench.machine import RESULTS, report
from bench.scheduler_cluster import prometheus_server, register
from bench.scheduler_names import GPUS
from bench.scheduler_report import Pair, bounds, rows
from bench.scheduler_run import Bench
from testkit.controlplane.deployed import ExtenderServer, grant_rights
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.tools import KUBERNETES_VERSION, prepare

PROMISED_NODES: Final = 5000
"""What the extender may cost is said of clusters of this size."""
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
COLUMNS: Final = (
    "Finding a node is kube-scheduler's own mean time for it, calls to the extender included; "
    "filter and prioritize are the extender's own mean time for an answer. CPU of the extender has "
    "its worker's in it, which asks Prometheus whether pods come or not. First choice taken is the "
    "share of pods that kube-scheduler bound to the extender's first choice. Rates and times "
    "are medians over the runs."
)
TOOLS: Final = ("etcd", "kube-apiserver", "kube-scheduler", "kubectl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0, 1 where something failed or the extender costs more than it may.
    """
    arguments = parser().parse_args(argv)
    prepare(TOOLS)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="idlegpu-bench-") as folder:
        try:
            pairs = asyncio.run(_measure(arguments, Path(folder)))
        except (RuntimeError, TimeoutError, ExceptionGroup) as error:
            causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            _say("\n".join(f"cannot measure: {cause}" for cause in causes))
            return EXIT_FAILED
    minutes = (time.monotonic() - started) / 60
    are_met = report(
        "scheduler",
        "kube-scheduler with and without the extender",
        rows=rows(pairs),
        bounds=bounds(pairs) if arguments.nodes == PROMISED_NODES else [],
        notes=[
            f"{arguments.nodes:,} nodes with {GPUS} GPUs each, {arguments.pods} pods a run, "
            f"kube-scheduler {KUBERNETES_VERSION}; it took {minutes:.0f} minutes. The load average "
            "at the end was {:.1f} (1 minute), {:.1f} (5), {:.1f} (15).".format(*os.getloadavg()),
            COLUMNS,
            (__doc__ or "").partition("\n\n")[2].strip(),
        ],
        folder=None if arguments.dry else RESULTS,
    )
    return EXIT_OK if are_met else EXIT_FAILED


async def _measure(arguments: argparse.Namespace, folder: Path) -> list[Pair]:
    pairs: list[Pair] = []
    async with _open(arguments, folder) as bench:
        for number in range(arguments.pairs):
            for shortlist in arguments.shortlists:
                idle = shortlist if arguments.unasked else None
                if number % 2:
                    asked = await bench.run(shortlist)
                    without = await bench.run(idle, is_asked=False)
                else:
                    without = await bench.run(idle, is_asked=False)
                    asked = await bench.run(shortlist)
                trivial = await bench.run_trivial(shortlist) if arguments.trivial else None
                pair = Pair(without=without, asked=asked, trivial=trivial)
                pairs.append(pair)
                _say(f"pair {number + 1}, shortlist {shortlist}: {_words(pair)}")
    return pairs


@asynccontextmanager
async def _open(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[Bench]:
    """Have everything run but kube-scheduler and the extender while the context is open."""
    async with AsyncExitStack() as stack:
        plane = ControlPlane(folder)
        stack.callback(plane.stop)
        await plane.start()
        await grant_rights(plane)
        client = await stack.enter_async_context(plane.client())
        prometheus, url = prometheus_server(folder, arguments.nodes)
        stack.callback(prometheus.kill)
        await prometheus.start()
        began = time.monotonic()
        await register(client, arguments.nodes)
        _say(f"registered {arguments.nodes} nodes in {time.monotonic() - began:.0f} s")
        extender = ExtenderServer(plane)
        stack.push_async_callback(extender.process.stop)
        yield Bench(
            plane=plane,
            client=client,
            extender=extender,
            prometheus_url=url,
            nodes=arguments.nodes,
            pods=arguments.pods,
        )


def _words(pair: Pair) -> str:
    runs = f"{pair.without.pods_per_second:.1f} -> {pair.asked.pods_per_second:.1f} pods/s"
    if pair.trivial is None:
        return f"{runs}, ratio {pair.ratio:.3f}"
    least = pair.trivial.pods_per_second / pair.without.pods_per_second
    return f"{runs}, ratio {pair.ratio:.3f}, of the trivial handler {least:.3f}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    built = argparse.ArgumentParser(
        prog="python -m bench.scheduler",
        description="Time the real kube-scheduler with and without the extender.",
    )
    built.add_argument(
        "--nodes", type=_at_least(1), default=PROMISED_NODES, help="nodes with 8 GPUs each"
    )
    built.add_argument("--pods", type=_at_least(2), default=300, help="pods that a run places")
    built.add_argument("--pairs", type=_at_least(1), default=5, help="pairs for each shortlist")
    built.add_argument(
        "--shortlists",
        type=_at_least(0),
        nargs="+",
        default=[1, 10, 100, 0],
        help="values of wire.shortlist, 0 for all nodes",
    )
    built.add_argument(
        "--unasked",
        action="store_true",
        help="let the extender run without being asked where it would not run: what asking costs",
    )
    built.add_argument(
        "--trivial",
        action="store_true",
        help="ask the trivial handler as well: what an extender costs that decides nothing",
    )
    built.add_argument("--dry", action="store_true", help="print the table, write no files")
    return built


def _at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} on")
        return int(text)

    return read


if __name__ == "__main__":
    sys.exit(main())
