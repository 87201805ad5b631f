"""Parse times of the Kubernetes API."""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

_MAX_CACHED: Final = 4096


@lru_cache(maxsize=_MAX_CACHED)
def _parse_time(text: str) -> float | None:
    """Parse a time; cached, because containers of a pod and pods of a burst share theirs."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def parse_time(value: object) -> float | None:
    """Return a time of the Kubernetes API in seconds since the epoch, None for any other value.

    Example:
        >>> parse_time("1970-01-01T00:01:00Z"), parse_time(None)
        (60.0, None)
    """
    return _parse_time(value) if isinstance(value, str) else None
