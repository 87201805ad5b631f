"""Decides which waiting pods one look asks about, so that each of them gets its turn.

A look asks about few needs: each may take milliseconds in a large cluster. Pods that a scheduling
gate keeps from kube-scheduler are tried by nobody else, so no number of others, however urgent, may
keep a look from any of them for ever.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

MAX_NEEDS: Final = 32
"""Distinct needs that one look asks about."""

MAX_PROMISING: Final = MAX_NEEDS // 2
"""So many of them are needs that nodes would do for when they were last asked about; the others
have their turn. What keeps promising, and helps nobody, takes no more than this from them."""

Key = TypeVar("Key")


class LookOrder:
    """Knows how long each waiting pod has not been looked at.

    That is kept by pod: what a pod needs may change from look to look, and that must not change
    when its turn is.
    """

    def __init__(self) -> None:
        self._number = 0
        self._looked_at: dict[str, int] = {}
        self._promising: set[object] = set()

    def begin(self, waiting: Iterable[str]) -> None:
        """Begin a look.

        Args:
            waiting: UIDs of all waiting pods. New ones count as looked at the last time: all that
                have waited for longer come first.
        """
        before, last = self._looked_at, self._number
        self._looked_at = {uid: before.get(uid, last) for uid in waiting}
        self._number += 1

    def looked_at(self, uid: str) -> int:
        """Return the number of the look at which a waiting pod last had its turn, or came."""
        return self._looked_at[uid]

    def pick(self, needs: Mapping[Key, Sequence[str]]) -> list[Key]:
        """Return the needs that this look asks about, in the order given.

        Args:
            needs: UIDs of the pods that have each need; the most urgent need first.
        """
        self._promising &= needs.keys()
        promising = [key for key in needs if key in self._promising][:MAX_PROMISING]
        picked = set(promising)
        others = sorted(
            (key for key in needs if key not in picked),
            key=lambda key: min(map(self.looked_at, needs[key])),
        )
        picked.update(others[: MAX_NEEDS - len(promising)])
        return [key for key in needs if key in picked]

    def note(self, uids: Iterable[str]) -> None:
        """Take that these pods have their turn in this look."""
        self._looked_at.update(dict.fromkeys(uids, self._number))

    def note_promising(self, asked: Collection[object], promising: Iterable[object]) -> None:
        """Take what the look found.

        Args:
            asked: the needs that it asked about.
            promising: those of all needs that some node would do for.
        """
        self._promising.difference_update(asked)
        self._promising.update(promising)

    def forget(self) -> None:
        """Forget everything: another replica wakes."""
        self._looked_at.clear()
        self._promising.clear()
