"""Render the report as a table for the terminal; import it only when needed: `rich` is large."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent.report.contract import MAX_NAME, Device, Place, Process, Report
from extender.core.devices.readings import NO_INSTANCES, Signal
from extender.runtime.terminal_escapes import escape_text, plain_text

_GIB: Final = float(1 << 30)
_UNKNOWN: Final = "?"
_STALE_SECONDS: Final = 10.0
_VERDICT_WIDTH: Final = 16
_WORDS: Final = {True: ("idle", "green"), False: ("not idle", "red"), None: ("unknown", "yellow")}

_SHORT: Final = (("graphics", Signal.GRAPHICS_ACTIVE), ("SM", Signal.SM_ACTIVE))


def render(report: Report) -> RenderableType:
    """Return the report as a `rich` renderable."""
    at = datetime.fromtimestamp(report.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    driver = f"driver {report.driver_version}" if report.driver_version else "no driver"
    parts: list[RenderableType] = [_literal(f"{report.node}, {driver}, {at}", "bold")]
    if report.devices:
        parts.append(_table(report))
    if report.problem is not None:
        parts.append(_literal(report.problem.text, "yellow"))
    parts += [
        _literal(device.problem.text, "yellow")
        for device in report.devices
        if device.problem is not None
    ]
    unknown = (report.tenants_problem, report.processes_problem) if report.devices else ()
    parts += [_literal(problem.text, "dim") for problem in unknown if problem is not None]
    return Group(*parts)


def _literal(text: str, style: str = "") -> Text:
    """Return text that is shown as it is: names of processes may hold markup and escapes."""
    return Text(escape_text(text), style=style)


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the report as a table."""
    (console or Console()).print(render(report))


def _table(report: Report) -> Table:
    table = Table()
    with_holders = any(device.allocated_to is not None for device in report.devices)
    for name in ("GPU", "model", "busy", "memory GiB"):
        table.add_column(name)
    for name in ("power W", "°C"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("held by", "used by") if with_holders else ("used by",):
        table.add_column(name)
    table.add_column("idle?", min_width=_VERDICT_WIDTH)
    for row, device in enumerate(report.devices):
        values = report.signals_of(row)
        cells = (
            _name(device),
            device.model.removeprefix("NVIDIA "),
            _busy(device, values),
            _memory(values),
            f"{_number(values, Signal.POWER)} / {_number(values, Signal.POWER_LIMIT)}",
            _number(values, Signal.TEMPERATURE),
            *((_holders(device),) if with_holders else ()),
            _users(device.used_by),
        )
        table.add_row(*map(_literal, cells), _verdict(device))
    return table


def _name(device: Device) -> str:
    index = _UNKNOWN if device.index is None else str(device.index)
    if device.mig_profile == NO_INSTANCES:
        return f"{index} MIG, no instance"
    if not device.gpu_instance_id:
        return index
    return f"{index}:{device.gpu_instance_id} {device.mig_profile}"


def _busy(device: Device, values: dict[str, float]) -> str:
    parts = [f"{values[signal]:.0%} {name}" for name, signal in _SHORT if signal in values]
    if Signal.GPU_UTILIZATION in values:
        parts.append(f"{values[Signal.GPU_UTILIZATION]:.0%} {device.activity_source}")
    extra = ((Signal.TENSOR_ACTIVE, "tensor"), (Signal.DRAM_ACTIVE, "memory"))
    parts += [f"{values[signal]:.0%} {name}" for signal, name in extra if values.get(signal)]
    return "\n".join(parts) or _UNKNOWN


def _memory(values: dict[str, float]) -> str:
    used, total = values.get(Signal.MEMORY_USED), values.get(Signal.MEMORY_TOTAL)
    return " / ".join(_UNKNOWN if one is None else f"{one / _GIB:.1f}" for one in (used, total))


def _number(values: dict[str, float], signal: Signal) -> str:
    return f"{values[signal]:.0f}" if signal in values else _UNKNOWN


def _holders(device: Device) -> str:
    if device.allocated_to is None:
        return _UNKNOWN
    return "\n".join(f"{one.namespace}/{one.pod}" for one in device.allocated_to) or "no pod"


def _users(processes: Iterable[Process] | None) -> str:
    if processes is None:
        return _UNKNOWN
    return "\n".join(map(_user, processes)) or "no process"


def _user(process: Process) -> str:
    who = f"{plain_text(process.name, MAX_NAME) or 'process'} {process.pid}"
    if process.place is Place.POD:
        who = f"{process.namespace}/{process.pod}: {who}" if process.pod else f"pod: {who}"
    if process.memory_bytes is not None:
        who += f", {process.memory_bytes / _GIB:.1f} GiB"
    return who


def _verdict(device: Device) -> Text:
    if device.verdict is None:
        return Text(_UNKNOWN)
    verdict = device.verdict
    word, style = _WORDS[verdict.is_idle]
    lines = [(word if device.problem is not None else f"{word}: {verdict.reason}", style)]
    if verdict.action:
        lines.append((f"{verdict.action}: {verdict.cause}", "red"))
    if verdict.stress_cause:
        lines.append((f"lower score: {verdict.stress_cause}", "yellow"))
    if device.foreign is not None and (device.foreign.memory_bytes or device.foreign.pids):
        lines.append((f"foreign use: {device.foreign.memory_bytes / _GIB:.1f} GiB", "magenta"))
    if device.age_seconds is not None and device.age_seconds > _STALE_SECONDS:
        lines.append((f"values are {device.age_seconds:.0f} s old", "yellow"))
    return Text("\n").join(Text(*line) for line in lines)
