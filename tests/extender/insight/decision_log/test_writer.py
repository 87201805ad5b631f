"""Writer of the decision log: a separate thread with a bounded queue, and complete files."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from extender.core.policy import Policy
from extender.core.quantity import MIB
from extender.insight.decision_log.reader import LoggedDecision, read_log
from extender.insight.decision_log.writer import _WAITING, DecisionLogWriter
from extender.settings.service import DecisionLog
from testkit.builders import node, request, snapshot_of
from testkit.decision_logs import decisions_in, record_of, weighed

SNAPSHOT = snapshot_of({f"node-{index}": node() for index in range(50)})


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def note(log: DecisionLogWriter, count: int, *, first: int = 1) -> None:
    made = weighed(SNAPSHOT, request(), policy=Policy())
    for number in range(first, first + count):
        log.note(record_of(made, number), made)


def test_each_decision_gets_a_line(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    log = DecisionLogWriter(DecisionLog(path=str(path)))

    note(log, 3)
    log.note_bound("uid-pod", "node-1", 5.0)
    log.close()

    kinds = [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]
    assert kinds == ["settings", "fleet", *["decision"] * 3, "bound"]
    assert (log.written, log.dropped, log.problem) == (3, 0, "")


def test_a_file_that_grows_too_large_is_rotated_and_few_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    settings = DecisionLog(path=str(path), files=2).model_copy(update={"max_size": 20_000})
    log = DecisionLogWriter(settings)

    note(log, 200)
    log.close()

    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["decisions", "decisions.1", "decisions.2"]
    assert all(file.stat().st_size <= 20_000 for file in files)
    numbers = [
        line.number
        for line in read_log([files[2], files[1], files[0]])
        if isinstance(line, LoggedDecision)
    ]
    assert numbers == list(range(201 - len(numbers), 201))
    assert all(decisions_in(file.read_bytes()) for file in files)


def test_records_of_another_process_stay_separate(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    path.write_bytes(b"{}\n")
    log = DecisionLogWriter(DecisionLog(path=str(path)))

    note(log, 1)
    log.close()

    assert (tmp_path / "decisions.1").read_bytes() == b"{}\n"
    assert len(decisions_in(path.read_bytes())) == 1


def test_older_files_stay_where_they_are_if_none_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "decisions.1").write_bytes(b"{}\n")
    log = DecisionLogWriter(DecisionLog(path=str(tmp_path / "decisions")))

    note(log, 1)
    log.close()

    assert (tmp_path / "decisions.1").read_bytes() == b"{}\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["decisions", "decisions.1"]


def test_a_file_takes_lines_up_to_its_size(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    settings = DecisionLog(path=str(path), files=1)
    log = DecisionLogWriter(settings)
    note(log, 3)
    log.close()
    size = path.stat().st_size

    for most, rotated in ((size, False), (size - 1, True)):
        for file in tmp_path.iterdir():
            file.unlink()
        log = DecisionLogWriter(settings.model_copy(update={"max_size": most}))
        note(log, 3)
        log.close()
        assert (tmp_path / "decisions.1").exists() is rotated


def test_a_log_that_cannot_be_written_says_so_once_and_goes_on_once_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = tmp_path / "later"
    log = DecisionLogWriter(DecisionLog(path=str(folder / "decisions")))
    note(log, 1)
    until(lambda: log.problem)
    assert (log.problem, log.dropped) == ("cannot be written: No such file or directory", 1)
    note(log, 1)
    until(lambda: log.dropped == 2)

    folder.mkdir()
    note(log, 2, first=2)
    log.close()

    assert log.problem == ""
    lines = decisions_in((folder / "decisions").read_bytes())
    assert [line.number for line in lines] == [2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "decision log has a problem",
        "decision log is written again",
    ]


def test_decisions_beyond_the_write_rate_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.insight.decision_log.writer._GATHER_SECONDS", 3600.0)
    log = DecisionLogWriter(DecisionLog(path=str(tmp_path / "decisions")))

    note(log, _WAITING + 7)

    assert log.dropped == 7
    log.close()
    assert log.written == _WAITING


def test_log_can_go_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        log = DecisionLogWriter(DecisionLog(path="-"))

        note(log, 2)
        log.close()

        assert len(decisions_in((tmp_path / "out").read_bytes())) == 2


def test_a_size_of_less_than_a_mebibyte_is_refused() -> None:
    with pytest.raises(ValueError, match="max_size"):
        DecisionLog(path="x", max_size=MIB - 1)
