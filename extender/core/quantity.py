"""Parse Kubernetes quantities (`2`, `20Gi`, `500m`, `1e3`) as exact numbers."""

import re
from fractions import Fraction
from string import whitespace
from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_MAX_VALUE: Final = 2**63 - 1
"""Kubernetes caps larger quantities at this value, the largest int64."""

MAX_LENGTH: Final = 64
"""Longer texts are rejected without parsing; sensible quantities have at most about 25
characters."""

_MAX_EXPONENT: Final = 99
"""Larger powers of 10 exceed every bound, and computing them would take long."""

_PLAIN_LENGTH: Final = 18
"""Texts of at most this many digits are below the cap, and need no exact arithmetic."""

_ALLOWED: Final = (
    "a number with an optional suffix: Ki Mi Gi Ti Pi Ei (powers of 1024), "
    "n u m k M G T P E (powers of 1000) or an exponent such as e3"
)

_SUFFIXES: Final = {
    **{
        suffix: Fraction(1024) ** power
        for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)
    },
    **{
        suffix: Fraction(1000) ** power
        for power, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), start=-3)
    },
}
_QUANTITY: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<fraction>[0-9]*))?"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE]?)|[eE](?P<exponent>[+-]?[0-9]+))"
)


def parse_quantity(value: object) -> Fraction:
    """Parse a Kubernetes quantity exactly.

    Args:
        value: its text, or a JSON number, which the API accepts as well.

    Raises:
        ValueError: `value` is not a quantity; the message states the allowed form.

    Example:
        >>> parse_quantity("1.5Ki")
        Fraction(1536, 1)
        >>> parse_quantity("500m")
        Fraction(1, 2)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _cap(Fraction(value))
    text = repr(value) if isinstance(value, float) else value
    if not isinstance(text, str):
        raise _refusal(value)
    if len(text) > MAX_LENGTH:
        raise _refusal(f"{text[:MAX_LENGTH]}...")
    match = _QUANTITY.fullmatch(text.strip(whitespace))  # as Kubernetes reads it
    if match is None:
        raise _refusal(text)
    whole, fraction = match["whole"], match["fraction"] or ""
    if not whole + fraction:
        raise _refusal(text)
    number = Fraction(int(whole + fraction), 10 ** len(fraction)) * _scale(match, text)
    return _cap(-number if match["sign"] == "-" else number)


def parse_whole(value: object) -> int:
    """Parse a quantity, such as bytes or a count, rounded up like Kubernetes' `Value()`.

    Raises:
        ValueError: `value` is not a quantity, or is negative.

    Example:
        >>> parse_whole("2"), parse_whole("1500m"), parse_whole("20Gi")
        (2, 2, 21474836480)
    """
    if (
        isinstance(value, str)
        and len(value) <= _PLAIN_LENGTH
        and value.isascii()
        and value.isdigit()
    ):
        return int(value)  # the usual case
    quantity = parse_quantity(value)
    if quantity < 0:
        raise ValueError(f"{value!r} is negative: must be 0 or more")
    return -int(-quantity // 1)


def _scale(match: re.Match[str], text: str) -> Fraction:
    """Return the factor of the suffix or exponent."""
    exponent = match["exponent"]
    if exponent is None:
        return _SUFFIXES[match["suffix"]]
    power = int(exponent)
    if abs(power) > _MAX_EXPONENT:
        raise ValueError(f"{text!r} is out of range: the exponent must be at most {_MAX_EXPONENT}")
    return Fraction(10) ** power


def _cap(number: Fraction) -> Fraction:
    """Limit a number to the range of Kubernetes quantities."""
    return max(min(number, Fraction(_MAX_VALUE)), Fraction(-_MAX_VALUE))


def _refusal(value: object) -> ValueError:
    """Create the error for an invalid quantity, with the allowed form."""
    shown = value if isinstance(value, str | int | float | None) else type(value).__name__
    return ValueError(f"{shown!r} is not a quantity: must be {_ALLOWED}")
