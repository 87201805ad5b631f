"""Reads times as the Kubernetes API writes them."""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

MAX_CACHED: Final = 4096


@lru_cache(maxsize=MAX_CACHED)
def _parse_time(text: str) -> float | None:
    """Return a time of the API, cached: containers of a pod and pods of a burst share theirs."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def parse_time(value: object) -> float | None:
    """Return a time as the API writes it in seconds since the epoch, None for anything else.

    Example:
        >>> parse_time("1970-01-01T00:01:00Z"), parse_time(None)
        (60.0, None)
    """
    return _parse_time(value) if isinstance(value, str) else None
