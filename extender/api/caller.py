"""A caller with a token: its user, and a cache of its rights to read pods by namespace."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from extender.kube.client import KubeError
from extender.kube.token_review import ALL_NAMESPACES, TokenRefusedError, User
from extender.server.redaction import NO_NAMESPACE, AccessError

_PARALLEL: Final = 8
"""Concurrent access reviews for one caller."""

_MOST_NAMESPACES: Final = 5000
"""Largest number of namespaces to review for a caller; pods in further ones are hidden."""

GRACE: Final = 2.0
"""A result is reviewed again at its age limit, and stays valid up to this multiple of the limit."""

RETRY_SECONDS: Final = 1.0
"""Pause for a caller after the API server failed to answer."""

ReviewToken = Callable[[], Awaitable[User]]
"""Reviews the token and returns its user; raises TokenRefusedError or KubeError."""
MayList = Callable[[User, str], Awaitable[bool]]
"""Checks whether a user may list a namespace's pods; raises KubeError."""


class Caller:
    """A caller with a reviewed token. Not thread-safe: use it on the event loop.

    Concurrent requests of one caller share each review: the first sends it, the others wait for it.

    Args:
        user: owner of the token.
        review: reviews the token again.
        may_list: checks a right.
        namespaces: returns the namespaces whose pods may appear in answers; the same object as long
            as they do not change.
        token_seconds: age at which the token is reviewed again.
        rights_seconds: age at which a right is checked again.
        monotonic: monotonic clock in seconds.
    """

    def __init__(
        self,
        user: User,
        *,
        review: ReviewToken,
        may_list: MayList,
        namespaces: Callable[[], frozenset[str]],
        token_seconds: float,
        rights_seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
        self.user = user
        self._review = review
        self._may_list = may_list
        self._namespaces = namespaces
        self._token_seconds = token_seconds
        self._rights_seconds = rights_seconds
        self._monotonic = monotonic
        self._reviewed_at = monotonic()
        self._rights: dict[str, tuple[bool, float]] = {}
        self._learnt: tuple[frozenset[str] | None, float] = (None, float("-inf"))
        """Namespaces whose rights are all known, and the time until which they are."""
        self._lock = asyncio.Lock()
        self._silent_until = float("-inf")
        self._silence = ""

    @property
    def name(self) -> str:
        """User name of the token's owner."""
        return self.user.name

    @property
    def sees_all(self) -> bool:
        """Whether the caller may read the pods of all namespaces."""
        return self._knows(ALL_NAMESPACES)

    def sees(self, namespace: str) -> bool:
        """Check whether the caller may read a namespace's pods; False before the right's review."""
        if self._monotonic() - self._reviewed_at > GRACE * self._token_seconds:
            return False
        return self.sees_all or (namespace != NO_NAMESPACE and self._knows(namespace))

    def seen_namespaces(self) -> list[str]:
        """Return the reviewed namespaces whose pods the caller may read."""
        return sorted(name for name in self._rights if name and self.sees(name))

    async def renew(self) -> None:
        """Review the token and the rights again if they are old.

        Raises:
            AccessError: the token is no longer valid, or cannot be reviewed.
        """
        async with self._lock:
            now = self._monotonic()
            if now - self._reviewed_at >= self._token_seconds:
                await self._review_again(now)
        await self.learn(())

    async def _review_again(self, now: float) -> None:
        if now < self._silent_until:
            raise AccessError(503, f"cannot review the token: {self._silence}")
        try:
            self.user = await self._review()
        except TokenRefusedError as error:
            self._reviewed_at = float("-inf")
            raise AccessError(401, f"the API server refuses the token: {error}") from error
        except KubeError as error:
            self._leave_alone(error)
            raise AccessError(503, f"cannot review the token: {error}") from error
        self._reviewed_at = now

    async def learn(self, namespaces: Iterable[str]) -> None:
        """Review the rights for these and all known namespaces; hide those whose review fails."""
        async with self._lock:
            await self._learn(namespaces)

    async def _learn(self, namespaces: Iterable[str]) -> None:
        await self._review_right(ALL_NAMESPACES)
        if self.sees_all:
            return
        there, others = self._namespaces(), set(namespaces)
        learnt, until = self._learnt
        if there is learnt and others <= there and self._monotonic() < until:
            return  # the common case: each event of a page calls this
        wanted = (there | others) - {NO_NAMESPACE}
        due = sorted(name for name in wanted if self._is_due(name))[:_MOST_NAMESPACES]
        left = iter(due)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_PARALLEL, len(due))):
                group.create_task(self._review_rights(left), name="rights")
        self._learnt = there, self._known_until(wanted)
        if len(self._rights) > GRACE * _MOST_NAMESPACES:
            self._rights = {name: it for name, it in self._rights.items() if self._knows(name)}

    def _known_until(self, namespaces: Iterable[str]) -> float:
        """Return the time until which the rights for all these namespaces are known."""
        never = (False, float("-inf"))
        oldest = min((self._rights.get(name, never)[1] for name in namespaces), default=never[1])
        return oldest + self._rights_seconds

    async def _review_rights(self, names: Iterable[str]) -> None:
        for name in names:
            await self._review_right(name)

    async def _review_right(self, namespace: str) -> None:
        """Review the right for one namespace if the result is missing or old."""
        if not self._is_due(namespace):
            return
        now = self._monotonic()
        try:
            allowed = await self._may_list(self.user, namespace)
        except KubeError as error:
            self._leave_alone(error)
            return
        self._rights[namespace] = (allowed, now)

    def _leave_alone(self, error: KubeError) -> None:
        """Send no reviews for `RETRY_SECONDS`, because the API server is failing."""
        self._silent_until = self._monotonic() + RETRY_SECONDS
        self._silence = str(error)

    def _is_due(self, namespace: str) -> bool:
        now = self._monotonic()
        _, at = self._rights.get(namespace, (False, float("-inf")))
        return now >= self._silent_until and now - at >= self._rights_seconds

    def _knows(self, namespace: str) -> bool:
        """Check whether a right is granted and not too old."""
        allowed, at = self._rights.get(namespace, (False, float("-inf")))
        return allowed and self._monotonic() - at <= GRACE * self._rights_seconds
