"""Possible mutations of a file, and their application."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

SHOWN: Final = 80
"""Number of characters of a line that are shown before and after a change."""

COMPARED: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: Final[Mapping[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
GUARDS: Final = frozenset({"frozen", "repr", "strict"})
"""Arguments of records, `field` and `zip` that only help to find faults."""

_OPPOSITES: Final = (("min", "max"), ("any", "all"), ("minimum", "maximum"), ("fmin", "fmax"))
NAMED: Final = {**dict(_OPPOSITES), **{right: left for left, right in _OPPOSITES}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: path of the file, relative to the root.
        line: number of the first changed line in the file.
        plain_line: number of the same line in the output of `ast.unparse`.
        before: the original line in the output of `ast.unparse`.
        after: the changed line.
        text: the whole changed file.
    """

    path: str
    line: int
    plain_line: int
    before: str
    after: str
    text: str

    @property
    def key(self) -> str:
        """Key of the change, independent of its line number."""
        return f"{self.path}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Site:
    """Place in a file, and a possible change there.

    Attributes:
        path: path of the file, relative to the root.
        place: number of the node in `ast.walk`.
        change: number of the change in `_changes`.
    """

    path: str
    place: int
    change: int


def plain(text: str) -> str:
    """Return code as `ast.unparse` writes it: without comments, one statement per line."""
    return ast.unparse(ast.parse(text))


def sites_of(path: str, text: str) -> Iterator[Site]:
    """Yield all possible changes of a file."""
    tree = ast.parse(text)
    passed_over = {id(node) for root in _passed_over(tree) for node in ast.walk(root)}
    for place, node in enumerate(ast.walk(tree)):
        if id(node) not in passed_over:
            yield from (Site(path, place, number) for number in range(len(_changes(node))))


def _passed_over(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield nodes that no test needs to cover: types, decorators, log lines, messages."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                yield getattr(node, name)
        yield from getattr(node, "decorator_list", ())
        if isinstance(node, ast.keyword) and node.arg in GUARDS:
            yield node
        if isinstance(node, ast.Raise) or _is_log(node) or _is_alias(node) or _is_typing(node):
            yield node
    # The sizes of limits were chosen by measurements.
    yield from (statement for statement in tree.body if _is_limit(statement))


def _is_limit(statement: ast.stmt) -> bool:
    match statement:
        case ast.AnnAssign(value=ast.expr() as value) | ast.Assign(value=value):
            parts = ast.walk(value)
            return all(isinstance(one, ast.Constant | ast.BinOp | ast.operator) for one in parts)
        case _:
            return False


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger.")


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _is_alias(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Subscript)


def mutant_at(site: Site, text: str) -> Mutant:
    """Return a file with one change."""
    tree = ast.parse(text)
    original = ast.unparse(tree)
    node = next(one for at, one in enumerate(ast.walk(tree)) if at == site.place)
    _changes(node)[site.change]()
    ast.fix_missing_locations(tree)
    changed = ast.unparse(tree)
    lines = enumerate(zip(original.splitlines(), changed.splitlines(), strict=False), start=1)
    plain_line, (before, after) = next(
        ((number, pair) for number, pair in lines if pair[0] != pair[1]), (1, ("", ""))
    )
    return Mutant(
        path=site.path,
        line=_line(text, original, plain_line) if _is_def(node) else getattr(node, "lineno", 1),
        plain_line=plain_line,
        before=_about(before, after),
        after=_about(after, before),
        text=changed,
    )


def _is_def(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _line(text: str, original: str, plain_line: int) -> int:
    """Return the line in the file of the statement at a line of the output of `ast.unparse`."""
    pairs = zip(ast.walk(ast.parse(text)), ast.walk(ast.parse(original)), strict=True)
    return next(
        (
            one.lineno
            for one, other in pairs
            if isinstance(one, ast.stmt) and getattr(other, "lineno", 0) == plain_line
        ),
        1,
    )


def _about(text: str, other: str) -> str:
    """Return the part of a line around its difference from another one."""
    pairs = enumerate(zip(text, other, strict=False))
    at = next((at for at, (one, another) in pairs if one != another), 0)
    start = max(len(text) - len(text.lstrip()), at - SHOWN)
    return re.sub(r"\s+", " ", text[start : at + SHOWN].strip())


def _changes(node: ast.AST) -> list[Callable[[], None]]:  # noqa: C901, PLR0912, PLR0915 - a case each
    """Return functions that change a node in place, one for each possible change."""
    found: list[Callable[[], None]] = []

    def to(name: str, value: object) -> None:
        def change() -> None:
            setattr(node, name, value)

        found.append(change)

    def without(name: str, at: int) -> None:
        def change() -> None:
            for each in name.split():
                del getattr(node, each)[at]

        found.append(change)

    match node:
        case ast.Compare(ops=[operator]):
            to("ops", [COMPARED[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in COMPUTED:
            if not (isinstance(operator, ast.BitOr) and _is_of_types(node)):
                to("op", COMPUTED[type(operator)]())
        case ast.AugAssign(op=operator) if type(operator) in COMPUTED:
            to("op", COMPUTED[type(operator)]())
        case ast.BoolOp(op=operator):
            to("op", ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.If(test=test) | ast.IfExp(test=test):
            to("test", ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool() as value):
            to("value", not value)
        case ast.Constant(value=int() | float() as value):
            to("value", value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in NAMED:
            to("func", ast.Name(NAMED[name]))
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in NAMED:
            to("func", ast.Attribute(value, NAMED[name]))
        case ast.Tuple(elts=parts, ctx=ast.Load()) | ast.List(elts=parts, ctx=ast.Load()):
            if len(parts) > 1:
                without("elts", len(parts) // 2)
        case ast.Set(elts=parts) if len(parts) > 1:
            without("elts", len(parts) // 2)
        case ast.Dict(keys=parts) if len(parts) > 1:
            without("keys values", len(parts) // 2)
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
            for at, statement in enumerate(body):
                is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
                if is_call and not _is_log(statement):
                    found.append(_passed(body, at))
        case _:
            pass
    return found


def _passed(body: list[ast.stmt], at: int) -> Callable[[], None]:
    def change() -> None:
        body[at] = ast.Pass()

    return change


def _is_of_types(node: ast.BinOp) -> bool:
    """Return whether an operation is a union of types, by its syntax: `X | None`, `int | str`."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    none = any(isinstance(one, ast.Constant) and one.value is None for one in ast.walk(node))
    return none or bool(names & {"int", "float", "str", "bytes", "bool", "dict", "list", "tuple"})
