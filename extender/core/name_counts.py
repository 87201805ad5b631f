"""Count references to names, to keep the set of names in use up to date."""


class NameCounts:
    """Reference counts of names; a name without references is removed.

    Example:
        >>> tally = NameCounts()
        >>> tally.add("a"), tally.add("a"), tally.remove("a")
        (None, None, None)
        >>> sorted(tally.names)
        ['a']
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: frozenset[str] | None = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The names in use; the identical object until they change."""
        if self._names is None:
            self._names = frozenset(self._counts)
        return self._names

    def add(self, name: str) -> None:
        """Add one reference to a name."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if not count:
            self._names = None

    def remove(self, name: str) -> None:
        """Remove one reference that was added before."""
        count = self._counts[name] - 1
        if count:
            self._counts[name] = count
        else:
            del self._counts[name]
            self._names = None
