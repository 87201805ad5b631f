"""Results of changes of the settings file, in log, metrics and texts."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from extender.settings import reload
from extender.settings.config import Settings
from extender.settings.reload import _LIVE, _LIVE_PARTS, ReloadOutcome
from extender.settings.sources import Agents
from tests.extender.settings.config_map import NAME
from tests.extender.settings.reloading import (
    NOW,
    Following,
    rewrite,
    source_manager,
    threshold,
    until,
)


def lines_of(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if record.message == event]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / NAME
    file.write_text(threshold(30), encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _short_settle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only briefly for the file to settle; test_settings_file tests that."""
    monkeypatch.setattr(reload, "_SETTLE_SECONDS", 0.02)


# --- bad files ------------------------------------------------------------------------------------


def put_back(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.rmdir() if path.is_dir() else path.unlink()
    rewrite(path, threshold(60))


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def point_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: rewrite(path, "thresholds: ["), ("line 1, column 14", "not YAML")),
        (lambda path: path.write_bytes(b"strategy: \xff"), ("not UTF-8",)),
        (
            lambda path: rewrite(path, threshold(300)),
            ("thresholds.utilization", "300", "from 1 to 100"),
        ),
        (lambda path: rewrite(path, "tresholds: {}"), ("tresholds", "did you mean thresholds?")),
        (lambda path: rewrite(path, "strategy: pack\nstrategy: spread\n"), ("given twice",)),
        (
            lambda path: rewrite(
                path, "freshness: {max_age_seconds: 10}\nprometheus: {url: 'http://p'}"
            ),
            ("freshness.max_age_seconds", "must be at least"),
        ),
        (lambda path: rewrite(path, "  \n"), ("is empty", "write {}")),
        (Path.unlink, ("cannot be read", "No such file")),
        (make_directory, ("is no regular file",)),
        (point_to_itself, ("cannot be read", "symbolic links")),
    ],
    ids=[
        "no-yaml",
        "no-utf-8",
        "out-of-bounds",
        "unknown-name",
        "name-given-twice",
        "settings-that-contradict-each-other",
        "empty",
        "deleted",
        "a-directory",
        "unreadable",
    ],
)
async def test_bad_file_leaves_the_settings_and_is_reported(
    path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], object],
    words: tuple[str, ...],
) -> None:
    async with source_manager(Following(path, poll_seconds=0.1)) as part:
        loaded_at = part.value("loaded_timestamp_seconds")
        spoil(path)
        await until(lambda: part.count(ReloadOutcome.REJECTED))
        await part.look_again()

        assert (part.adopted, part.counts) == ([], (0, 1, 0))
        assert part.value("file_bad") == 1
        assert part.value("loaded_timestamp_seconds") == loaded_at
        assert all(word in part.reloader.problem for word in words), part.reloader.problem
        assert "stay in force" in part.reloader.problem
        lines = lines_of(caplog, "settings file is invalid, the previous settings stay in force")
        assert [line.levelname for line in lines] == ["WARNING"]
        assert all(word in str(lines[0].problems) for word in words)

        put_back(path)
        await until(lambda: part.adopted)

    assert (part.busy, part.reloader.problem, part.value("file_bad")) == (60, "", 0)


async def test_each_bad_file_is_logged_once(path: Path) -> None:
    async with source_manager(Following(path, poll_seconds=0.1)) as part:
        rewrite(path, threshold(300))
        await until(lambda: "300" in part.reloader.problem)
        rewrite(path, threshold(400))
        await until(lambda: "400" in part.reloader.problem)
        rewrite(path, threshold(30))
        await until(lambda: not part.reloader.problem)

    assert part.counts == (0, 2, 1)


