"""Run the demo: send pods without annotations to a real extender, as kube-scheduler would.

GPUs, kubelets, API server and Prometheus are simulated. The extender and its sources are real, and
unaware of the simulation.
"""

import argparse
import asyncio
import logging
import re
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from textwrap import fill
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from extender.app import start
from extender.settings.config import Settings
from extender.settings.service import Wake
from extender.settings.sources import Prometheus
from simulation.agents import foreign_processes_of
from simulation.cluster import SimulatedCluster, run_cluster
from simulation.default_scheduler import (
    RUNS,
    Fate,
    Outcome,
    mean_fates,
    outcome_of,
    without_idlegpu,
)
from simulation.demo_fleet import demo_fleet
from simulation.demo_scenes import PODS, SCENES
from simulation.kube_scheduler import Placement, SimulatedScheduler
from simulation.objects import JsonObject, child

WAIT_SECONDS = 60.0
LEGEND = (
    "[dim]GPUS:[/] [green]I[/] idle  [red]B[/] busy  [yellow]~[/] stale readings  "
    "[magenta]F[/] foreign: used outside Kubernetes\n"
    "      [bold red]X[/] unhealthy  [red]E[/] excluded: beside an unhealthy GPU  "
    "small: a pod holds it\n"
    "[dim]FREE: by kube-scheduler's count. LOAD: measured.[/]\n"
)
_LETTERS = {
    "idle": ("I", "green"),
    "busy": ("B", "red"),
    "stale": ("~", "yellow"),
    "unknown": ("?", "yellow"),
    "foreign": ("F", "magenta"),
    "unhealthy": ("X", "bold red"),
    "excluded": ("E", "red"),
}

Answer = Any  # an answer of the API: plain JSON


