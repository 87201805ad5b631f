"""Parser and evaluator of a subset of PromQL: the extender's queries, and a little more.

The subset: selectors with matchers, timestamp(), last_over_time(), max_over_time(), rate(), max,
min, sum, avg, count and group with `by`, `or`, `and` with `on`, `-` of two vectors, `offset`, and
`>` with a number. Any other expression raises an error that names it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

from testkit.prometheus.promql_nodes import (
    Aggregation,
    Call,
    Difference,
    Element,
    Expression,
    Filter,
    Matcher,
    Selector,
    SetOperation,
    Vector,
)
from testkit.prometheus.samples import LOOKBACK_SECONDS, NAME


class Series(Protocol):
    """Time series; see `samples.Series`."""

    @property
    def labels(self) -> Mapping[str, str]: ...

    def at(self, time: float, window_seconds: float = ...) -> tuple[float, float] | None: ...

    def most(self, time: float, window_seconds: float) -> float | None: ...

    def rate(self, time: float, window_seconds: float) -> float | None: ...


class Store(Protocol):
    """Series by the name of their metric, or all of them."""

    def select(self, name: str = "") -> Iterator[Series]: ...


class PromqlError(ValueError):
    """Error of a query that cannot be parsed."""


class EvaluationError(ValueError):
    """Error of a query that can be parsed but not evaluated, as in the real Prometheus."""


_AGGREGATIONS: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "max": max,
    "min": min,
    "sum": sum,
    "avg": lambda values: sum(values) / len(values),
    "count": lambda values: float(len(values)),
    "group": lambda _: 1.0,
}
_OF_RANGES: Final = frozenset({"last_over_time", "max_over_time", "rate"})
_FUNCTIONS: Final = _OF_RANGES | {"timestamp"}
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TOKEN: Final = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<word>[a-zA-Z_:][a-zA-Z0-9_:]*)'
    r"|(?P<span>[0-9]+(?:ms|s|m|h|d))|(?P<number>[0-9]+(?:\.[0-9]+)?)"
    r"|(?P<sign>=~|!~|!=|[=(){}\[\],>-]))"
)


def parse(text: str) -> Expression:
    """Parse a query.

    Raises:
        PromqlError: the query is not in the subset, or not PromQL.
    """
    parser = _Parser(tokens=list(_tokens(text)))
    expression = parser.expression()
    if parser.peek():
        parser.fail()
    return expression


def _tokens(text: str) -> Iterator[str]:
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise PromqlError(f"the simulated Prometheus does not understand {text[position:]!r}")
        yield match[0].strip()
        position = match.end()


@dataclass(slots=True, kw_only=True)
class _Parser:
    """Recursive descent parser of tokens; `""` marks the end."""

    tokens: list[str]
    position: int = 0

    def peek(self, ahead: int = 0) -> str:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            self.fail()
        self.position += 1
        return token

    def fail(self) -> NoReturn:
        rest = " ".join(self.tokens[self.position :]) or "the end of the query"
        raise PromqlError(f"the simulated Prometheus does not understand {rest!r} here")

    def expression(self) -> Expression:
        left = self.conjunction()
        while self.peek() == "or":
            self.take()
            left = SetOperation(operator="or", left=left, right=self.conjunction())
        return left

    def conjunction(self) -> Expression:
        left = self.filtered()
        while self.peek() == "and":
            self.take()
            on = None
            if self.peek() == "on":
                self.take()
                on = self.label_list()
            left = SetOperation(operator="and", left=left, right=self.filtered(), on=on)
        return left

    def filtered(self) -> Expression:
        operand = self.difference()
        if self.peek() != ">":
            return operand
        self.take()
        if not self.peek()[:1].isdigit():
            self.fail()
        return Filter(operand=operand, limit=float(self.take()))

    def difference(self) -> Expression:
        left = self.operand()
        while self.peek() == "-":
            self.take()
            left = Difference(left=left, right=self.operand())
        return left

    def operand(self) -> Expression:
        head = self.peek()
        if head == "(":
            return self.parenthesized()
        if head in _AGGREGATIONS and self.peek(1) in {"(", "by"}:
            return self.aggregation()
        if head in _FUNCTIONS and self.peek(1) == "(":
            return self.call()
        return self.selector()

    def parenthesized(self) -> Expression:
        self.take("(")
        inner = self.expression()
        self.take(")")
        return inner

    def aggregation(self) -> Expression:
        operator = self.take()
        labels: tuple[str, ...] = ()
        if self.peek() == "by":
            self.take()
            labels = self.label_list()
        operand = self.parenthesized()
        if not labels and self.peek() == "by":
            self.take()
            labels = self.label_list()
        return Aggregation(operator=operator, labels=labels, operand=operand)

    def call(self) -> Expression:
        function = self.take()
        self.take("(")
        selector = self.selector()
        self.take(")")
        if (selector.window_seconds is not None) is not (function in _OF_RANGES):
            raise PromqlError(f"{function}() of the wrong kind of vector")
        if selector.offset_seconds:
            raise PromqlError(f"{function}() of a vector with an offset")
        return Call(function=function, selector=selector)

    def selector(self) -> Selector:
        name = ""
        if self.peek() != "{":
            name = self.take()
            if not name[0].isalpha() and name[0] not in "_:":
                self.position -= 1
                self.fail()
        matchers = tuple(self.matchers()) if self.peek() == "{" else ()
        if not name and not matchers:
            raise PromqlError("vector selector must contain at least one non-empty matcher")
        window_seconds = self.window()
        return Selector(
            name=name,
            matchers=matchers,
            window_seconds=window_seconds,
            offset_seconds=self.offset(),
        )

    def matchers(self) -> Iterator[Matcher]:
        self.take("{")
        while self.peek() != "}":
            label, operator = self.take(), self.take()
            if operator not in {"=", "!=", "=~", "!~"} or self.peek()[:1] != '"':
                self.fail()
            value = re.sub(r"\\(.)", r"\1", self.take()[1:-1])
            yield Matcher(label=label, operator=operator, value=value)
            if self.peek() != "}":
                self.take(",")
        self.take("}")

    def window(self) -> float | None:
        if self.peek() != "[":
            return None
        self.take("[")
        seconds = self.span()
        self.take("]")
        return seconds

    def offset(self) -> float:
        if self.peek() != "offset":
            return 0.0
        self.take()
        return self.span()

    def span(self) -> float:
        match = re.fullmatch("([0-9]+)([a-z]+)", self.peek())
        if match is None:
            self.fail()
        self.take()
        return float(match[1]) * _UNITS[match[2]]

    def label_list(self) -> tuple[str, ...]:
        self.take("(")
        labels: list[str] = []
        while self.peek() != ")":
            labels.append(self.take())
            if self.peek() != ")":
                self.take(",")
        self.take(")")
        return tuple(labels)


def evaluate(expression: Expression, store: Store, at: float) -> Vector:
    """Evaluate a query.

    Args:
        expression: the parsed query.
        store: the series.
        at: time of evaluation, seconds since the epoch.

    Raises:
        EvaluationError: the real Prometheus would reject it, too.
    """
    match expression:
        case Selector(window_seconds=None):
            return [
                Element(series.labels, sample[1])
                for series in _selected(expression, store)
                if (sample := series.at(at - expression.offset_seconds))
            ]
        case Selector():
            raise EvaluationError("a range vector is not an answer to an instant query")
        case Call():
            return _call(expression, store, at)
        case Aggregation():
            return _aggregated(expression, evaluate(expression.operand, store, at))
        case Difference():
            right = evaluate(expression.right, store, at)
            return _difference(evaluate(expression.left, store, at), right)
        case Filter():
            operand = evaluate(expression.operand, store, at)
            return [element for element in operand if element.value > expression.limit]
        case SetOperation():
            left = evaluate(expression.left, store, at)
            return _combined(expression, left, evaluate(expression.right, store, at))


def _selected(selector: Selector, store: Store) -> Iterator[Series]:
    for series in store.select(selector.name):
        if all(matcher.accepts(series.labels) for matcher in selector.matchers):
            yield series


def _call(call: Call, store: Store, at: float) -> Vector:
    if call.function in {"rate", "max_over_time"}:
        name = "rate" if call.function == "rate" else "most"
        return [
            Element(_without_name(series.labels), value)
            for series in _selected(call.selector, store)
            if (value := getattr(series, name)(at, call.selector.window_seconds or 0.0)) is not None
        ]
    found = [
        (series.labels, sample)
        for series in _selected(call.selector, store)
        if (sample := series.at(at, call.selector.window_seconds or LOOKBACK_SECONDS))
    ]
    if call.function == "last_over_time":
        return [Element(labels, value) for labels, (_, value) in found]
    times = [Element(_without_name(labels), time) for labels, (time, _) in found]
    if len({_signature(element.labels, None) for element in times}) < len(times):
        raise EvaluationError("vector cannot contain metrics with the same labelset")
    return times


def _aggregated(aggregation: Aggregation, operand: Vector) -> Vector:
    groups: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for element in operand:
        key = tuple(
            (label, element.labels[label])
            for label in aggregation.labels
            if element.labels.get(label)
        )
        groups.setdefault(key, []).append(element.value)
    combine = _AGGREGATIONS[aggregation.operator]
    return [Element(dict(key), combine(values)) for key, values in groups.items()]


def _combined(operation: SetOperation, left: Vector, right: Vector) -> Vector:
    if operation.operator == "and":
        wanted = {_signature(element.labels, operation.on) for element in right}
        return [item for item in left if _signature(item.labels, operation.on) in wanted]
    known = {_signature(element.labels, None) for element in left}
    return [*left, *(item for item in right if _signature(item.labels, None) not in known)]


def _difference(left: Vector, right: Vector) -> Vector:
    taken = {_signature(element.labels, None): element.value for element in right}
    return [
        Element(_without_name(element.labels), element.value - taken[signature])
        for element in left
        if (signature := _signature(element.labels, None)) in taken
    ]


def _signature(labels: Mapping[str, str], on: tuple[str, ...] | None) -> frozenset[tuple[str, str]]:
    if on is None:
        return frozenset(_without_name(labels).items())
    return frozenset((label, labels.get(label, "")) for label in on)


def _without_name(labels: Mapping[str, str]) -> dict[str, str]:
    return {label: value for label, value in labels.items() if label != NAME}
