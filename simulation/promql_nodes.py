"""What a query is made of once it is parsed, and what an answer is made of."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Element:
    """One element of an instant vector."""

    labels: Mapping[str, str]
    value: float


Vector = Sequence[Element]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    """One label matcher of a selector."""

    label: str
    operator: str
    value: str

    def accepts(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with these labels passes; an absent label is ""."""
        actual = labels.get(self.label, "")
        if self.operator in {"=", "!="}:
            return (actual == self.value) is (self.operator == "=")
        return bool(re.fullmatch(self.value, actual)) is (self.operator == "=~")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Series by name and matchers; a range selector where `window_seconds` is set."""

    name: str
    matchers: tuple[Matcher, ...] = ()
    window_seconds: float | None = None
    offset_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`timestamp(…)`, or a function of a range: `rate(…[…])` and the like."""

    function: str
    selector: Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """`max by (labels) (operand)`."""

    operator: str
    labels: tuple[str, ...]
    operand: "Expression"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOperation:
    """`left or right`, `left and on (labels) right`; `on` is None for all labels."""

    operator: str
    left: "Expression"
    right: "Expression"
    on: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`left - right`, of elements with the same labels."""

    left: "Expression"
    right: "Expression"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """`operand > limit`: the elements above a number."""

    operand: "Expression"
    limit: float


Expression = Selector | Call | Aggregation | SetOperation | Difference | Filter
