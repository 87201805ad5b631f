"""A settings file that is followed, by a reloader that only notes what it is to put in force."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from extender.runtime.metrics import Metrics
from extender.settings.config import Settings, load_settings
from extender.settings.reload import Reloader, ReloadOutcome
from extender.settings.settings_file import SettingsFile
from testkit.fake_kube import eventually

DEADLINE_SECONDS = 10.0
FAR = 3600.0
"""Seconds between two reads; a change found sooner was reported by the file system."""
NOW = 1_800_000_000.0


class Following:
    """A reloader whose settings only are noted.

    Attributes:
        adopted: what was put in force as a whole, one after the other.
        begun: what was so at least in part last.
        faults: so many times more taking settings over fails midway.
    """

    def __init__(self, path: Path, *, poll_seconds: float = FAR, **environ: str) -> None:
        self.folder = path.parent
        self.adopted: list[Settings] = []
        self.metrics = Metrics()
        self.settings = load_settings(path, environ)
        self.begun = self.settings
        self.faults = 0
        file = SettingsFile(path, environ, poll_seconds)
        self.reloader = Reloader(file, self.settings, self._adopt, self.metrics, lambda: NOW)
        self.looks = 0
        self._look = self.reloader.look
        self.reloader.look = self._counted_look  # type: ignore[method-assign] # to be counted

    async def _counted_look(self) -> None:
        await self._look()
        self.looks += 1

    async def look_again(self) -> None:
        """Wait until the file has been looked at some more times."""
        enough = self.looks + 3
        await until(lambda: self.looks >= enough)

    async def _adopt(self, settings: Settings) -> None:
        self.begun = settings
        if self.faults:
            self.faults -= 1
            raise ValueError("no such thing")
        self.adopted.append(settings)

    def count(self, outcome: ReloadOutcome) -> float:
        return self.value("reloads_total", outcome=outcome)

    def value(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"idlegpu_settings_{name}", labels)
        assert value is not None, name
        return value

    @property
    def counts(self) -> tuple[float, ...]:
        """Changes that were applied, rejected, and changed nothing."""
        return tuple(
            self.count(outcome)
            for outcome in (ReloadOutcome.APPLIED, ReloadOutcome.REJECTED, ReloadOutcome.UNCHANGED)
        )

    @property
    def busy(self) -> float:
        """The threshold that was adopted last."""
        return self.adopted[-1].thresholds.utilization


async def until(is_so: Callable[[], object]) -> None:
    await eventually(lambda: bool(is_so()), deadline_seconds=DEADLINE_SECONDS)


def is_watched(directory: Path) -> bool:
    """Return whether this process watches a directory, by inotify."""
    sign = f" ino:{directory.stat().st_ino:x} "
    for info in Path("/proc/self/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            text = info.read_text(encoding="utf-8")
            if "inotify" in text and sign in text:
                return True
    return False


@asynccontextmanager
async def source_manager(part: Following, *, is_watch: bool = True) -> AsyncIterator[Following]:
    """Follow while the context is open; the first look has been taken, and the watch begun."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(part.reloader.run(), name="settings")
        await until(lambda: part.looks)
        await until(lambda: not is_watch or is_watched(part.folder))
        yield part
        assert not task.done(), "following must never end by itself"
        task.cancel()


def threshold(percent: float) -> str:
    return f"thresholds:\n  utilization: {percent}\n"


def rewrite(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
