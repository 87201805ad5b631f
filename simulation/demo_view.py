"""Read the demo's output from the extender's public API."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
from rich.table import Table
from rich.text import Text

from simulation.cluster import SimulatedCluster
from simulation.kube_scheduler import Placement
from simulation.objects import JsonObject

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
