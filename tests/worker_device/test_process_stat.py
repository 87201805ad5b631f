"""Properties of processes in `/proc`."""

from pathlib import Path

import pytest

from worker_device.process_stat import process_stat, small_file

FIELDS = ["S", "7", *("0" for _ in range(17)), "4321"]
"""Fields of a process's `stat` after its command, up to the start time."""


def stat_of(proc: Path, command: str, fields: list[str]) -> None:
    (proc / "3").mkdir()
    (proc / "3" / "stat").write_text(" ".join((f"3 ({command})", *fields)))


@pytest.mark.parametrize("command", ["python", "a) b (c", ""])
def test_a_process_has_a_name_a_parent_and_a_start_time(tmp_path: Path, command: str) -> None:
    stat_of(tmp_path, command, FIELDS)

    found = process_stat(3, tmp_path)

    assert found is not None
    assert (found.name, found.parent, found.started_ticks) == (command, 7, 4321)


@pytest.mark.parametrize(
    "fields",
    [["Z", *FIELDS[1:]], ["X", *FIELDS[1:]], FIELDS[:-1], ["S", "x", *FIELDS[2:]]],
    ids=["zombie", "dead", "cut off", "no number"],
)
def test_a_process_that_has_ended_has_no_properties(tmp_path: Path, fields: list[str]) -> None:
    stat_of(tmp_path, "python", fields)

    assert process_stat(3, tmp_path) is None


def test_a_file_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xffa")

    assert small_file(str(tmp_path / "absent")) is None
    assert small_file(str(tmp_path)) is None
    assert small_file(str(tmp_path / "odd")) == "\ufffda"
