"""Measure how fast the real kube-scheduler places pods, with and without the extender.

`python -m bench.scheduler` needs no cluster: it starts a real etcd, kube-apiserver and
kube-scheduler and the extender as its own process, all on this machine. 5,000 nodes with 8 GPUs
each are registered, and 5,000 pods hold half of the GPUs. A simulated Prometheus in its own process
has all GPUs, with values that change every 10 s; the extender queries it at its default interval.
Some nodes have foreign use on their free GPUs, so that filter refuses some nodes.

A run: kube-scheduler is restarted with the shipped configuration (names only, every node scored,
`httpTimeout` 1 s), with or without the extender's entry, and places 20 warm-up pods. Then it is
stopped (SIGSTOP), 300 pods that request one GPU each are created, and it continues. The rate is
(300 - 1) pods by the time from the first to the last binding, as a watch of the API server reports
it. kube-scheduler is stopped while pods are created, because creating pods is the same work with
and without an extender, and would hide part of the difference. In runs without the extender its
processes are stopped (SIGSTOP). So the extender's background work, watching the API server and
querying Prometheus for 40,000 GPUs, counts against it, because it shares these cores. With
`--bypassed` the extender runs in both, and the ratio shows only the cost of its calls. The
extender's reading of Prometheus' past in the first minutes after its start ends before the first
run. A run in which kube-scheduler did not get the extender's answer for every pod is an error, not
a result.

A pair is a run without and a run with the extender, in alternating order; the ratio is that of a
pair. With `--trivial` a run with the trivial handler in the extender's place follows, while the
extender is stopped: `bench.trivial` watches nothing, parses every name and answers the first nodes
of the request. It shows the cost of an extender that decides nothing. It is not a lower bound,
because the extender does not decode names that it only returns. The shortlists alternate, so that a
machine that becomes slower affects all of them.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from bench.arguments import at_least
from bench.machine import RESULTS, report
from bench.scheduler_cluster import prometheus_server, register
from bench.scheduler_names import GPUS
from bench.scheduler_report import Pair, bounds, rows
from bench.scheduler_run import Bench
from testkit.controlplane.deployed import ExtenderServer, grant_rights
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.tools import KUBERNETES_VERSION, prepare

PROMISED_NODES: Final = 5000
"""Cluster size for which the bound on the extender's cost applies."""
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
COLUMNS: Final = (
    "Finding a node is kube-scheduler's own mean time for it, including calls to "
    "the extender; filter and prioritize are the extender's own mean time for an "
    "answer. CPU of the extender includes its worker, which queries Prometheus even "
    "without pods. First choice taken is the share of pods that kube-scheduler "
    "bound to the extender's first choice. Rates and times are medians over the "
    "runs."
)
TOOLS: Final = ("etcd", "kube-apiserver", "kube-scheduler", "kubectl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0, or 1 if a run failed or a bound was missed.
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
                idle = shortlist if arguments.bypassed else None
                if number % 2:
                    called = await bench.run(shortlist)
                    without = await bench.run(idle, is_called=False)
                else:
                    without = await bench.run(idle, is_called=False)
                    called = await bench.run(shortlist)
                trivial = await bench.run_trivial(shortlist) if arguments.trivial else None
                pair = Pair(without=without, called=called, trivial=trivial)
                pairs.append(pair)
                _say(f"pair {number + 1}, shortlist {shortlist}: {_words(pair)}")
    return pairs


@asynccontextmanager
async def _open(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[Bench]:
    """Run everything except kube-scheduler and the extender while the context is open."""
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
    runs = f"{pair.without.pods_per_second:.1f} -> {pair.called.pods_per_second:.1f} pods/s"
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
        "--nodes", type=at_least(1), default=PROMISED_NODES, help="nodes with 8 GPUs each"
    )
    built.add_argument("--pods", type=at_least(2), default=300, help="pods that a run places")
    built.add_argument("--pairs", type=at_least(1), default=5, help="pairs for each shortlist")
    built.add_argument(
        "--shortlists",
        type=at_least(0),
        nargs="+",
        default=[1, 10, 100, 0],
        help="values of wire.shortlist, 0 for all nodes",
    )
    built.add_argument(
        "--bypassed",
        action="store_true",
        help="keep the extender running, but not called, in the runs without it: the cost of "
        "the calls alone",
    )
    built.add_argument(
        "--trivial",
        action="store_true",
        help="also run with the trivial handler: the cost of an extender that decides nothing",
    )
    built.add_argument("--dry", action="store_true", help="print the table, write no files")
    return built


if __name__ == "__main__":
    sys.exit(main())
