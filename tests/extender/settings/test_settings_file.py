"""Every way to change the settings file is detected, and the complete file is applied."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from extender.settings import reload as reload_module
from extender.settings.reload import ReloadOutcome, SettingsFile, _Content
from tests.extender.settings.config_map import NAME, ConfigMap
from tests.extender.settings.reloading import (
    NOW,
    Following,
    rewrite,
    source_manager,
    threshold,
    until,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / NAME
    file.write_text(threshold(30), encoding="utf-8")
    return file


# --- ways to change a file ------------------------------------------------------------------------


def replace(path: Path, text: str) -> None:
    """Replace the file as editors do: write another file, and rename it."""
    other = path.with_name(".settings.yaml.swp")
    other.write_text(text, encoding="utf-8")
    other.rename(path)


def delete_and_put_back(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("change", [rewrite, replace, delete_and_put_back])
async def test_changed_file_is_taken_over_at_the_next_look(
    path: Path, change: Callable[[Path, str], None]
) -> None:
    async with source_manager(Following(path)) as part:
        change(path, threshold(60))
        await until(lambda: part.adopted)

    assert (part.busy, part.counts) == (60, (1, 0, 0))


async def test_config_map_is_reloaded_at_each_symlink_swap(tmp_path: Path) -> None:
    mounted = ConfigMap(tmp_path / "etc", threshold(30))

    async with source_manager(Following(mounted.path)) as part:

        def has_adopted(number: int) -> bool:
            return len(part.adopted) == number

        for number, percent in enumerate((60, 70, 80), start=1):
            mounted.write(threshold(percent))
            await until(partial(has_adopted, number))
            assert part.busy == percent

    assert part.counts == (3, 0, 0)


async def test_bad_config_map_changes_nothing_until_the_next_one(tmp_path: Path) -> None:
    mounted = ConfigMap(tmp_path / "etc", threshold(30))

    async with source_manager(Following(mounted.path)) as part:
        mounted.write("thresholds: [")
        await until(lambda: part.count(ReloadOutcome.REJECTED))
        assert not part.adopted
        mounted.write(threshold(60))
        await until(lambda: part.adopted)

    assert (part.counts, part.reloader.problem) == ((1, 1, 0), "")


async def test_same_content_with_a_new_time_is_no_change(path: Path) -> None:
    async with source_manager(Following(path)) as part:
        os.utime(path, (NOW, NOW))
        rewrite(path, threshold(30))
        await part.look_again()

    assert part.counts == (0, 0, 0)


async def test_other_content_with_the_same_time_is_a_change(tmp_path: Path) -> None:
    mounted = ConfigMap(tmp_path / "etc", threshold(30))
    os.utime(mounted.path, (NOW, NOW))

    async with source_manager(Following(mounted.path)) as part:
        mounted.write(threshold(60))
        os.utime(mounted.path, (NOW, NOW))
        await until(lambda: part.adopted)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Changes of the file, one of which happens before each read."""
    left: list[Callable[[], object]] = []
    read = SettingsFile.read

    def read_changed(file: SettingsFile) -> _Content:
        if left:
            left.pop(0)()
        return read(file)

    monkeypatch.setattr(SettingsFile, "read", read_changed)
    monkeypatch.setattr(reload_module, "_SETTLE_SECONDS", 0.0)
    return left


async def test_several_quick_changes_end_with_the_last_one(
    path: Path, changes: list[Callable[[], object]]
) -> None:
    part = Following(path)
    await part.reloader.look()
    changes += [partial(replace, path, threshold(percent)) for percent in range(31, 61)]

    await part.reloader.look()

    assert (part.busy, part.counts) == (60, (1, 0, 0))


async def test_file_that_is_still_being_written_is_not_taken_over(
    path: Path, changes: list[Callable[[], object]]
) -> None:
    whole = threshold(60) + "strategy: pack\n"
    part = Following(path)
    await part.reloader.look()
    changes += [partial(rewrite, path, whole[:end]) for end in range(len(whole) + 1)]

    await part.reloader.look()

    assert (part.counts, part.adopted[0].strategy) == ((1, 0, 0), "pack")


async def test_directory_that_is_replaced_is_followed_on(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    path = folder / NAME
    rewrite(path, threshold(30))

    async with source_manager(Following(path)) as part:
        other = tmp_path / "other"
        other.mkdir()
        rewrite(other / NAME, threshold(60))
        folder.rename(tmp_path / "old")
        other.rename(folder)
        await until(lambda: part.adopted)
        rewrite(path, threshold(70))
        await until(lambda: part.busy == 70)
        shutil.rmtree(folder)
        await until(lambda: part.count(ReloadOutcome.REJECTED))
        folder.mkdir()
        rewrite(path, threshold(80))
        await until(lambda: part.busy == 80)
