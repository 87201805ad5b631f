"""Nodes of a parsed query, and elements of its answer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Element:
    """Element of an instant vector."""

    labels: Mapping[str, str]
    value: float


Vector = Sequence[Element]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    """Label matcher of a selector."""

    label: str
    operator: str
    value: str

    def accepts(self, labels: Mapping[str, str]) -> bool:
        """Return whether a series with these labels matches; an absent label is ""."""
        actual = labels.get(self.label, "")
        if self.operator in {"=", "!="}:
            return (actual == self.value) is (self.operator == "=")
        return bool(re.fullmatch(self.value, actual)) is (self.operator == "=~")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Selector by name and matchers; a range selector if `window_seconds` is set."""

    name: str
    matchers: tuple[Matcher, ...] = ()
    window_seconds: float | None = None
    offset_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Function call: `timestamp(…)`, or a function of a range such as `rate(…[…])`."""

    function: str
    selector: Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """Aggregation such as `max by (labels) (operand)`."""

    operator: str
    labels: tuple[str, ...]
    operand: "Expression"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOperation:
    """Set operation `left or right`, `left and on (labels) right`; `on` is None for all labels."""

    operator: str
    left: "Expression"
    right: "Expression"
    on: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference `left - right` of elements with the same labels."""

    left: "Expression"
    right: "Expression"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Filter `operand > limit`: the elements above a number."""

    operand: "Expression"
    limit: float


Expression = Selector | Call | Aggregation | SetOperation | Difference | Filter
