"""Pick the client that loses a connection when a port is full."""

from collections.abc import Mapping


def connections_to_close(held: Mapping[str, int], newcomer: str) -> str | None:
    """Return the client that holds most connections, or None if it must not lose one.

    It must hold at least two more than the newcomer. Otherwise two clients would take connections
    from each other without end.

    Args:
        held: number of connections by client.
        newcomer: the client that opens one more.

    Example:
        >>> connections_to_close({"a": 3, "b": 1}, "b"), connections_to_close({"a": 3, "b": 2}, "b")
        ('a', None)
    """
    if not held:
        return None
    heaviest = max(held, key=held.__getitem__)
    return heaviest if held[heaviest] >= held.get(newcomer, 0) + 2 else None
