"""Mutation tests in one pytest session: each mutant in a forked process.

The tests are imported and collected once. A mutant that changes a function replaces the function's
code in a forked process, which costs some milliseconds. Code that runs at import cannot be changed
like this: such mutants need a new pytest.
"""

import contextlib
import gc
import inspect
import os
import pickle
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Final, Literal, NamedTuple, TextIO, cast

import pytest

from tests.mutation.changes import Mutant
from tests.mutation.lines import LineRecorder

Verdict = Literal["killed", "hangs", "survives", "import"]

LIMIT_FACTOR: Final = 10.0
SHORTEST_LIMIT_SECONDS: Final = 10.0
LEARN_LIMIT_SECONDS: Final = 1800.0
IDLE_SECONDS: Final = 60.0
"""Sleeping time after which a test counts as hanging, unless it used some CPU in between."""
_LONGEST_POLL_SECONDS: Final = 1.0
"""Sleeping time that one look can show: more time between two looks is a pause of the machine."""
_LEAST_CPU_SECONDS: Final = 1.0
"""CPU use in that time that is more than timers use in a test that hangs."""


@dataclass(slots=True)
class Learned:
    """Results of one run of all tests without a change.

    Attributes:
        seconds: CPU time of each passed test, by its ID.
        failed: failed tests, which are not used for mutants.
        tests_of: tests that ran a line, by file and line.
        with_processes: tests that start processes, which may run any line.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    tests_of: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    with_processes: list[str] = field(default_factory=list)

    def of_line(self, mutant: Mutant) -> set[str]:
        """Return the tests that run the changed line, or may run it in another process."""
        tests = self.tests_of.get(mutant.path, {}).get(mutant.plain_line, ())
        return self._usable([*tests, *self.with_processes])

    def of_file(self, mutant: Mutant) -> set[str]:
        """Return the tests that run any function of the file; all tests if none does."""
        lines = self.tests_of.get(mutant.path, {}).values()
        tests = [test for tests in lines for test in tests]
        return self._usable([*tests, *self.with_processes]) if tests else set(self.seconds)

    def _usable(self, tests: Iterable[str]) -> set[str]:
        return {test for test in tests if test in self.seconds and test not in self.failed}

    def order(self, tests: Iterable[str], mutant: Mutant, seconds: float) -> list[str]:
        """Order tests by file: first those named after the mutant's file, then the cheapest.

        Args:
            tests: tests to order.
            mutant: mutant to test.
            seconds: CPU time limit; files beyond it are left out, except the first.
        """
        own = f"test_{Path(mutant.path).stem}"
        files: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            files[test.partition("::")[0]].append(test)
        costs = {file: sum(self.seconds[one] for one in some) for file, some in files.items()}
        found: list[str] = []
        for file in sorted(files, key=lambda name: (own not in name, costs[name], name)):
            if found and costs[file] > seconds:
                continue
            seconds -= costs[file]
            found += sorted(files[file], key=lambda one: (self.seconds[one], one))
        return found


class FunctionKey(NamedTuple):
    """Identity of a function in a file.

    Attributes:
        name: qualified name.
        line: number of its first line.
    """

    name: str
    line: int


def functions_in(code: CodeType) -> dict[FunctionKey, list[CodeType]]:
    """Return the code of all functions by key; comprehensions of a line share a key."""
    found: dict[FunctionKey, list[CodeType]] = defaultdict(list)
    waiting = [code]
    while waiting:
        inner = [one for one in waiting.pop().co_consts if isinstance(one, CodeType)]
        waiting += inner
        for one in filter(_is_function, inner):
            found[FunctionKey(one.co_qualname, one.co_firstlineno)].append(one)
    return found


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def at_import(code: CodeType) -> CodeType:
    """Return the code that runs at import: of the module and its classes, without functions."""
    consts = tuple(
        ("function" if _is_function(one) else at_import(one)) if isinstance(one, CodeType) else one
        for one in code.co_consts
    )
    return code.replace(co_consts=consts, co_linetable=b"")  # has where functions end


def compiled(text: str, file: str) -> CodeType:
    """Compile a module as an import does."""
    return compile(text, file, "exec", dont_inherit=True)


def changes_of(original: str, changed: str, file: str) -> dict[FunctionKey, list[CodeType]]:
    """Return the new code of the functions that differ; {} if code that runs at import differs."""
    old, new = compiled(original, file), compiled(changed, file)
    if at_import(old) != at_import(new):
        return {}
    before = functions_in(old)
    return {key: codes for key, codes in functions_in(new).items() if codes != before.get(key)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a mutant.

    Attributes:
        verdict: result; `import` if it needs a new pytest.
        test: test that detected it.
    """

    verdict: Verdict
    test: str = ""


