"""Select the waiting pods that one check examines, so that every pod is examined in time.

A check examines few distinct requests, because each may take milliseconds in a large cluster. Pods
behind a scheduling gate are tried by this check only, so other pods must not delay them forever.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

MAX_NEEDS: Final = 32
"""Distinct requests that one check examines."""

MAX_PROMISING: Final = MAX_NEEDS // 2
"""Most of them that had a node in their last check; the others are examined in rotation. So
requests that have a node again and again, without effect, take only this share."""

Key = TypeVar("Key")


class LookOrder:
    """Records at which check each waiting pod was last examined.

    The key is the pod, because its request may change between checks without losing its place.
    """

    def __init__(self) -> None:
        self._number = 0
        self._looked_at: dict[str, int] = {}
        self._promising: set[object] = set()

    def begin(self, waiting: Iterable[str]) -> None:
        """Begin a check.

        Args:
            waiting: UIDs of all waiting pods. New pods count as examined at the last check, so all
                that have waited longer come first.
        """
        before, last = self._looked_at, self._number
        self._looked_at = {uid: before.get(uid, last) for uid in waiting}
        self._number += 1

    def looked_at(self, uid: str) -> int:
        """Return the number of the check that last examined a pod, or at which the pod appeared."""
        return self._looked_at[uid]

    def pick(self, needs: Mapping[Key, Sequence[str]]) -> list[Key]:
        """Return the requests that this check examines, in the order given.

        Args:
            needs: UIDs of the pods by request; the most urgent request first.
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
        """Record that this check examines these pods."""
        self._looked_at.update(dict.fromkeys(uids, self._number))

    def note_promising(self, asked: Collection[object], promising: Iterable[object]) -> None:
        """Record the results of the check.

        Args:
            asked: requests that were examined.
            promising: all requests for which a node was found.
        """
        self._promising.difference_update(asked)
        self._promising.update(promising)

    def forget(self) -> None:
        """Forget everything, because another replica takes over waking."""
        self._looked_at.clear()
        self._promising.clear()
