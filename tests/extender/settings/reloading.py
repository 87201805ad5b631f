"""Settings file that a reloader follows, with recorded results."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from extender.runtime.metrics import Metrics
from extender.settings.config import Settings, load_settings
from extender.settings.reload import Reloader, ReloadOutcome, SettingsFile
from testkit.fake_kube import eventually

DEADLINE_SECONDS = 10.0
NOW = 1_800_000_000.0


class Following:
    """Reloader that records the settings.

    Attributes:
        adopted: settings that came completely into force, in order.
        begun: the last settings that came into force at least in part.
        faults: number of further reloads that fail midway.
    """

    def __init__(self, path: Path, *, poll_seconds: float = 0.05, **environ: str) -> None:
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
        """Wait until the file has been read several more times."""
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
        """Return the numbers of applied, rejected and ineffective changes."""
        return tuple(
            self.count(outcome)
            for outcome in (ReloadOutcome.APPLIED, ReloadOutcome.REJECTED, ReloadOutcome.UNCHANGED)
        )

    @property
    def busy(self) -> float:
        """Return the busy threshold that came into force last."""
        return self.adopted[-1].thresholds.utilization


async def until(is_so: Callable[[], object]) -> None:
    await eventually(lambda: bool(is_so()), deadline_seconds=DEADLINE_SECONDS)


@asynccontextmanager
async def source_manager(part: Following) -> AsyncIterator[Following]:
    """Follow the file while the context is open; it was read once."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(part.reloader.run(), name="settings")
        await until(lambda: part.looks)
        yield part
        assert not task.done(), "following must never end by itself"
        task.cancel()


def threshold(percent: float) -> str:
    return f"thresholds:\n  utilization: {percent}\n"


def rewrite(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
