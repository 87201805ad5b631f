"""Record which lines of functions run, by a call inserted before each statement.

A trace function would slow down all code, also that of hypothesis and numpy, several times.
"""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Final

_NAME: Final = "_idlegpu_line_ran"

Line = tuple[str, int]
"""Path of a file, and number of a line in it."""


@dataclass(slots=True)
class LineRecorder:
    """Records the lines that run in recorded code.

    Attributes:
        _statements: lines of each statement, by its number.
        _ran: numbers of the statements that ran.
    """

    _statements: list[tuple[Line, ...]] = field(default_factory=list)
    _ran: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Let recorded code find the recorder."""
        setattr(builtins, _NAME, self._ran.add)

    def take(self) -> set[Line]:
        """Return the lines that ran since the last call."""
        lines = {line for number in self._ran for line in self._statements[number]}
        self._ran.clear()
        return lines

    def compiled(self, text: str, path: str, file: str) -> CodeType:
        """Compile a module whose functions record their lines.

        Args:
            text: the module, written by `ast.unparse`.
            path: path of the file in the recorded lines.
            file: path of the file in the code.
        """
        tree = ast.parse(text)
        functions = [one for one in ast.walk(tree) if isinstance(one, _FUNCTIONS)]
        for function in functions:
            function.body = self._recorded(function.body, path)
        return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)

    def _recorded(self, body: list[ast.stmt], path: str) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            if not _is_text(statement):  # a docstring must stay first
                number = ast.Constant(len(self._statements))
                self._statements.append(tuple((path, line) for line in _lines(statement)))
                call = ast.Expr(ast.Call(ast.Name(_NAME, ast.Load()), [number], []))
                found.append(ast.copy_location(call, statement))
            found.append(statement)
            if not isinstance(statement, _FUNCTIONS):
                for inner in _bodies(statement):
                    inner[:] = self._recorded(inner, path)
        return found


_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _parts(statement: ast.stmt) -> list[ast.ExceptHandler | ast.match_case]:
    return [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for part in (statement, *_parts(statement)):
        for name in ("body", "orelse", "finalbody"):
            if inner := getattr(part, name, None):
                yield inner


def _lines(statement: ast.stmt) -> Iterator[int]:
    """Yield the lines of a statement without its bodies: with the heads of `except` and `case`."""
    for part in (statement, *_parts(statement)):
        first = part.pattern.lineno if isinstance(part, ast.match_case) else part.lineno
        body = getattr(part, "body", ())
        last = body[0].lineno - 1 if body else getattr(part, "end_lineno", first)
        yield from range(first, max(first, last) + 1)
