"""Which names are there, kept up to date as what bears them comes and goes."""


class Tally:
    """Counts names; one that nothing bears any more is forgotten.

    Example:
        >>> tally = Tally()
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
        """The names that are there; the same object as long as they are the same."""
        if self._names is None:
            self._names = frozenset(self._counts)
        return self._names

    def add(self, name: str) -> None:
        """Count one more that bears a name."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if not count:
            self._names = None

    def remove(self, name: str) -> None:
        """Count one less; it was added before."""
        count = self._counts[name] - 1
        if count:
            self._counts[name] = count
        else:
            del self._counts[name]
            self._names = None
