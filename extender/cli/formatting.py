"""Format values for people, and parse option values; an unknown value prints as `?`."""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

import click
from typing_extensions import override  # in typing from Python 3.12 on

from extender.answers.decisions import VerdictAnswer
from extender.answers.holding import HolderAnswer, SumsAnswer
from extender.answers.routes import Route

_Command = TypeVar("_Command", bound=Callable[..., Any])

UNKNOWN: Final = "?"
NOTHING: Final = "-"
SHADOW: Final = "in shadow mode kube-scheduler does not receive the choice: nothing changes"
RANKED_COLUMNS: Final = [">#", "NODE", "?MODEL", ">IDLE", ">CHANCE", "?>ACTIVITY", ">FREE GiB"]
IDLE_MIG: Final = ">IDLE MIG"
"""Column of idle MIG instances, as `idle_of` formats them."""
_GIB: Final = float(1 << 30)

_SPAN: Final = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s?)?")
_SECONDS: Final = (86_400, 3600, 60, 1)


def clean(text: str) -> str:
    r"""Replace unprintable characters, so that a text cannot control the terminal.

    Example:
        >>> clean("a\x1b[31mb")
        'a?[31mb'
    """
    return "".join(letter if letter.isprintable() else UNKNOWN for letter in text)


def percent(ratio: float | None) -> str:
    """Format a ratio as a percentage.

    Example:
        >>> percent(0.034), percent(None)
        ('3%', '?')
    """
    return UNKNOWN if ratio is None else f"{ratio:.0%}"


def gib(count: float | None) -> str:
    """Format a number of bytes in GiB.

    Example:
        >>> gib(61 * _GIB), gib(_GIB / 2), gib(0), gib(None)
        ('61', '0.5', '0', '?')
    """
    if count is None:
        return UNKNOWN
    value = count / _GIB
    return f"{value:.0f}" if value >= 10 or not value else f"{value:.1f}"  # noqa: PLR2004 - two digits are enough


def money(amount: float | None) -> str:
    """Format an amount in the currency of the price list.

    Example:
        >>> money(12345.678), money(None)
        ('12,345.68', '?')
    """
    return UNKNOWN if amount is None else f"{amount:,.2f}"


def summed(sums: SumsAnswer) -> str:
    """Format the GPU-hours and costs of several pods as one line."""
    hours = f"{sums.gpu_hours:.1f} GPU-hours, {sums.gpu_hours_idle:.1f} of them idle"
    if sums.cost is None:
        return hours
    return f"{hours}: {money(sums.cost)}, {money(sums.cost_idle)} of it idle"


def ranked_node(rank: int | None, verdict: VerdictAnswer) -> list[str]:
    """Format one node of a ranking, as a row under `RANKED_COLUMNS`."""
    landing = [device for device in verdict.devices if device.can_land]
    known = [device.utilization_ratio for device in landing if device.utilization_ratio is not None]
    free = [device.free_bytes for device in landing if device.free_bytes is not None]
    return [
        NOTHING if rank is None else str(rank),
        verdict.node,
        verdict.model or UNKNOWN,
        f"{verdict.idle}/{verdict.landing}",
        percent(verdict.chance),
        percent(sum(known) / len(known) if known else None),
        gib(sum(free) / len(free) if free else None),
    ]


def idle_of(one: HolderAnswer | SumsAnswer, *, has_mig: bool) -> list[str]:
    """Format the idle GPUs and, if any pod has some, the idle MIG instances."""
    gpus = f"{one.gpus_idle}/{one.gpus}" if one.gpus else NOTHING
    if not has_mig:
        return [gpus]
    instances = f"{one.mig_instances_idle}/{one.mig_instances}"
    return [gpus, instances if one.mig_instances else NOTHING]


def no_holders(idle_for_seconds: float) -> str:
    """Return the message that no pod holds GPUs, or none has left its GPUs idle for so long.

    Example:
        >>> no_holders(86_400), no_holders(0)
        ('no pod is known to hold GPUs unused for 1d', 'no pod is known to hold GPUs')
    """
    unused = f" unused for {span(idle_for_seconds)}" if idle_for_seconds else ""
    return f"no pod is known to hold GPUs{unused}"


