"""`idlegpu top` in a real terminal, while the fleet changes."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from rich.console import Console

from extender.cli.client import Client
from extender.cli.commands.top import _screen
from testkit.cards import Gpu
from testkit.cli_serving import NO_ENVIRONMENT, runner, serving
from testkit.mig import mig_world
from testkit.world import World
from tests.extender.cli.terminal import LINES, Terminal, at_terminal

NODE = "node-1"
ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


@dataclass
class Changing:
    """Extender with one GPU whose load the test changes."""

    url: str

    def work(self, busy: str) -> None:
        """Set the load of the GPU; "off" makes the extender stop answering."""
        request = Request(f"{self.url}/load/{busy}", method="POST")
        with urlopen(request, timeout=10) as response:
            assert response.status == 200


@pytest.fixture
def fleet() -> Iterator[Changing]:
    world = World()
    world.add({NODE: [Gpu()]})
    is_off = False

    async def work(request: web.Request) -> web.Response:
        nonlocal is_off
        busy = request.match_info["busy"]
        is_off = busy == "off"
        if not is_off:
            world.now += 1
            world.report({NODE: [Gpu(busy=float(busy))]})
        return web.Response()

    @web.middleware
    async def unless_off(request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_off and request.method == "GET":
            return web.json_response({"error": "starts"}, status=503)
        return await handler(request)

    app = world.build_app()
    app.router.add_post("/load/{busy}", work)
    app.middlewares.append(unless_off)
    with serving(app) as url:
        yield Changing(url)


@pytest.fixture
def top(fleet: Changing) -> Iterator[Terminal]:
    command = (sys.executable, "-m", "extender.cli", "top", "--interval", "0.2")
    environment = {**dict.fromkeys(NO_ENVIRONMENT, ""), "IDLEGPU_URL": fleet.url}
    with at_terminal(*command, environment=environment) as terminal:
        yield terminal


def test_top_refreshes_by_itself(fleet: Changing, top: Terminal) -> None:
    top.read_until("1 GPU, 0% busy on average:  1 idle")

    for busy, words in (("0.95", "95% busy on average"), ("0.4", "40% busy on average")):
        since = len(top.raw)
        fleet.work(busy)
        top.read_until(words, since=since)
        top.read_until(f"{NODE}::0", since=since)


def test_an_extender_that_goes_away_is_reported_and_comes_back(
    fleet: Changing, top: Terminal
) -> None:
    top.read_until("0% busy on average")

    fleet.work("off")
    top.read_until("is not ready", since=len(top.raw))
    fleet.work("0.3")

    top.read_until("30% busy on average", since=len(top.raw))


@pytest.mark.parametrize("key", [pytest.param("q", id="q"), pytest.param("\x03", id="ctrl-c")])
def test_top_exits_with_status_0_and_restores_the_terminal(top: Terminal, key: str) -> None:
    top.read_until("busy on average")
    assert top.settings != top.before

    top.press(key)

    assert top.wait() == 0
    assert top.settings == top.before
    assert ENTER_SCREEN in top.raw
    assert top.raw.rindex(LEAVE_SCREEN) > top.raw.rindex(b"busy on average")
    assert SHOW_CURSOR in top.raw[top.raw.rindex(b"busy on average") :]
    assert b"Traceback" not in top.raw


def test_another_key_refreshes_at_once(fleet: Changing) -> None:
    command = (sys.executable, "-m", "extender.cli", "top", "--interval", "3600")
    environment = {**dict.fromkeys(NO_ENVIRONMENT, ""), "IDLEGPU_URL": fleet.url}
    with at_terminal(*command, environment=environment) as top:
        top.read_until("0% busy on average")
        fleet.work("0.7")
        top.press(" ")
        top.read_until("70% busy on average")


def test_no_more_is_shown_than_the_screen_has_lines() -> None:
    world = World()
    world.add({NODE: [Gpu()] * (LINES + 5)})
    with serving(world.build_app()) as url:
        command = (sys.executable, "-m", "extender.cli", "top", "--interval", "0.2")
        environment = {**dict.fromkeys(NO_ENVIRONMENT, ""), "IDLEGPU_URL": url}
        with at_terminal(*command, environment=environment) as top:
            shown = top.read_until("less busy")

    assert f"and {LINES + 5 - (LINES - 4)} less busy" in shown
    assert shown.count(f"{NODE}::") == LINES - 4


@pytest.mark.timeout(180)
def test_top_keeps_writing_in_the_background(fleet: Changing, tmp_path: Path) -> None:
    file = tmp_path / "looks"
    command = f"{sys.executable} -m extender.cli top --interval 0.2 --url {fleet.url}"
    # As an interactive shell runs a background job: setting the terminal stops it.
    shell = f"set -m; timeout 80 {command} > {file} & read key; kill %1; wait; echo over"
    with at_terminal("/bin/sh", "-c", shell, environment={}) as terminal:
        until = time.monotonic() + 60
        while not file.exists() or file.read_text().count("busy on average") < 2:
            assert time.monotonic() < until, "it was stopped"
            time.sleep(0.05)
        terminal.press("\n")
        terminal.read_until("over")


@pytest.mark.timeout(180)
def test_top_appends_screens_without_a_terminal(fleet: Changing) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "extender.cli", "top", "--interval", "0.2", "--url", fleet.url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert next(line for line in process.stdout if " 0% busy on average" in line)
        fleet.work("0.6")
        assert next(line for line in process.stdout if " 60% busy on average" in line)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_folded_rows_leave_room_for_the_last_line() -> None:
    world = World()
    tenant = "vision/segmentation-training-of-the-whole-year-0"
    world.add({f"gpu-h100-pool-{at}": [Gpu(busy=0.9, tenants=(tenant,))] * 8 for at in range(4)})
    console = Console(width=80, height=24, force_terminal=True, color_system=None)
    with serving(world.build_app()) as url:
        gpus = Client.at(url).gpus().gpus

    lines = console.render_lines(_screen(gpus, console, is_wide=False), pad=False)

    last = "".join(segment.text for segment in lines[-1])
    named = sum("gpu-h100-pool-" in "".join(segment.text for segment in line) for line in lines)
    assert len(lines) <= 24
    assert last.strip() == f"and {32 - named} less busy"
    assert named > 3


def test_instances_of_a_card_are_counted_apart_from_gpus() -> None:
    with serving(mig_world().build_app()) as url:
        shown = runner(url)("top", "--once").stdout
        listed = runner(url)("nodes", "--idle").stdout

    header, node = listed.splitlines()
    assert re.split(" {2,}", header)[1:4] == ["MODEL", "GPUS", "IDLE"]
    assert re.split(" {2,}", node)[1:4] == ["A100 SXM4 40GB MIG", "4", "2"]
    assert "0 GPUs, 4 MIG instances, 45% busy on average" in shown
    names = [line.split()[0] for line in shown.splitlines() if line.startswith("node-m::")]
    assert sorted(names) == [f"node-m::0/{number}" for number in (10, 7, 8, 9)]
