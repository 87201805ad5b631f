"""Which small faults the tests of a room would let pass: `make mutants ROOM=core`.

A sample of mutants of the room's code, each with one change, is tried on the room's own tests: on
those that run the changed line, and on all where it runs while a module is imported. Everything
happens in a copy of the tree. A mutant that no test notices survives; one whose behavior cannot be
told from the original's is no gap, and stands with the reason in
`bench/data/equivalent_mutants.txt`.

Mutants are written without comments and in Python's own layout. So each file is first tried like
this without any change, on the tests of its mutants: those have to pass. Where pytest itself fails,
nothing is known of the mutant, and it does not count.
"""

import argparse
import ast
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coverage import CoverageData

from bench.machine import Bound, report

ROOT: Final = Path(__file__).parent.parent
EQUIVALENT: Final = ROOT / "bench" / "data" / "equivalent_mutants.txt"
COPIED: Final = (
    "agent",
    "bench",
    "docs",
    "extender",
    "simulation",
    "tests",
    "pyproject.toml",
    "README.md",
)
MARKED: Final = "not prometheus and not e2e and not gpu and not page"
LIMIT_SECONDS: Final = 300.0
"""A mutant whose tests take longer hangs, and that is noticed."""
LARGEST_SHARE: Final = 0.1
TOLD: Final = (0, 1, 2)
"""Exit codes of pytest that tell of the tests: they passed, one failed, one cannot be imported."""
UNTOLD: Final = 70
OUTPUT: Final = "pytest-output.txt"
STANDARD_DEVIATIONS: Final = 1.96
"""Of 95 % confidence."""
HEAVY: Final = ("numpy", "aiohttp", "hypothesis", "msgspec", "orjson", "pytest")
"""Imported once, before each mutant's process is forked."""

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
_OPPOSITES: Final = (("min", "max"), ("any", "all"), ("minimum", "maximum"), ("fmin", "fmax"))
NAMED: Final = {
    **dict(_OPPOSITES),
    **{right: left for left, right in _OPPOSITES},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: of the file, from the root.
        line: first line of what is changed.
        before: the line that is changed, in Python's own layout.
        after: what it becomes.
        text: the whole file.
    """

    path: str
    line: int
    before: str
    after: str
    text: str

    @property
    def key(self) -> str:
        """By what it is known, wherever in the file it moves."""
        return f"{self.path}: {self.before} -> {self.after}"


# --- mutants --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """Where a file may be changed, and how.

    Attributes:
        path: of the file, from the root.
        place: number of the node in `ast.walk`.
        change: number of the change in `_changes`.
    """

    path: str
    place: int
    change: int


def sites_of(path: str) -> Iterator[Site]:
    """Yield all that may be changed in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    passed_over = {id(node) for root in _passed_over(tree) for node in ast.walk(root)}
    for place, node in enumerate(ast.walk(tree)):
        if id(node) not in passed_over:
            yield from (Site(path, place, number) for number in range(len(_changes(node))))


def _passed_over(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what no test should have to notice: types, decorators, log lines, messages."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                yield getattr(node, name)
        yield from getattr(node, "decorator_list", ())
        if isinstance(node, ast.Raise) or _is_log(node) or _is_alias(node):
            yield node
    for statement in tree.body:  # how large a limit is that was chosen by measuring
        match statement:
            case ast.AnnAssign(value=ast.Constant()) | ast.Assign(value=ast.Constant()):
                yield statement
            case _:
                pass


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger.")


def _is_alias(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Subscript)


def mutant_at(site: Site) -> Mutant:
    """Return a file with one change."""
    tree = ast.parse((ROOT / site.path).read_text(encoding="utf-8"))
    original = ast.unparse(tree)
    node = next(one for at, one in enumerate(ast.walk(tree)) if at == site.place)
    _changes(node)[site.change]()
    ast.fix_missing_locations(tree)
    text = ast.unparse(tree)
    lines = zip(original.splitlines(), text.splitlines(), strict=False)
    before, after = next(((old, new) for old, new in lines if old != new), ("", ""))
    return Mutant(
        path=site.path,
        line=getattr(node, "lineno", 1),
        before=_short(before),
        after=_short(after),
        text=text,
    )


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip())[:160]


def _changes(node: ast.AST) -> list[Callable[[], None]]:  # noqa: C901, PLR0912, PLR0915 - a case each
    """Return what may be changed in a node, in place."""
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
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                    found.append(_passed(body, at))
        case _:
            pass
    return found


def _passed(body: list[ast.stmt], at: int) -> Callable[[], None]:
    def change() -> None:
        body[at] = ast.Pass()

    return change


def _is_of_types(node: ast.BinOp) -> bool:
    """Whether it is a union of types, as far as its look tells: `X | None`, `int | str`."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    none = any(isinstance(one, ast.Constant) and one.value is None for one in ast.walk(node))
    return none or bool(names & {"int", "float", "str", "bytes", "bool", "dict", "list", "tuple"})


# --- rooms ----------------------------------------------------------------------------------------


def places_of(room: str) -> tuple[str, str]:
    """Return the folder of a room's code, and that of its tests."""
    code = room if (ROOT / room).is_dir() else f"extender/{room}"
    return code, f"tests/{code}"


def sample(code: str, count: int, seed: int) -> list[Mutant]:
    """Return some mutants of a room, the same for the same seed and code."""
    files = [path for path in sorted((ROOT / code).rglob("*.py")) if "_pb2" not in path.name]
    sites = [site for path in files for site in sites_of(str(path.relative_to(ROOT)))]
    chosen = random.Random(seed).sample(sites, min(count, len(sites)))
    return [mutant_at(site) for site in chosen]


class Bench:
    """A copy of the tree, in which mutants are tried.

    Args:
        folder: where it goes.
        code: folder of the room's code.
        tests: folder of its tests.
    """

    def __init__(self, folder: Path, code: str, tests: str) -> None:
        self._folder = folder
        self._code, self._tests = code, tests
        for name in COPIED:
            target = folder / name
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, target)
        self._tests_of: dict[str, dict[int, list[str]]] = {}

    def learn(self) -> None:
        """Run all tests once, and note which run which lines.

        Raises:
            RuntimeError: they fail without any change.
        """
        options = [f"--cov={self._code}", "--cov-context=test", "--cov-report="]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *self._options(), *options, self._code, self._tests],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        data = CoverageData(str(self._folder / ".coverage"))
        data.read()
        for file in data.measured_files():
            path = str(Path(file).relative_to(self._folder.resolve()))
            self._tests_of[path] = data.contexts_by_lineno(file)

    def _options(self) -> list[str]:
        once = "ignore::pytest.PytestAssertRewriteWarning"  # of what is imported before the fork
        return ["-x", "-q", "-p", "no:cacheprovider", "-W", once, "-m", MARKED]

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's line, those named for its file first."""
        lines = self._tests_of.get(mutant.path, {})
        told = {name.partition("|")[0] for name in lines.get(mutant.line, ()) if name}
        if not told:
            return [self._code, self._tests]
        own = f"test_{Path(mutant.path).stem}"
        return sorted(told, key=lambda name: (own not in name, name))

    def check(self, mutants: Sequence[Mutant]) -> None:
        """Try the file of some mutants without a change, on all tests of these.

        Raises:
            RuntimeError: a test fails.
        """
        path = mutants[0].path
        text = ast.unparse(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        chosen = dict.fromkeys(name for mutant in mutants for name in self.tests_for(mutant))
        if self._fails(path, text, list(chosen)):
            raise RuntimeError(f"tests fail although nothing in {path} is changed: {self.output}")

    def kills(self, mutant: Mutant) -> bool:
        """Whether any test notices a mutant.

        Raises:
            PytestError: pytest itself failed.
        """
        return self._fails(mutant.path, mutant.text, self.tests_for(mutant))

    def _fails(self, path: str, text: str, tests: Sequence[str]) -> bool:
        file = self._folder / path
        original = file.read_text(encoding="utf-8")
        file.write_text(text, encoding="utf-8")
        try:
            return _fails(self._folder, [*self._options(), *tests])
        finally:
            file.write_text(original, encoding="utf-8")

    @property
    def output(self) -> str:
        """The last words of pytest."""
        return (self._folder / OUTPUT).read_text(encoding="utf-8", errors="replace")[-2000:]


class PytestError(Exception):
    """Pytest failed where no test did."""


def _fails(folder: Path, arguments: Sequence[str]) -> bool:
    """Run pytest in a process that is forked from this one; whether a test fails, or hangs.

    Raises:
        PytestError: pytest itself failed.
    """
    child = os.fork()
    if not child:
        _run_pytest(folder, arguments)
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code not in TOLD:
                raise PytestError(f"pytest ended with {code}")
            return code != 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _run_pytest(folder: Path, arguments: Sequence[str]) -> None:
    """End this process as pytest says."""
    import pytest  # noqa: PLC0415 - a mutant's process alone needs it

    code = UNTOLD
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        sys.path[:] = [str(folder), *(one for one in sys.path if one not in {"", str(ROOT)})]
        sys.dont_write_bytecode = True
        for name in [one for one in sys.modules if one.partition(".")[0] in COPIED]:
            del sys.modules[name]
        with (folder / OUTPUT).open("w", encoding="utf-8") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = int(pytest.main(list(arguments)))
    finally:
        os._exit(code)


def equivalent() -> dict[str, str]:
    """Return the mutants that behave as the original, by key, and why."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" # ", 1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return between which shares of all the true one lies, by Wilson, with 95 % confidence.

    Example:
        >>> [round(share, 3) for share in wilson(6, 60)]
        [0.047, 0.201]
    """
    if not total:
        return 0.0, 1.0
    square, share = STANDARD_DEVIATIONS**2, count / total
    middle = share + square / (2 * total)
    spread = STANDARD_DEVIATIONS * math.sqrt(
        share * (1 - share) / total + square / (4 * total * total)
    )
    return (middle - spread) / (1 + square / total), (middle + spread) / (1 + square / total)


@dataclass(slots=True)
class Found:
    """What came of the mutants.

    Attributes:
        killed: how many were.
        survivors: no test noticed them.
        untold: pytest itself failed.
    """

    killed: int = 0
    survivors: list[Mutant] = field(default_factory=list)
    untold: list[Mutant] = field(default_factory=list)


def try_all(bench: Bench, mutants: Sequence[Mutant], seconds: float) -> Found:
    """Try mutants in their order until the time is up, and print what comes of each."""
    found, checked = Found(), set[str]()
    deadline = time.monotonic() + seconds
    for mutant in mutants:
        if time.monotonic() > deadline:
            break
        if mutant.path not in checked:
            bench.check([one for one in mutants if one.path == mutant.path])
            checked.add(mutant.path)
        try:
            is_killed = bench.kills(mutant)
        except PytestError as error:
            found.untold.append(mutant)
            said = f"UNTOLD ({error}: {bench.output})"
        else:
            found.killed += is_killed
            found.survivors += [] if is_killed else [mutant]
            said = "killed" if is_killed else "SURVIVES"
        sys.stdout.write(f"{said:8} {mutant.line:4} {mutant.key}\n")
        sys.stdout.flush()
    return found


def main() -> int:
    """Try a sample, print and write the result; return 1 where too many survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("room", help="agent, or a folder of extender such as core")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="then no other is tried")
    options = parser.parse_args()
    for name in HEAVY:
        __import__(name)
    code, tests = places_of(options.room)
    mutants = sample(code, options.count, options.seed)
    known = equivalent()
    with tempfile.TemporaryDirectory(prefix="idlegpu-mutants-") as folder:
        bench = Bench(Path(folder).resolve(), code, tests)
        bench.learn()
        found = try_all(bench, mutants, 60 * options.minutes)
    same = [mutant for mutant in found.survivors if mutant.key in known]
    left = [mutant for mutant in found.survivors if mutant.key not in known]
    counted = found.killed + len(left)
    least, most = wilson(found.killed, counted)
    row: dict[str, object] = {
        "mutants": found.killed + len(found.survivors) + len(found.untold),
        "pytest failed": len(found.untold),
        "equivalent": len(same),
        "killed": found.killed,
        "survive": len(left),
        "killed of those that count": f"{found.killed / max(counted, 1):.0%}",
        "of all mutants, 95 % confidence": f"{least:.0%} to {most:.0%}",
    }
    bound = Bound(
        what="survivors",
        limit=100 * LARGEST_SHARE,
        measured=100 * len(left) / max(counted, 1),
        unit="% of the mutants",
        between=(100 * (1 - most), 100 * (1 - least)),
    )
    notes = [
        *(f"- survives: `{mutant.path}:{mutant.line}`: `{mutant.key}`" for mutant in left),
        *(f"- equivalent: `{mutant.key}`: {known[mutant.key]}" for mutant in same),
        *(f"- pytest failed: `{mutant.key}`" for mutant in found.untold),
    ]
    is_met = report(
        f"mutants-{options.room}",
        f"Mutants of {code}",
        rows=[row],
        bounds=[bound],
        notes=["\n".join(notes)],
        command=f"python -m tests.mutants {' '.join(sys.argv[1:])}",
    )
    return 0 if is_met and not found.untold else 1


if __name__ == "__main__":
    sys.exit(main())