async def test_problems_beyond_the_first_are_counted_in_short_and_logged_in_full(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with source_manager(Following(path)) as part:
        rewrite(path, "thresholds: {utilization: 300, memory: 400}")
        await until(lambda: part.reloader.problem)

    assert part.reloader.problem.endswith("(and 1 more)")
    (line,) = lines_of(caplog, "settings file is invalid, the previous settings stay in force")
    assert len(line.problems) == 2


async def test_a_file_that_went_bad_between_start_and_first_look_is_logged(path: Path) -> None:
    part = Following(path)
    rewrite(path, threshold(300))

    async with source_manager(part):
        pass

    assert part.counts == (0, 1, 0)


async def test_pipe_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / NAME
    rewrite(path, threshold(30))
    part = Following(path)
    path.unlink()
    os.mkfifo(path)

    async with source_manager(part):
        assert "no regular file" in part.reloader.problem


# --- live and pending changes ---------------------------------------------------------------------


async def test_one_line_names_each_changed_setting_with_both_values(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async with source_manager(Following(path)) as part:
        rewrite(path, threshold(60) + "strategy: pack\nmps_share: 20Gi\n")
        await until(lambda: part.adopted)

    (line,) = lines_of(caplog, "settings reloaded")
    assert line.changed == {
        "thresholds.utilization": "30 -> 60",
        "strategy": "auto -> pack",
        "mps_share": "(none) -> 20Gi",
    }
    assert part.value("loaded_timestamp_seconds") == NOW


async def test_secrets_are_named_and_not_shown(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    before = "prometheus: {url: 'http://me:before@p', headers: {Authorization: before}}"
    rewrite(path, before)

    async with source_manager(Following(path)) as part:
        rewrite(path, before.replace("before", "after"))
        await until(lambda: part.adopted)

    (line,) = lines_of(caplog, "settings reloaded")
    assert line.changed == {
        "prometheus.url": "http://(hidden)@p -> http://(hidden)@p",
        "prometheus.headers": "(hidden) -> (hidden)",
    }
    assert part.adopted[0].prometheus.headers == {"Authorization": "after"}


async def test_variables_of_the_environment_come_before_the_changed_file(path: Path) -> None:
    part = Following(path, IDLEGPU_THRESHOLDS_UTILIZATION="45")

    async with source_manager(part):
        rewrite(path, threshold(60))
        await until(lambda: part.count(ReloadOutcome.UNCHANGED))
        assert not part.adopted
        rewrite(path, threshold(60) + "strategy: pack\n")
        await until(lambda: part.adopted)

    assert (part.busy, part.adopted[0].strategy) == (45, "pack")


async def test_other_words_for_the_same_change_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async with source_manager(Following(path)) as part:
        rewrite(path, "# as before\nthresholds: {utilization: 30 %}\n")
        await until(lambda: part.count(ReloadOutcome.UNCHANGED))

    assert (part.adopted, part.counts) == ([], (0, 0, 1))
    assert lines_of(caplog, "settings file changed without effect on the settings in force")


async def test_setting_that_needs_a_restart_keeps_its_value_and_says_so(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with source_manager(Following(path)) as part:
        rewrite(path, threshold(60) + "listen: 127.0.0.1:9999\nmax_connections: 200\n")
        await until(lambda: part.adopted)
        assert part.adopted[0].listen == part.settings.listen
        assert part.busy == 60
        assert part.value("restart_needed") == 2
        rewrite(path, threshold(70) + "listen: 127.0.0.1:9999\nmax_connections: 200\n")
        await until(lambda: part.busy == 70)

        lines = lines_of(caplog, "settings wait for a restart")
        assert [line.levelname for line in lines] == ["WARNING"], "said once, not at each change"
        assert lines[0].waiting == {
            "listen": "127.0.0.1:8888 -> 127.0.0.1:9999",
            "max_connections": "1000 -> 200",
        }

        rewrite(path, threshold(70))
        await until(lambda: part.value("restart_needed") == 0)

    assert part.counts == (2, 0, 1)


def test_only_settings_read_at_start_need_a_restart() -> None:
    fields = set(Settings.model_fields)

    assert fields >= _LIVE
    assert fields - _LIVE == {
        "listen",
        "status_listen",
        "allow_plain",
        "tls",
        "kubeconfig",
        "max_connections",
        "peers",
        "agents",
        "api",
        "admission",
    }


def test_for_agents_only_address_and_tls_need_a_restart() -> None:
    fields = set(Agents.model_fields)

    assert fields >= _LIVE_PARTS["agents"]
    assert fields - _LIVE_PARTS["agents"] == {"listen", "cert_file", "key_file", "allow_plain"}


async def test_a_section_is_taken_over_as_far_as_it_can_be(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with source_manager(Following(path)) as part:
        rewrite(
            path,
            threshold(30) + "agents: {listen: '127.0.0.1:9401', service_accounts: [ml/agent]}\n",
        )
        await until(lambda: part.adopted)

        agents = part.adopted[0].agents
        assert (agents.listen, agents.service_accounts) == ("", ("ml/agent",))
        assert part.value("restart_needed") == 1
        (line,) = lines_of(caplog, "settings wait for a restart")
        assert line.waiting == {"agents.listen": "(none) -> 127.0.0.1:9401"}


async def test_fault_midway_puts_the_settings_before_it_back(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = Following(path)
    part.faults = 1

    async with source_manager(part):
        rewrite(path, threshold(60))
        await until(lambda: part.count(ReloadOutcome.FAULT))
        assert (part.begun, part.adopted) == (part.settings, [part.settings])
        assert "stay in force" in part.reloader.problem
        assert part.value("file_bad") == 1
        rewrite(path, threshold(30))
        await until(lambda: not part.reloader.problem)
        assert (part.adopted, part.counts) == ([part.settings], (0, 0, 1))
        rewrite(path, threshold(60))
        await until(lambda: part.busy == 60)

    assert lines_of(caplog, "internal error")[0].exc_info


@pytest.mark.parametrize(
    ("percent", "adopted", "counts"),
    [(30, [30], (0, 0, 1)), (60, [30, 60], (1, 0, 0)), (70, [30, 70], (1, 0, 0))],
    ids=["the-file-before", "the-same-file-in-other-words", "another-file"],
)
async def test_next_file_replaces_partly_applied_settings(
    path: Path, percent: float, adopted: list[float], counts: tuple[float, ...]
) -> None:
    part = Following(path)
    part.faults = 2

    async with source_manager(part):
        rewrite(path, threshold(60))
        await until(lambda: part.reloader.problem)
        assert "restart" in part.reloader.problem
        assert not part.adopted
        rewrite(path, "# again\n" + threshold(percent))
        await until(lambda: not part.reloader.problem)

    assert [settings.thresholds.utilization for settings in part.adopted] == adopted
    assert (part.busy, part.begun) == (percent, part.adopted[-1])
    assert (part.counts, part.value("file_bad")) == (counts, 0)


async def test_every_outcome_is_counted_from_the_start(path: Path) -> None:
    part = Following(path)

    assert [part.count(outcome) for outcome in ReloadOutcome] == [0] * len(ReloadOutcome)
    assert (part.value("file_bad"), part.value("restart_needed")) == (0, 0)
