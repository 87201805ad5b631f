"""`idlegpu top`: show the busiest GPUs, live."""

import contextlib
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from extender.answers.fleet import Gpu
from extender.cli.commands.gpus import STATES, state_of, table
from extender.cli.formatting import UNKNOWN, Number
from extender.cli.session import NODES, Session, connected, show_table
from extender.cli.tables import STYLES, line, stack
from extender.cli.transports import ClientError, Failure

_AROUND = 4
"""Screen lines outside the table's rows: the summary above, the header, the last line."""
_WITHOUT_SCREEN = 20
"""Number of GPUs to show if the output is not a terminal."""

_QUIT = "q"


@click.command("top")
@connected
@click.argument("node", required=False, shell_complete=NODES)
@click.option("--once", is_flag=True, help="Print the table once and exit.")
@click.option(
    "--interval",
    default=2.0,
    show_default=True,
    type=Number(0.2, 3600),
    metavar="SECONDS",
    help="Time between two refreshes.",
)
def command(session: Session, *, node: str | None, once: bool, interval: float) -> None:
    """Show the busiest GPUs of the cluster, or of NODE, live.

    Press q or Ctrl-C to exit, any other key to refresh.
    """
    if once or not session.is_table:
        answer = session.client.gpus(node)
        answer.gpus = _busiest_first(answer.gpus)
        session.show(answer, lambda: _screen(answer.gpus, session.console, is_wide=session.is_wide))
        return
    with contextlib.suppress(KeyboardInterrupt), _pressed_keys() as wait, _view(session) as show:
        while True:
            show(_frame(session, node))
            if _QUIT in wait(interval):
                return


@contextlib.contextmanager
def _view(session: Session) -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that draws each frame over the last one, or below it without a terminal."""
    console = session.console
    if not console.is_terminal:
        yield lambda frame: show_table(console, frame)
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        yield lambda frame: live.update(frame, refresh=True)


def _frame(session: Session, node: str | None) -> RenderableType:
    """Fetch and render the current state; show a temporary failure of the extender instead."""
    try:
        gpus = _busiest_first(session.client.gpus(node).gpus)
    except ClientError as error:
        if error.failure not in {Failure.UNREACHABLE, Failure.FAULT}:
            raise
        return line(f"{datetime.now().astimezone():%H:%M:%S}  {error}", "bold red")
    return _screen(gpus, session.console, is_wide=session.is_wide)


def _busiest_first(gpus: list[Gpu]) -> list[Gpu]:
    """Sort GPUs by latest activity, busiest first; GPUs without a reading come last."""

    def place(gpu: Gpu) -> tuple[bool, float, float, str]:
        busy = gpu.utilization_latest_ratio
        return busy is None, -(busy or 0.0), -(gpu.memory_used_ratio or 0.0), gpu.name

    return sorted(gpus, key=place)


def _screen(gpus: list[Gpu], console: Console, *, is_wide: bool) -> RenderableType:
    """Render the summary, and as many of the GPUs as fit the screen; a row may be folded."""
    number = max(console.height - _AROUND, 1) if console.is_terminal else _WITHOUT_SCREEN
    while True:
        hidden = len(gpus) - number
        more = line(f"and {hidden} less busy", "dim") if hidden > 0 else None
        screen = stack([_head(gpus), Text(""), table(gpus[:number], is_wide=is_wide), more])
        over = len(console.render_lines(screen, pad=False)) - console.height
        if number == 1 or over <= 0 or not console.is_terminal:
            return screen
        number = max(min(number, len(gpus)) - max(over // 2, 1), 1)


def _head(gpus: list[Gpu]) -> Text:
    """Return the summary line: time, number of GPUs, mean activity, GPUs by state."""
    states = Counter(map(state_of, gpus))
    known = [gpu.utilization_latest_ratio for gpu in gpus]
    busy = [value for value in known if value is not None]
    mean = f"{sum(busy) / len(busy):.0%}" if busy else UNKNOWN
    now = datetime.now().astimezone()
    instances = sum(bool(gpu.mig_profile) for gpu in gpus)
    whole = len(gpus) - instances
    named = f"{whole} GPU{'' if whole == 1 else 's'}"
    also = f", {instances} MIG instance{'' if instances == 1 else 's'}" if instances else ""
    head = Text(f"{now:%H:%M:%S}  {named}{also}, {mean} busy on average:")
    for state in STATES:
        if states[state]:
            head.append(f"  {states[state]} {state}", style=STYLES[state])
    return head


_MOST_BYTES = 64
"""Limit of one read: a key that repeats, or pasted text."""


@contextmanager
def _pressed_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to a number of seconds and returns the pressed keys.

    It returns "" after the wait if standard input or output is not a terminal (a pager reads the
    keys itself), or if the process runs in the background. On exit the terminal's mode is restored.
    """
    try:
        import termios  # missing on Windows
        import tty
    except ImportError:
        yield _wait
        return
    descriptor = _terminal()
    if descriptor is None:
        yield _wait
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl-C still interrupts
        yield lambda seconds: _read(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _terminal() -> int | None:
    """Return the descriptor of the terminal, or None if the process does not control it.

    Setting the terminal's mode from the background would stop the process.
    """
    try:
        descriptor = sys.stdin.fileno()
        is_ours = (
            os.isatty(descriptor)
            and sys.stdout.isatty()
            and os.tcgetpgrp(descriptor) == os.getpgrp()
        )
    except OSError:  # standard input is closed, or is not a controlling terminal
        return None
    return descriptor if is_ours else None


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read(descriptor: int, seconds: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], seconds)
    if not ready:
        return ""
    # At end of file `select` always reports ready: wait here, or the loop would spin.
    return os.read(descriptor, _MOST_BYTES).decode(errors="replace") or _wait(seconds)
