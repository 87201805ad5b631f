"""The settings file while it changes: read whole, and looked at again whenever it may have changed.

A ConfigMap's file is a symlink through `..data`, which the kubelet replaces by a rename; editors
replace the file itself. So its directory is watched, not the file. Not every file system tells of
changes, and a directory that is replaced takes its watch along: so it is read now and then, too.
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

from extender.config import Settings, load_settings
from extender.settings.layers import describe_unreadable

logger = logging.getLogger(__name__)

SWAPPED: Final = "..data"
"""What the kubelet replaces where a ConfigMap changes."""

POLL_SECONDS: Final = 5.0
STEP_MILLISECONDS: Final = 200
"""Changes of a directory that follow each other within this time are one."""
LONGEST_MILLISECONDS: Final = 2000
"""... but are not waited for any longer than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What the file held, or why that is not known.

    Attributes:
        data: its bytes.
        problem: why it cannot be read, "" where it can.
    """

    data: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The settings file, and the environment that comes before it.

    Attributes:
        path: the file.
        environ: variables by name.
        poll_seconds: it is looked at this often, whatever is told of changes.
    """

    path: Path
    environ: Mapping[str, str]
    poll_seconds: float = POLL_SECONDS

    def read(self) -> Content:
        """Return what the file holds; blocks."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # reading a pipe may never end
                return Content(problem=f"{self.path}: is no regular file")
            return Content(data=self.path.read_bytes())
        except OSError as error:
            return Content(problem=describe_unreadable(self.path, error))

    def load(self, content: Content) -> Settings:
        """Return the settings that the file's content and the environment make; blocks.

        Raises:
            ConfigError: with every problem that was found.
        """
        return load_settings(self.path, self.environ, content.data)

    async def looks(self) -> AsyncGenerator[None]:
        """Yield whenever the file may have changed, for ever."""
        trouble = ""
        while True:
            try:
                async with aclosing(self._changes()) as changes:
                    async for _ in changes:
                        trouble = ""
                        yield
            except (OSError, RuntimeError) as error:  # also where inotify has no watches left
                if str(error) != trouble:
                    trouble = str(error)
                    logger.warning(
                        "directory of the settings file cannot be watched, the file is only read "
                        "now and then",
                        extra={
                            "file": str(self.path),
                            "cause": trouble,
                            "seconds": self.poll_seconds,
                        },
                    )
                await asyncio.sleep(self.poll_seconds)
                yield

    async def _changes(self) -> AsyncGenerator[None]:
        """Yield after changes in the directory, and now and then, until it is another one.

        Raises:
            OSError: it cannot be watched.
            RuntimeError: likewise.
        """
        directory = self.path.absolute().parent
        before = await asyncio.to_thread(_identity, directory)
        changes = awatch(
            directory,
            watch_filter=lambda _, path: Path(path).name in {self.path.name, SWAPPED},
            debounce=LONGEST_MILLISECONDS,
            step=STEP_MILLISECONDS,
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
    """Return which directory this is, whatever its name."""
    found = directory.stat()
    return found.st_dev, found.st_ino