def span(seconds: float | None) -> str:
    """Format a duration as kubectl formats ages.

    Example:
        >>> span(9.7), span(190), span(3600 * 5 + 60), span(86_400 * 3)
        ('9s', '3m10s', '5h1m', '3d')
    """
    if seconds is None:
        return UNKNOWN
    left = max(int(seconds), 0)
    for place, (unit, length) in enumerate(zip("dhms", _SECONDS, strict=True)):
        if left >= length:
            rest = left % length
            smaller = _SECONDS[place + 1] if place + 1 < len(_SECONDS) else 0
            more = f"{rest // smaller}{'dhms'[place + 1]}" if smaller and rest >= smaller else ""
            return f"{left // length}{unit}{more}"
    return "0s"


def clock(at: str | None) -> str:
    """Format an RFC 3339 time as local time to the second, with the day unless it is today."""
    return _local(at, "%H:%M:%S", "%m-%d %H:%M:%S") if at else UNKNOWN


def since(at: str) -> str:
    """Format an RFC 3339 time as local time to the minute, with the day unless it is today."""
    return _local(at, "%H:%M", "%Y-%m-%d %H:%M")


def _local(at: str, today: str, another_day: str) -> str:
    local = datetime.fromisoformat(at).astimezone()
    is_today = local.date() == datetime.now().astimezone().date()
    return local.strftime(today if is_today else another_day)


def resources(counts: Mapping[str, int]) -> str:
    """Format a pod's resource requests without their vendor prefix.

    Example:
        >>> resources({"nvidia.com/gpu": 2, "nvidia.com/mig-1g.10gb": 1})
        '2 gpu, 1 mig-1g.10gb'
    """
    return ", ".join(f"{count} {name.rpartition('/')[2]}" for name, count in counts.items())


def listed(names: Iterable[str], most: int = 3) -> str:
    """Join the first names with commas and add the number of the remaining ones.

    Example:
        >>> listed(["a", "b", "c", "d"], 2), listed([])
        ('a, b and 2 more', '-')
    """
    every = list(names)
    if not every:
        return NOTHING
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def parse_span(text: str) -> int:
    """Parse a duration into seconds.

    Raises:
        ValueError: the text is not a duration.

    Example:
        >>> parse_span("1h"), parse_span("90"), parse_span("1d12h")
        (3600, 90, 129600)
    """
    match = _SPAN.fullmatch(text.strip())
    if not text.strip() or match is None:
        raise ValueError(f"{text!r}: must be a time such as 30m, 1h, 1d12h or 90 (seconds)")
    return sum(int(part or 0) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True))


class Span(click.ParamType[int]):
    """Option type for a duration such as 1h, in seconds.

    Args:
        low: shortest duration in seconds, 0 for none.
        high: longest duration in seconds, 0 for none.
    """

    name = "time"

    def __init__(self, low: int = 0, high: int = 0) -> None:
        self._low, self._high = low, high

    @override
    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Parse the option's value into seconds."""
        if isinstance(value, int):
            return value
        try:
            seconds = parse_span(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._high and not self._low <= seconds <= self._high:
            bounds = f"{span(self._low)} to {span(self._high)}"
            self.fail(f"{value!r}: must be a time from {bounds}", param, ctx)
        return seconds


class Whole(click.IntRange):
    """Option type for an integer within bounds; its error message names the bounds."""

    name = "number"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the option's value and check its bounds."""
        try:
            number: int = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{str(value)!r}: must be a whole number {_within(self)}", param, ctx)
        return number


class Number(click.FloatRange):
    """Option type for a number within bounds; its error message names the bounds."""

    name = "number"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse the option's value and check its bounds."""
        try:
            number: float = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{str(value)!r}: must be a number {_within(self)}", param, ctx)
        return number


def number_option(
    route: Route[Any], name: str, text: str, *, default: int | None = None
) -> Callable[[_Command], _Command]:
    """Return the decorator of an option that becomes an integer parameter of a route.

    Args:
        route: the route; its parameter has the bounds.
        name: name of the parameter and of the option.
        text: help of the option.
        default: default of the option, if it is not the parameter's.
    """
    number = route.number(name)
    return click.option(
        f"--{name}",
        default=number.default if default is None else default,
        show_default=True,
        type=Whole(number.low, number.high),
        help=text,
    )


def span_of(route: Route[Any], name: str) -> Span:
    """Return an option type for durations, with the bounds of a route's parameter in seconds."""
    number = route.number(name)
    return Span(number.low, number.high)


def _within(bounds: click.IntRange | click.FloatRange) -> str:
    return f"from {bounds.min:g} to {bounds.max:g}"
