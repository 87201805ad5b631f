"""Values as people read them; `?` is unknown."""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import click
from typing_extensions import override  # in typing from Python 3.12 on

UNKNOWN: Final = "?"
NOTHING: Final = "-"
SHADOW: Final = "in shadow mode kube-scheduler is not told what was chosen: nothing changes"
GIB: Final = float(1 << 30)

_SPAN: Final = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s?)?")
_SECONDS: Final = (86_400, 3600, 60, 1)


def clean(text: str) -> str:
    r"""Return a text that can do nothing to a terminal.

    Example:
        >>> clean("a\x1b[31mb")
        'a?[31mb'
    """
    return "".join(letter if letter.isprintable() else UNKNOWN for letter in text)


def percent(ratio: float | None) -> str:
    """Return a ratio as a percentage.

    Example:
        >>> percent(0.034), percent(None)
        ('3%', '?')
    """
    return UNKNOWN if ratio is None else f"{ratio:.0%}"


def gib(count: float | None) -> str:
    """Return bytes as GiB.

    Example:
        >>> gib(61 * GIB), gib(GIB / 2), gib(0), gib(None)
        ('61', '0.5', '0', '?')
    """
    if count is None:
        return UNKNOWN
    value = count / GIB
    return f"{value:.0f}" if value >= 10 or not value else f"{value:.1f}"  # noqa: PLR2004 - two digits are enough


def money(amount: float | None) -> str:
    """Return what something costs, in whatever money the price list is.

    Example:
        >>> money(12345.678), money(None)
        ('12,345.68', '?')
    """
    return UNKNOWN if amount is None else f"{amount:,.2f}"


def span(seconds: float | None) -> str:
    """Return a time span as kubectl writes ages.

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
    """Return the time of day of a time of the API, in this machine's zone."""
    if not at:
        return UNKNOWN
    return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")


def resources(counts: Mapping[str, int]) -> str:
    """Return what a pod asks for, in short.

    Example:
        >>> resources({"nvidia.com/gpu": 2, "nvidia.com/mig-1g.10gb": 1})
        '2 gpu, 1 mig-1g.10gb'
    """
    return ", ".join(f"{count} {name.rpartition('/')[2]}" for name, count in counts.items())


def model(name: str) -> str:
    """Return a model without what all have in common.

    Example:
        >>> model("NVIDIA H100 80GB HBM3"), model("")
        ('H100 80GB HBM3', '?')
    """
    return name.removeprefix("NVIDIA").strip(" -") or UNKNOWN


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return some names, and how many there are besides.

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
    """Return a time span in seconds.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_span("1h"), parse_span("90"), parse_span("1d12h")
        (3600, 90, 129600)
    """
    match = _SPAN.fullmatch(text.strip())
    if not text.strip() or match is None:
        raise ValueError(f"{text!r}: must be a time such as 30m, 1h, 1d12h or 90 (seconds)")
    return sum(int(part or 0) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True))


class Span(click.ParamType[int]):
    """A time span as an option."""

    name = "time"

    @override
    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return it in seconds."""
        if isinstance(value, int):
            return value
        try:
            return parse_span(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Whole(click.IntRange):
    """A whole number within bounds as an option; says which where it is none."""

    name = "number"

    @override
    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int:
        """Return it."""
        try:
            number: int = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{str(value)!r}: must be a whole number {_within(self)}", param, ctx)
        return number


class Number(click.FloatRange):
    """A number within bounds, likewise."""

    name = "number"

    @override
    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Return it."""
        try:
            number: float = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{str(value)!r}: must be a number {_within(self)}", param, ctx)
        return number


def _within(bounds: click.IntRange | click.FloatRange) -> str:
    return f"from {bounds.min:g} to {bounds.max:g}"