class TryAll:
    """Pytest plugin that tests mutants in place of running the tests.

    Args:
        folder: root of the copied tree.
        paths: files of the room, relative to the root.
        mutants: mutants to test, in order.
        seconds: CPU time limit for the tests of one mutant.
        until: monotonic time after which no further mutant is tested.
        output: stream for the progress.
    """

    def __init__(
        self,
        folder: Path,
        paths: Sequence[str],
        mutants: Sequence[Mutant],
        *,
        seconds: float,
        until: float,
        output: TextIO,
    ) -> None:
        self._folder = folder
        self._paths = paths
        self._mutants = mutants
        self._seconds = seconds
        self._until = until
        self._output = output
        self._items: dict[str, pytest.Item] = {}
        self._live: dict[tuple[str, FunctionKey], list[FunctionType]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests once, then test each mutant, and write the results."""
        self._items = {item.nodeid: item for item in session.items}
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                code = one.__code__
                key = FunctionKey(code.co_qualname, code.co_firstlineno)
                self._live[code.co_filename, key].append(one)
        learned = self._learn(session)
        outcomes: list[Outcome] = []
        for mutant in self._mutants:
            if time.monotonic() > self._until:
                break
            outcomes.append(self._try(session, mutant, learned))
            print_outcome(self._output, mutant, outcomes[-1])
        (self._folder / "outcomes").write_bytes(pickle.dumps((learned, outcomes)))
        return True

    def _learn(self, session: pytest.Session) -> Learned:
        target = self._folder / "learned"

        def run() -> None:
            recorder, learned = LineRecorder(), Learned()
            for path in self._paths:
                file = self._folder / path
                code = recorder.compiled(file.read_text(encoding="utf-8"), path, str(file))
                for function, recorded in self._live_functions(str(file), functions_in(code)):
                    function.__code__ = recorded
            recorder.start()
            for test in self._items:
                before, failed = os.times(), session.testsfailed
                self._run_tests(session, [test], [*self._items])
                after = os.times()
                learned.seconds[test] = _cpu_seconds(after) - _cpu_seconds(before)
                if session.testsfailed > failed:
                    learned.failed.append(test)
                if after.children_user + after.children_system > (
                    before.children_user + before.children_system
                ):
                    learned.with_processes.append(test)
                for path, line in recorder.take():
                    learned.tests_of.setdefault(path, {}).setdefault(line, []).append(test)
            target.write_bytes(pickle.dumps(learned))

        in_a_fork(run, limit_seconds=LEARN_LIMIT_SECONDS)
        learned = cast("Learned", pickle.loads(target.read_bytes()))  # noqa: S301 - written above
        self._output.write(
            f"{len(self._items)} tests: {sum(learned.seconds.values()):.0f} s of CPU; "
            f"left out because they fail without a change: {learned.failed}\n"
        )
        self._output.flush()
        return learned

    def _run_tests(
        self,
        session: pytest.Session,
        tests: Sequence[str],
        following: Sequence[str] = (),
        learned: Learned | None = None,
    ) -> str:
        """Run tests until one fails; return its ID, or "".

        Args:
            session: session with the collected tests.
            tests: IDs of the tests.
            following: all tests of a run in which `tests` is a single one.
            learned: ends the process at a test that takes much more CPU time than it did.
        """
        order = list(following or tests)
        for test in tests:
            at = order.index(test) + 1
            later = self._items[order[at]] if at < len(order) else None
            item = self._items[test]
            failed = session.testsfailed
            if learned is not None:
                signal.setitimer(signal.ITIMER_PROF, limit_seconds(learned, [test]))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=later)
            if session.testsfailed > failed:
                return test
        return ""

    def _try(self, session: pytest.Session, mutant: Mutant, learned: Learned) -> Outcome:
        file = self._folder / mutant.path
        functions = self._changed_functions(str(file), file.read_text(encoding="utf-8"), mutant)
        tests = learned.order(learned.of_line(mutant), mutant, self._seconds)
        if not functions or not tests:
            return Outcome(verdict="import")
        while tests:
            with replaced(file, mutant.text):  # also for the processes that tests start
                outcome = self._judge(session, tests, functions, learned)
            if outcome.verdict != "killed":
                return outcome
            alone = self._judge(session, [outcome.test], [], learned)
            if alone.verdict == "survives":
                return outcome
            learned.failed.append(outcome.test)
            tests.remove(outcome.test)
        return Outcome(verdict="survives")

    def _changed_functions(
        self, file: str, original: str, mutant: Mutant
    ) -> list[tuple[FunctionType, CodeType]]:
        """Return the imported functions to change with their new code; [] if that is not enough."""
        changed = changes_of(original, mutant.text, file)
        if any(len(codes) > 1 and (file, key) in self._live for key, codes in changed.items()):
            return []
        return self._live_functions(file, changed)

    def _live_functions(
        self, file: str, codes: Mapping[FunctionKey, Sequence[CodeType]]
    ) -> list[tuple[FunctionType, CodeType]]:
        """Return the imported functions of a file with their code, unless it is ambiguous."""
        return [
            (function, of_key[0])
            for key, of_key in codes.items()
            if len(of_key) == 1
            for function in self._live.get((file, key), ())
        ]

    def _judge(
        self,
        session: pytest.Session,
        tests: Sequence[str],
        functions: Sequence[tuple[FunctionType, CodeType]],
        learned: Learned,
    ) -> Outcome:
        target = self._folder / "verdict"
        target.write_text("import", encoding="utf-8")

        def run() -> None:
            for function, code in functions:
                function.__code__ = code
            target.write_text("", encoding="utf-8")
            failed = self._run_tests(session, tests, learned=learned)
            target.write_text(failed or "survives", encoding="utf-8")

        if not in_a_fork(run, limit_seconds=limit_seconds(learned, tests)):
            return Outcome(verdict="hangs")
        said = target.read_text(encoding="utf-8")
        if said in ("import", "survives"):
            return Outcome(verdict=cast("Verdict", said))
        return Outcome(verdict="killed", test=said or tests[-1])


def limit_seconds(learned: Learned, tests: Iterable[str]) -> float:
    """Return the CPU time limit for the tests of a mutant."""
    return SHORTEST_LIMIT_SECONDS + LIMIT_FACTOR * sum(learned.seconds[one] for one in tests)


def in_a_fork(
    run: Callable[[], None], *, limit_seconds: float, idle_seconds: float = IDLE_SECONDS
) -> bool:
    """Call a function in a forked process; return whether it ended without hanging.

    Only CPU time and time without CPU use count, so that a busy machine does not matter. A process
    that its own timer ends hangs, too.

    Args:
        run: function to call.
        limit_seconds: CPU time limit.
        idle_seconds: limit of sleeping time without CPU use.
    """
    child = os.fork()
    if not child:
        try:
            os.setpgid(0, 0)
            run()
        except BaseException:  # noqa: BLE001 - nothing may run on in this process
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0)
    spent, busy, slept, at = 0.0, 0.0, 0.0, time.monotonic()
    has_ended, status = False, 0
    while not has_ended and spent <= limit_seconds and slept <= idle_seconds:
        time.sleep(0.01)
        spent, is_running = _progress_of(child)
        now = time.monotonic()
        if spent - busy >= _LEAST_CPU_SECONDS:
            busy, slept = spent, 0.0
        elif not is_running:
            slept += min(now - at, _LONGEST_POLL_SECONDS)
        at = now
        ended, status = os.waitpid(child, os.WNOHANG)
        has_ended = bool(ended)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and its child processes
    if not has_ended:
        os.waitpid(child, 0)
    return has_ended and os.waitstatus_to_exitcode(status) != -signal.SIGPROF


def _progress_of(child: int) -> tuple[float, bool]:
    """Return the CPU time of a process, and whether it is runnable."""
    fields = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # of the process and its children
    return ticks / os.sysconf("SC_CLK_TCK"), fields[0] in {"R", "D"}


@contextlib.contextmanager
def replaced(file: Path, text: str) -> Iterator[None]:
    """Replace a file's text, and restore it with its times, so that its bytecode stays valid."""
    original, status = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(original, encoding="utf-8")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def print_outcome(output: TextIO, mutant: Mutant, outcome: Outcome) -> None:
    """Print a line for one mutant."""
    output.write(f"{outcome.verdict:8} {mutant.line:4} {mutant.key}  {outcome.test}\n")
    output.flush()


def _cpu_seconds(times: os.times_result) -> float:
    return times.user + times.system + times.children_user + times.children_system
