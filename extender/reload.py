"""Takes over what changes in the settings file while the extender runs; a bad one is refused."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from enum import StrEnum
from typing import Final

from extender.config import ConfigError, Settings, all_settings
from extender.metrics import Metrics
from extender.settings.changes import Change, list_changes
from extender.settings_file import Content, SettingsFile

logger = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 0.2
"""A file counts once it has held the same for so long: it may be half written."""

LIVE: Final = frozenset(
    {
        "resources",
        "thresholds",
        "strategy",
        "shared_policy",
        "mps_share",
        "window_seconds",
        "recent_seconds",
        "prometheus",
        "freshness",
        "foreign",
        "assumed",
        "early_failures",
        "health",
        "load_filter",
        "weights",
        "mode",
        "decision_log",
        "regret",
        "wire",
        "ready",
        "cluster",
        "events",
        "prices",
        "pool_labels",
        "wake",
        "unasked",
        "decisions",
        "log",
        "max_body_bytes",
        "drain_seconds",
        "shutdown_seconds",
    }
)
"""Settings, and sections of them, that a running extender takes over. All others wait for a
restart: sockets and logins are made once."""

LIVE_PARTS: Final = {
    "agents": frozenset(
        {
            "audience",
            "service_accounts",
            "hold_seconds",
            "silence_seconds",
            "batch_seconds",
            "token_seconds",
            "reviews_per_second",
            "review_timeout_seconds",
            "max_connections",
        }
    )
}
"""Of other sections the settings that are taken over all the same."""

Adopt = Callable[[Settings], Awaitable[None]]
"""Goes by other settings from then on."""


class Outcome(StrEnum):
    """What became of a change of the file, for metrics."""

    APPLIED = "applied"
    REJECTED = "rejected"
    """The file is bad: the settings before it stay in force."""
    UNCHANGED = "unchanged"
    """The file says the same in other words, or what it changes waits for a restart."""
    FAULT = "fault"
    """A fault of ours on the way: the settings before it are put back."""


class Reloader:
    """Follows the settings file.

    Attributes:
        problem: why the file as it is now is not in force, "" where it is.

    Args:
        file: the settings file.
        settings: what is in force at first.
        adopt: puts other settings in force.
        metrics: where it is counted.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        file: SettingsFile,
        settings: Settings,
        adopt: Adopt,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.problem = ""
        self._file = file
        self._in_force = settings
        self._is_half_way = False
        self._adopt = adopt
        self._metrics = metrics
        self._clock = clock
        self._settings = all_settings()
        self._last: Content | None = None
        self._waiting: tuple[Change, ...] = ()
        for outcome in Outcome:
            metrics.settings_reloads.labels(outcome)

    async def run(self) -> None:
        """Follow the file until cancelled."""
        await self.look()
        async with aclosing(self._file.looks()) as looks:
            async for _ in looks:
                await self.look()

    async def look(self) -> None:
        """Take the file over if it holds something else than at the last look."""
        content = await asyncio.to_thread(self._file.read)
        while content != self._last:
            await asyncio.sleep(SETTLE_SECONDS)
            before, content = content, await asyncio.to_thread(self._file.read)
            if content == before:
                await self._take(content)

    async def _take(self, content: Content) -> None:
        """Judge what the file holds now, and go by it if it is good."""
        before, self._last = self._last, content
        try:
            settings = await self._load(content, before)
            changes, outcome = await self._put_in_force(settings)
        except ConfigError as error:
            self._refuse(error.problems)
            return
        except Exception:
            # Placing pods must go on; how far the change came nobody knows.
            logger.exception("fault", extra={"verb": "reload"})
            self._note(Outcome.FAULT, await self._go_back())
            return
        self._metrics.settings_loaded_at.set(self._clock())
        if before is None and not changes:
            return  # the first look finds what the extender was started with
        self._note(outcome, "")
        logger.info(
            "settings reloaded" if changes else "settings file changed, no setting in force did",
            extra={"file": str(self._file.path), "changed": _shown(changes)},
        )

    async def _load(self, content: Content, before: Content | None) -> Settings:
        """Return the settings that the file now makes.

        Raises:
            ConfigError: with every problem that was found.
        """
        if content.problem:
            raise ConfigError((content.problem,))
        # Nobody means that, and who writes files begins by emptying them.
        if before is not None and not content.data.strip():
            raise ConfigError((f"{self._file.path}: is empty: write {{}} to set nothing",))
        return await asyncio.to_thread(self._file.load, content)

    async def _put_in_force(self, settings: Settings) -> tuple[tuple[Change, ...], Outcome]:
        """Go by the settings as far as that can be without a restart; return what changed."""
        if self._is_half_way:
            await self._adopt_again()
        wanted, settings = settings, _as_far_as_live(self._in_force, settings)
        changes = list_changes(self._in_force, settings, self._settings)
        if changes:
            self._is_half_way = True
            await self._adopt(settings)
            self._in_force, self._is_half_way = settings, False
        self._note_waiting(list_changes(settings, wanted, self._settings))
        return changes, Outcome.APPLIED if changes else Outcome.UNCHANGED

    async def _go_back(self) -> str:
        """Go by the settings before a fault again; return what became of it, for people."""
        fault = "a fault while the settings were taken over"
        try:
            await self._adopt_again()
        except Exception:
            logger.exception("fault", extra={"verb": "reload"})
            return f"{fault}, and while those before them were put back: restart"
        return f"{fault}, those before them stay in force: see the log"

    async def _adopt_again(self) -> None:
        """Put in force as a whole what was so last: some of it may have been replaced."""
        await self._adopt(self._in_force)
        self._is_half_way = False

    def _note_waiting(self, waiting: tuple[Change, ...]) -> None:
        """Say which settings wait for a restart, once for each change of them."""
        self._metrics.settings_restart_needed.set(len(waiting))
        before, self._waiting = self._waiting, waiting
        if waiting and waiting != before:
            logger.warning(
                "settings wait for a restart",
                extra={"file": str(self._file.path), "waiting": _shown(waiting)},
            )

    def _refuse(self, problems: tuple[str, ...]) -> None:
        """Say what is wrong with the file; everything stays as it is."""
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        self._note(
            Outcome.REJECTED,
            f"bad settings file, the settings before it stay in force: {problems[0]}{more}",
        )
        logger.warning(
            "settings file is bad, the settings before it stay in force",
            extra={"file": str(self._file.path), "problems": problems},
        )

    def _note(self, outcome: Outcome, problem: str) -> None:
        self.problem = problem
        self._metrics.settings_reloads.labels(outcome).inc()
        self._metrics.settings_file_bad.set(bool(problem))


def _as_far_as_live(in_force: Settings, wanted: Settings) -> Settings:
    """Return the wanted settings, but for those that wait for a restart."""
    kept: dict[str, object] = {
        name: getattr(in_force, name) for name in Settings.model_fields if name not in LIVE
    }
    for section, names in LIVE_PARTS.items():
        live = {name: getattr(getattr(wanted, section), name) for name in names}
        kept[section] = getattr(in_force, section).model_copy(update=live)
    return wanted.model_copy(update=kept)


def _shown(changes: tuple[Change, ...]) -> dict[str, str]:
    return {change.name: str(change) for change in changes}
