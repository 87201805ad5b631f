"""Somebody who shows a token: who they are and which pods they may read, as far as it is known."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from extender.kube import KubeError
from extender.observe.seen import NO_NAMESPACE, AccessError
from extender.reviews import ALL_NAMESPACES, TokenRefusedError, User

PARALLEL: Final = 8
"""Questions to the API server at once, for one caller."""

MOST_NAMESPACES: Final = 5000
"""Pods in namespaces beyond these are hidden."""

GRACE: Final = 2.0
"""What was found out is asked for anew once it is old, and counts up to so many times as long."""

RETRY_SECONDS: Final = 1.0
"""So long the API server is left alone for a caller where it did not answer."""

ReviewToken = Callable[[], Awaitable[User]]
"""Says whose the token is; raises TokenRefusedError or KubeError."""
MayList = Callable[[User, str], Awaitable[bool]]
"""Says whether somebody may list a namespace's pods; raises KubeError."""


class Caller:
    """Somebody with a token; everything here runs on the event loop's thread.

    However many questions a caller has at once, the API server is asked for one of them: the
    others wait, and go by what was found out.

    Args:
        user: whose the token is.
        review: asks for that again.
        may_list: asks for a right.
        namespaces: those that may have to be shown; the same object as long as they are the same.
        token_seconds: a token is reviewed anew after so long.
        rights_seconds: likewise a right.
        monotonic: seconds since any moment.
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
        """Namespaces of which everything is known, and until when."""
        self._turn = asyncio.Lock()
        self._silent_until = float("-inf")
        self._silence = ""

    @property
    def name(self) -> str:
        """Whose the token is."""
        return self.user.name

    @property
    def sees_all(self) -> bool:
        """Whether the pods of all namespaces may be shown."""
        return self._knows(ALL_NAMESPACES)

    def sees(self, namespace: str) -> bool:
        """Whether the pods of a namespace may be shown; those not asked about may not."""
        if self._monotonic() - self._reviewed_at > GRACE * self._token_seconds:
            return False
        return self.sees_all or (namespace != NO_NAMESPACE and self._knows(namespace))

    def seen_namespaces(self) -> list[str]:
        """Return the namespaces whose pods may be shown, of those that were asked about."""
        return sorted(name for name in self._rights if name and self.sees(name))

    async def renew(self) -> None:
        """Have the token and the rights reviewed that are old.

        Raises:
            AccessError: the token is not known any more, or that cannot be found out.
        """
        async with self._turn:
            now = self._monotonic()
            if now - self._reviewed_at >= self._token_seconds:
                await self._review_anew(now)
        await self.learn(())

    async def _review_anew(self, now: float) -> None:
        """Have the token reviewed; raises as `renew`."""
        if now < self._silent_until:
            raise AccessError(503, f"cannot find out whose the token is: {self._silence}")
        try:
            self.user = await self._review()
        except TokenRefusedError as error:
            self._reviewed_at = float("-inf")
            raise AccessError(401, f"the API server refuses the token: {error}") from error
        except KubeError as error:
            self._leave_alone(error)
            raise AccessError(503, f"cannot find out whose the token is: {error}") from error
        self._reviewed_at = now

    async def learn(self, namespaces: Iterable[str]) -> None:
        """Find out about namespaces, and about those that there are; what fails stays hidden."""
        async with self._turn:
            await self._learn(namespaces)

    async def _learn(self, namespaces: Iterable[str]) -> None:
        await self._ask(ALL_NAMESPACES)
        if self.sees_all:
            return
        there, others = self._namespaces(), set(namespaces)
        learnt, until = self._learnt
        if there is learnt and others <= there and self._monotonic() < until:
            return  # every event of a page asks for this
        wanted = (there | others) - {NO_NAMESPACE}
        due = sorted(name for name in wanted if self._is_due(name))[:MOST_NAMESPACES]
        left = iter(due)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(PARALLEL, len(due))):
                group.create_task(self._ask_each(left), name="rights")
        self._learnt = there, self._known_until(wanted)
        if len(self._rights) > GRACE * MOST_NAMESPACES:
            self._rights = {name: it for name, it in self._rights.items() if self._knows(name)}

    def _known_until(self, namespaces: Iterable[str]) -> float:
        """Return until when none of these has to be asked about again."""
        never = (False, float("-inf"))
        oldest = min((self._rights.get(name, never)[1] for name in namespaces), default=never[1])
        return oldest + self._rights_seconds

    async def _ask_each(self, names: Iterable[str]) -> None:
        for name in names:
            await self._ask(name)

    async def _ask(self, namespace: str) -> None:
        """Find out about one namespace, if it is time."""
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
        """Ask nothing for a moment: the API server has trouble enough."""
        self._silent_until = self._monotonic() + RETRY_SECONDS
        self._silence = str(error)

    def _is_due(self, namespace: str) -> bool:
        now = self._monotonic()
        _, at = self._rights.get(namespace, (False, float("-inf")))
        return now >= self._silent_until and now - at >= self._rights_seconds

    def _knows(self, namespace: str) -> bool:
        """Whether a right is known, and lately."""
        allowed, at = self._rights.get(namespace, (False, float("-inf")))
        return allowed and self._monotonic() - at <= GRACE * self._rights_seconds
