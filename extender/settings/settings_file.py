"""Read and watch the settings file.

A ConfigMap's file is a symlink through `..data`, which the kubelet replaces by a rename. Editors
replace the file itself. So the directory is watched, not the file. Some file systems report no
changes, and a replaced directory loses its watch, so the file is also read periodically.
"""

import asyncio
import logging
import stat
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from watchfiles import awatch

from extender.settings.config import Settings, load
from extender.settings.layers import describe_unreadable
from extender.settings.loading import Loaded

logger = logging.getLogger(__name__)

_SWAPPED: Final = "..data"
"""Symlink that the kubelet replaces when a ConfigMap changes."""

_POLL_SECONDS: Final = 5.0
_STEP_MILLISECONDS: Final = 200
"""Changes of a directory that follow each other within this time count as one."""
_LONGEST_MILLISECONDS: Final = 2000
"""Longest wait for further changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Content of the settings file, or the reason why it cannot be read.

    Attributes:
        data: bytes of the file.
        problem: the reason why the file cannot be read, or "".
    """

    data: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The settings file, and the environment variables that override it.

    Attributes:
        path: the file.
        environ: environment variables by name.
        poll_seconds: time between two reads without a reported change.
    """

    path: Path
    environ: Mapping[str, str]
    poll_seconds: float = _POLL_SECONDS

    def read(self) -> Content:
        """Read the file; blocks."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # reading a pipe may never end
                return Content(problem=f"{self.path}: is no regular file")
            return Content(data=self.path.read_bytes())
        except OSError as error:
            return Content(problem=describe_unreadable(self.path, error))

    def load(self, content: Content) -> Loaded[Settings]:
        """Build the settings from the file's content and the environment; blocks.

        Raises:
            ConfigError: a setting is invalid; the message lists every problem found.
        """
        return load(self.path, self.environ, content.data)

    async def looks(self) -> AsyncGenerator[None]:
        """Yield whenever the file may have changed, without end."""
        cause = ""
        while True:
            try:
                async with aclosing(self._changes()) as changes:
                    async for _ in changes:
                        cause = ""
                        yield
            except (OSError, RuntimeError) as error:  # RuntimeError if inotify has no watches left
                if str(error) != cause:
                    cause = str(error)
                    logger.warning(
                        "directory of the settings file cannot be watched, the file is only read "
                        "now and then",
                        extra={
                            "file": str(self.path),
                            "cause": cause,
                            "seconds": self.poll_seconds,
                        },
                    )
                await asyncio.sleep(self.poll_seconds)
                yield

    async def _changes(self) -> AsyncGenerator[None]:
        """Yield after changes in the directory and periodically, until the directory is replaced.

        Raises:
            OSError: the directory cannot be watched.
            RuntimeError: the directory cannot be watched, for example without free inotify watches.
        """
        directory = self.path.absolute().parent
        before = await asyncio.to_thread(_identity, directory)
        changes = awatch(
            directory,
            watch_filter=lambda _, path: Path(path).name in {self.path.name, _SWAPPED},
            debounce=_LONGEST_MILLISECONDS,
            step=_STEP_MILLISECONDS,
            rust_timeout=int(self.poll_seconds * 1000),
            yield_on_timeout=True,
            recursive=False,
        )
        async with aclosing(changes):
            async for _ in changes:
                yield
                if await asyncio.to_thread(_identity, directory) != before:
                    return


def _identity(directory: Path) -> tuple[int, int]:
    """Return device and inode number of a directory, which change when it is replaced."""
    found = directory.stat()
    return found.st_dev, found.st_ino
