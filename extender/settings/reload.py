"""Poll the settings file, apply its changes at run time, and reject an invalid file.

A file watch would not replace that: some file systems report no changes, and a replaced directory
loses its watch.
"""

import asyncio
import logging
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from extender.runtime.metrics import Metrics
from extender.settings.config import Settings, all_settings, load
from extender.settings.loading import ConfigError, Loaded, describe_unreadable
from extender.settings.spec import SettingChange, list_changes

_logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 0.2
"""Time for which the content must stay the same: a file may be half written."""

_LIVE: Final = frozenset(
    {
        "resources",
        "thresholds",
        "strategy",
        "shared_policy",
        "mps_share",
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
        "price",
        "spot_share",
        "pool_labels",
        "group_topology",
        "wake",
        "bypassed",
        "decisions",
        "log",
        "drain_seconds",
        "shutdown_seconds",
    }
)
"""Settings and sections that apply without a restart. All others need one, because sockets and
logins are created once."""

_LIVE_PARTS: Final = {
    "agents": frozenset(
        {"audience", "service_accounts", "hold_seconds", "silence_seconds", "max_connections"}
    )
}
"""Settings of other sections that apply without a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """Content of the settings file, or the reason why it cannot be read.

    Attributes:
        problem: the reason why the file cannot be read, or "".
    """

    data: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The settings file, and the environment variables that override it.

    Attributes:
        environ: environment variables by name.
        poll_seconds: time between two reads.
    """

    path: Path
    environ: Mapping[str, str]
    poll_seconds: float = _POLL_SECONDS

    def read(self) -> _Content:
        """Read the file; blocks."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # reading a pipe may never end
                return _Content(problem=f"{self.path}: is no regular file")
            return _Content(data=self.path.read_bytes())
        except OSError as error:
            return _Content(problem=describe_unreadable(self.path, error))

    def load(self, content: _Content) -> Loaded[Settings]:
        """Build the settings from the file's content and the environment; blocks.

        Raises:
            ConfigError: a setting is invalid; the message lists every problem found.
        """
        return load(self.path, self.environ, content.data)


_Adopt = Callable[[Settings], Awaitable[None]]
"""Applies new settings."""


class ReloadOutcome(StrEnum):
    """Result of a change of the settings file, as a metric label."""

    APPLIED = "applied"
    REJECTED = "rejected"
    """The file is invalid: the previous settings stay in force."""
    UNCHANGED = "unchanged"
    """No value changed, or all changed values need a restart."""
    FAULT = "fault"
    """Applying failed with an internal error: the previous settings are restored."""


class Reloader:
    """Reads the settings file periodically and applies its changes.

    Attributes:
        problem: the reason why the current file is not in force, or "".

    Args:
        settings: the settings in force at the start.
        adopt: applies new settings.
        metrics: counts the outcomes.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        file: SettingsFile,
        settings: Settings,
        adopt: _Adopt,
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
        self._last: _Content | None = None
        self._waiting: tuple[SettingChange, ...] = ()
        for outcome in ReloadOutcome:
            metrics.settings_reloads.labels(outcome)

    async def run(self) -> None:
        """Read the file periodically and apply its changes until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._file.poll_seconds)

    async def look(self) -> None:
        """Apply the file if its content has changed since the last read."""
        content = await asyncio.to_thread(self._file.read)
        while content != self._last:
            await asyncio.sleep(_SETTLE_SECONDS)
            before, content = content, await asyncio.to_thread(self._file.read)
            if content == before:
                await self._take(content)

    async def _take(self, content: _Content) -> None:
        """Validate the content of the file, apply it, and record the outcome."""
        before, self._last = self._last, content
        try:
            settings = await self._load(content, before)
            changes, outcome = await self._put_in_force(settings)
        except ConfigError as error:
            self._refuse(error.problems)
            return
        except Exception:
            # Placing pods must continue. Some parts may have the new settings, others the old ones.
            _logger.exception("internal error", extra={"verb": "reload"})
            self._note(ReloadOutcome.FAULT, await self._go_back())
            return
        self._metrics.settings_loaded_at.set(self._clock())
        if before is None and not changes:
            return  # the first read finds the settings with which the extender was started
        self._note(outcome, "")
        _logger.info(
            "settings reloaded"
            if changes
            else "settings file changed without effect on the settings in force",
            extra={"file": str(self._file.path), "changed": _shown(changes)},
        )

    async def _load(self, content: _Content, before: _Content | None) -> Settings:
        """Build the settings from the file and the environment."""
        if content.problem:
            raise ConfigError((content.problem,))
        # An empty file is a mistake: editors empty a file before they write it.
        if before is not None and not content.data.strip():
            raise ConfigError((f"{self._file.path}: is empty: write {{}} to set nothing",))
        loaded = await asyncio.to_thread(self._file.load, content)
        if before is not None:  # the command line has logged the warnings of the start
            log_warnings(loaded.warnings)
        return loaded.settings

    async def _put_in_force(
        self, settings: Settings
    ) -> tuple[tuple[SettingChange, ...], ReloadOutcome]:
        """Apply the settings that need no restart; return the changes and the outcome."""
        if self._is_half_way:
            await self._adopt_again()
        wanted, settings = settings, _as_far_as_live(self._in_force, settings)
        changes = list_changes(self._in_force, settings, self._settings)
        if changes:
            self._is_half_way = True
            await self._adopt(settings)
            self._in_force, self._is_half_way = settings, False
        self._note_waiting(list_changes(settings, wanted, self._settings))
        return changes, ReloadOutcome.APPLIED if changes else ReloadOutcome.UNCHANGED

    async def _go_back(self) -> str:
        """Restore the settings from before a fault, and return a message about the result."""
        fault = "internal error while new settings were applied"
        try:
            await self._adopt_again()
        except Exception:
            _logger.exception("internal error", extra={"verb": "reload"})
            return f"{fault}, and while the previous settings were restored: restart"
        return f"{fault}, the previous settings stay in force: see the log"

    async def _adopt_again(self) -> None:
        """Apply all settings in force again, because some parts may have been replaced."""
        await self._adopt(self._in_force)
        self._is_half_way = False

    def _note_waiting(self, waiting: tuple[SettingChange, ...]) -> None:
        """Log the settings that need a restart, once for each change of this list."""
        self._metrics.settings_restart_needed.set(len(waiting))
        before, self._waiting = self._waiting, waiting
        if waiting and waiting != before:
            _logger.warning(
                "settings wait for a restart",
                extra={"file": str(self._file.path), "waiting": _shown(waiting)},
            )

    def _refuse(self, problems: tuple[str, ...]) -> None:
        """Record and log the problems of an invalid file."""
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        self._note(
            ReloadOutcome.REJECTED,
            f"invalid settings file, the previous settings stay in force: {problems[0]}{more}",
        )
        _logger.warning(
            "settings file is invalid, the previous settings stay in force",
            extra={"file": str(self._file.path), "problems": problems},
        )

    def _note(self, outcome: ReloadOutcome, problem: str) -> None:
        self.problem = problem
        self._metrics.settings_reloads.labels(outcome).inc()
        self._metrics.settings_file_bad.set(bool(problem))


def log_warnings(warnings: tuple[str, ...]) -> None:
    """Log the removed settings that are still set; log nothing if there are none."""
    if warnings:
        _logger.warning("removed settings are still set", extra={"settings": warnings})


def _as_far_as_live(in_force: Settings, wanted: Settings) -> Settings:
    """Return the wanted settings, with the values in force for those that need a restart."""
    kept: dict[str, object] = {
        name: getattr(in_force, name) for name in Settings.model_fields if name not in _LIVE
    }
    for section, names in _LIVE_PARTS.items():
        live = {name: getattr(getattr(wanted, section), name) for name in names}
        kept[section] = getattr(in_force, section).model_copy(update=live)
    return wanted.model_copy(update=kept)


def _shown(changes: tuple[SettingChange, ...]) -> dict[str, str]:
    return {change.name: str(change) for change in changes}
