"""Who gives way where there is room for so many: whoever holds the most, to who has least."""

from collections.abc import Mapping


def who_gives_way(held: Mapping[str, int], newcomer: str) -> str | None:
    """Return who has to give one up for a newcomer; None where the newcomer has a fair share.

    Nobody is left with less than who comes: else two would take places from each other for ever.

    Args:
        held: how many each of them holds.
        newcomer: who comes, and wants one more.

    Example:
        >>> who_gives_way({"a": 3, "b": 1}, "b"), who_gives_way({"a": 3, "b": 2}, "b")
        ('a', None)
    """
    if not held:
        return None
    heaviest = max(held, key=held.__getitem__)
    return heaviest if held[heaviest] >= held.get(newcomer, 0) + 2 else None