class FleetWatcher:
    """Reads the extender's API.

    Args:
        cluster: the simulated cluster, for descriptions of its nodes.
        url: base URL of the extender.
        session: session for the requests.
    """

    def __init__(self, cluster: SimulatedCluster, url: str, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._url = url
        self._session = session

    async def wait_ready(self) -> None:
        """Wait until the extender is ready and reports the foreign processes."""

        async def is_ready() -> bool:
            async with self._session.get(f"{self._url}/readyz") as answer:
                return answer.status == HTTPStatus.OK and not (await answer.json())["degraded"]

        async def sees_foreign_use() -> bool:
            states = [gpu["state"] for gpu in (await self._get("/v1/gpus"))["gpus"]]
            return "foreign" in states

        await self._wait(is_ready, "the extender is ready")
        await self._wait(sees_foreign_use, "two readings have shown the foreign processes")

    async def wait_shown(self, placements: Sequence[Placement]) -> None:
        """Wait until telemetry shows every placed pod on a GPU, and the idle holders are known."""
        placed = {f"default/{placement.pod}" for placement in placements if placement.node}

        async def are_shown() -> bool:
            gpus = (await self._get("/v1/gpus"))["gpus"]
            return placed <= {tenant for gpu in gpus for tenant in gpu["tenants"]}

        async def are_holders_known() -> bool:
            return bool((await self._get("/v1/holders"))["holders"])

        await self._wait(are_shown, "telemetry shows the pods that were placed")
        await self._wait(are_holders_known, "the extender knows which GPUs were idle before")

    async def wait_warnings(self) -> list[JsonObject]:
        """Wait for the first warning Event of the extender, and return all warnings."""

        def warnings() -> list[JsonObject]:
            events = self._cluster.control.events
            return [event for event in events if event.get("type") == "Warning"]

        async def has_warnings() -> bool:
            return bool(warnings())

        await self._wait(has_warnings, "the extender has written a warning event")
        return warnings()

    async def why(self, placement: Placement) -> list[str]:
        """Return the reasons for a pod's node, from the extender's record of the decision."""
        answer = await self._get(f"/v1/decisions?limit=1&pod={placement.uid}")
        (decision,) = answer["decisions"]
        explained = {verdict["node"]: verdict for verdict in decision["explained"]}
        lines = []
        if placement.node in explained:
            runner_up = decision["runner_up"]
            after = f"; second best: {runner_up}" if runner_up else ""
            lines.append(f"because {_merits(explained[placement.node])}{after}")
        refused = Counter(placement.refused.values()).most_common()
        lines.extend(f"refused: {count} {reason}" for reason, count in refused)
        return lines

    async def table(self) -> Table:
        """Build a table of the fleet."""
        by_node: dict[str, list[Answer]] = {}
        for gpu in (await self._get("/v1/gpus"))["gpus"]:
            by_node.setdefault(gpu["node"], []).append(gpu)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("NODE", "MODEL", "GPUS"):
            table.add_column(heading, no_wrap=True)
        for heading in ("FREE", "LOAD"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("AT THE START", no_wrap=True)
        for node in (await self._get("/v1/nodes"))["nodes"]:
            spec = self._cluster.fleet.node(node["name"]).spec
            offers = node["resources"].values()
            free = sum(offer["allocatable"] - offer["held"] for offer in offers)
            table.add_row(
                node["name"],
                _model(spec.model.name),
                _cells(by_node.get(node["name"], [])),
                f"{free}/{sum(offer['allocatable'] for offer in offers)}",
                _percent(node["utilization_mean_ratio"]),
                spec.description,
            )
        return table

    async def _get(self, path: str) -> Answer:
        async with self._session.get(f"{self._url}{path}") as answer:
            answer.raise_for_status()
            return await answer.json()

    async def _wait(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait for a condition.

        Raises:
            TimeoutError: the condition did not come true in time.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while not await condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {WAIT_SECONDS:.0f} s in vain: {what}")
            await asyncio.sleep(0.1)


def _cells(gpus: Sequence[Answer]) -> Text:
    """Format the GPUs of a node, one letter each."""
    text = Text()
    for gpu in gpus:
        letter, style = _LETTERS[gpu["state"]]
        text.append(letter.lower() if gpu["tenants"] else letter, style=style)
    return text


def _model(name: str) -> str:
    """Return a model name without maker and form factor.

    Example:
        >>> _model("NVIDIA A100-SXM4-40GB"), _model("Tesla T4")
        ('A100', 'T4')
    """
    return re.split(r"[ -]", name.removeprefix("NVIDIA ").removeprefix("Tesla "))[0]


def _percent(ratio: float | None) -> str:
    """Format a ratio as a percentage."""
    return "?" if ratio is None else f"{ratio:.0%}"


def _merits(verdict: Answer) -> str:
    """Describe the advantages of a node in one line."""
    landing = [device for device in verdict["devices"] if device["can_land"]]
    loads = [gpu["utilization_ratio"] for gpu in landing if gpu["utilization_ratio"] is not None]
    rooms = [gpu["free_bytes"] for gpu in landing if gpu["free_bytes"] is not None]
    open_count = verdict["landing"] - verdict["taken"]
    what = "MIG instances" if "/mig-" in verdict["resource"] else "GPUs"
    parts = [f"{verdict['idle']} of {open_count} {what} idle"]
    parts.append(f"load {sum(loads) / len(loads):.0%}" if loads else "no telemetry")
    if rooms:
        parts.append(f"{min(rooms) / (1 << 30):.0f} GiB free")
    return ", ".join(parts)


_PORT = 8888
COLUMNS = 80
"""Columns of the output; a narrower terminal folds its prose."""

_STYLES = {Fate.GOOD: "green", Fate.WAITING: "yellow"}
"""Styles of the fates that are not failures."""


class Demo:
    """Demo that schedules pods with and without the extender, and compares their fates."""

    def __init__(
        self, cluster: SimulatedCluster, url: str, session: aiohttp.ClientSession, console: Console
    ) -> None:
        self._cluster = cluster
        self._watcher = FleetWatcher(cluster, url, session)
        self._console = console
        self._scheduler = SimulatedScheduler(url=url, control=cluster.control, session=session)

    async def play(self) -> None:
        """Run the whole demo once."""
        say = self._console.print
        say("\n[bold]idlegpu[/bold] places stock GPU pods on GPUs that are really idle.")
        say("[yellow]Simulated[/yellow]: the cluster and its GPUs. Real: the extender.\n")
        await self._watcher.wait_ready()
        say(await self._watcher.table())
        say(LEGEND)
        say(
            "Each pod is placed twice: with idlegpu, and [bold]without[/bold]: by kube-scheduler"
            " alone\n(a model of its default scores, on a fleet of its own)."
        )
        alone = without_idlegpu(demo_fleet, PODS)
        placements, ours = [], []
        others = iter(alone)
        for number, scene in enumerate(SCENES, start=1):
            say(f"\n[bold cyan]{number}. {scene.title}[/bold cyan]")
            say(f"   [dim]{scene.point}[/dim]")
            for pod in scene.objects():
                placement = await self._scheduler.schedule(pod)
                placements.append(placement)
                ours.append(self._outcome(placement))
                self._print_row(placement.pod, ours[-1], next(others))
            if len(scene.pods) == 1:
                for text in await self._watcher.why(placements[-1]):
                    say(f"   [dim]{text}[/dim]")
        await self._print_events()
        self._print_tally(ours, alone, await asyncio.to_thread(mean_fates, demo_fleet, PODS))
        await self._watcher.wait_shown(placements)

    def _outcome(self, placement: Placement) -> Outcome:
        """Return the outcome of one of the extender's placements."""
        if placement.node:
            return outcome_of(self._cluster.fleet, placement.uid)
        return Outcome(node="", fate=Fate.WAITING, reason="")

    def _print_row(self, pod: str, ours: Outcome, alone: Outcome) -> None:
        """Print a pod's node with and without the extender, and its fate without."""
        row = Text(f"   {pod:<13} ", style="bold")
        row.append(f"{ours.node or 'waits':<16} ", style=_STYLES.get(ours.fate, "red"))
        row.append("without: ", style="dim")
        row.append(f"{alone.node or 'waits':<16} ", style=_STYLES.get(alone.fate, "red"))
        row.append(alone.reason, style=_STYLES.get(alone.fate, "red"))
        self._console.print(row)

    def _print_tally(
        self, ours: Sequence[Outcome], alone: Sequence[Outcome], mean: Mapping[Fate, float]
    ) -> None:
        """Print the number of pods with each fate, with and without the extender."""
        with_us = Counter(outcome.fate for outcome in ours)
        without = Counter(outcome.fate for outcome in alone)
        say = self._console.print
        bad = [f"{without[fate]} {fate}" for fate in Fate if without[fate] and fate not in _STYLES]
        say(f"\n[bold]{len(ours)} pods; without idlegpu {', '.join(bad)}[/bold]")
        say(f"   {'':<18}{'idlegpu':>10}{'without':>10}{f'mean of {RUNS} runs':>19}", style="bold")
        for fate in Fate:
            style = _STYLES.get(fate, "red" if without[fate] else "")
            say(
                f"   {fate:<18}{with_us[fate]:>10}{without[fate]:>10}{mean[fate]:>19.1f}",
                style=style,
            )
        say(
            "   [dim]kube-scheduler draws among nodes of equal score; the last column repeats the\n"
            "   run without idlegpu with other draws.[/dim]"
        )

    async def _print_events(self) -> None:
        """Print the Events that the extender wrote."""
        events = await self._watcher.wait_warnings()
        self._console.print("\n[bold]What the owner of a pod sees[/bold] (kubectl describe pod)")
        for event in events:
            subject = child(event, "regarding")
            text = f"{event.get('reason')} {subject.get('name')}: {event.get('note')}"
            self._console.print(fill(text, COLUMNS, initial_indent="   ", subsequent_indent="   "))


def _free_port(wanted: int) -> int:
    """Return the port if it is free, else 0 for any port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return 0
    return wanted


@asynccontextmanager
async def playing(console: Console, port: int = 0) -> AsyncIterator[str]:
    """Play the demo, then keep serving while the context is open.

    Args:
        console: receives the output.
        port: port of the extender on 127.0.0.1, 0 for any.

    Yields:
        URL of the extender.
    """
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(run_cluster(demo_fleet()))
        settings = Settings(
            listen=f"127.0.0.1:{port}",
            kubeconfig=cluster.kubeconfig,
            prometheus=Prometheus(url=cluster.prometheus_url, interval_seconds=1.0),
            wake=Wake(enabled=False),  # the simulated kube-scheduler tries each pod once
        )
        extender = await stack.enter_async_context(start(settings))
        for node in cluster.fleet.nodes:
            extender.fleet.note_foreign(node, foreign_processes_of(cluster.fleet, node))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = extender.addresses[0]
        await Demo(cluster, url, session, console).play()
        yield url


async def run(*, once: bool) -> None:
    """Run the demo; then serve until interrupted, unless `once`."""
    console = Console(highlight=False)
    console.width = min(console.width, COLUMNS)
    async with playing(console, 0 if once else _free_port(_PORT)) as url:
        if once:
            console.print("\n`make demo`, without ONCE=1, keeps the page and the API open.")
            return
        console.print("\n[bold]Still serving.[/bold] Look around, Ctrl-C ends it:")
        # Links and commands are copied: no line break may get into them.
        console.print(f"   {url}/page/ in a browser", soft_wrap=True)
        for command in commands(f"{url}/page/"):
            console.print(f"   {command}", soft_wrap=True)
        await asyncio.Event().wait()


def commands(link: str) -> tuple[str, ...]:
    """Return three commands that show more of the demo.

    Args:
        link: link to the page.
    """
    program = Path(sys.executable).with_name("idlegpu")
    name = str(program)
    if shutil.which("idlegpu") == name:
        name = "idlegpu"
    elif program.is_relative_to(Path.cwd()):
        name = str(program.relative_to(Path.cwd()))
    return tuple(
        f"{name} {words} --url {link}" for words in ("nodes", "holders", "explain patient")
    )


def main() -> None:
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="end after the run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # the demo prints the same information
    try:
        asyncio.run(run(once=arguments.once))
    except KeyboardInterrupt:
        print("\nbye")  # noqa: T201 - the answer to Ctrl-C


if __name__ == "__main__":
    main()
