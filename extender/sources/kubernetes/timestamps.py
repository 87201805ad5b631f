"""Parse times of the Kubernetes API."""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

_MAX_CACHED: Final = 4096
_YEAR_10000: Final = 253_402_300_800.0
"""First time that a `datetime` cannot hold, in UTC."""


@lru_cache(maxsize=_MAX_CACHED)
def _parse_time(text: str) -> float | None:
    """Parse a time; cached, because containers of a pod and pods of a burst share theirs."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return seconds if 0 <= seconds < _YEAR_10000 else None


def parse_time(value: object) -> float | None:
    """Return a time of the Kubernetes API in seconds since the epoch, None for any other value.

    Times before 1970 or after 9999 are None, too: in UTC some of them could not be written again.

    Example:
        >>> parse_time("1970-01-01T00:01:00Z"), parse_time(None)
        (60.0, None)
        >>> parse_time("0001-01-01T00:00:00+23:59"), parse_time("9999-12-31T23:59:59-23:59")
        (None, None)
    """
    return _parse_time(value) if isinstance(value, str) else None
