"""Processes that use a GPU without holding it, as text and as JSON."""

import asyncio
import json
from datetime import datetime, timedelta

import pytest
from rich.console import Console

from extender.cli.client import Client
from extender.cli.commands.gpus import table
from extender.cli.formatting import clock, since
from extender.core.devices.readings import DeviceKey, ForeignProcess
from testkit.cards import IDLE, Gpu
from testkit.cli_serving import build_fleet, call, runner, serving
from testkit.world import World

PYTHON = ForeignProcess(
    pid=4711,
    name="python3",
    memory_bytes=30 << 30,
    started_at=datetime(2024, 5, 1, 9, 12).astimezone().timestamp(),
    pod="",
    container="docker-3f2a1b4c5d6e.scope",
)
WORDS = (
    "30 GiB by python3, PID 4711, outside Kubernetes (docker-3f2a1b4c5d6e.scope), "
    "since 2024-05-01 09:12; ? GiB by a process, PID 8, in pod team/sneaky (main)"
)
IN_POD = ForeignProcess(
    pid=8, name="", memory_bytes=None, started_at=None, pod="team/sneaky", container="main"
)


def fleet_with_processes() -> World:
    """Return a cluster in which two processes use a free GPU of node-3."""
    fleet = build_fleet()
    fleet.fleet.note_foreign("node-3", {DeviceKey(("GPU-node-3-0", "")): (PYTHON, IN_POD)})
    return fleet


@pytest.mark.parametrize("command", ["gpus", "top"])
def test_processes_are_named_beside_their_gpu(command: str) -> None:
    options = ["--once"] if command == "top" else []
    with serving(fleet_with_processes().build_app()) as url:
        run = runner(url)
        shown = run(command, "node-3", *options).stdout
        other = run(command, "node-1", *options).stdout
        as_json = json.loads(run(command, "node-3", *options, "-o", "json").stdout)

    (line,) = [line for line in shown.splitlines() if line.startswith("node-3::0")]
    assert line.endswith(WORDS)
    assert "PROCESSES" not in other
    assert as_json["gpus"][0]["foreign_processes"][0]["pid"] == 4711


def test_processes_are_under_the_row_of_their_gpu_in_80_columns() -> None:
    console = Console(width=80, markup=False, force_terminal=False)
    with serving(fleet_with_processes().build_app()) as url, console.capture() as captured:
        console.print(table(Client.at(url).gpus("node-3").gpus, is_wide=False))

    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    first = next(at for at, line in enumerate(lines) if line.startswith("node-3::0"))
    assert " ".join(line.strip() for line in lines[first + 1 : -1]) == f"processes: {WORDS}"
    assert lines[-1].startswith("node-3::1")


def test_explain_names_the_processes_on_a_foreign_gpu() -> None:
    world = World()
    cards = {"node-1": [Gpu(busy=0.9, used_gib=30.0), IDLE]}
    world.add(cards)
    asyncio.run(call(world, "prioritize", "node-1", name="fresh"))
    world.fleet.note_foreign("node-1", {DeviceKey(("GPU-node-1-0", "")): (PYTHON,)})
    with serving(world.build_app()) as url:
        shown = runner(url)("explain", "fresh").stdout

    assert "foreign" in shown
    assert (
        "node-1::0 now: 30 GiB by python3, PID 4711, outside Kubernetes "
        "(docker-3f2a1b4c5d6e.scope), since 2024-05-01 09:12"
    ) in shown


def test_explain_of_a_node_that_is_gone_says_nothing_of_now() -> None:
    world = World()
    world.add({"node-1": [Gpu(busy=0.9, used_gib=30.0), IDLE]})
    asyncio.run(call(world, "prioritize", "node-1", name="fresh"))
    world.fleet.remove_node("node-1")
    with serving(world.build_app()) as url:
        result = runner(url)("explain", "fresh")

    assert (result.exit_code, "foreign" in result.stdout) == (0, True), result.output


def test_a_time_has_its_day_unless_that_is_today() -> None:
    now = datetime.now().astimezone()
    before = now - timedelta(days=2)

    assert since(now.isoformat()) == now.strftime("%H:%M")
    assert since(before.isoformat()) == before.strftime("%Y-%m-%d %H:%M")
    assert clock(now.isoformat()) == now.strftime("%H:%M:%S")
    assert clock(before.isoformat()) == before.strftime("%m-%d %H:%M:%S")
