"""Cache the user of each token, and the namespaces that each caller may read.

Two fair queues protect the API server, so that no caller delays all others: one for unknown tokens,
by client address, and one for known users, by user name.
"""

import asyncio
import logging
import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Final

from extender.answers.routes import SESSION
from extender.kube.client import KubeClient, KubeError
from extender.kube.token_review import (
    ALL_NAMESPACES,
    REVIEW_TIMEOUT_SECONDS,
    Recent,
    TokenRefusedError,
    User,
    may_list_pods,
    review_token,
    token_key,
)
from extender.runtime.fair_queue import BusyError, FairQueue
from extender.runtime.logs import LogThrottle
from extender.server.redaction import NO_NAMESPACE, AccessError
from extender.settings.api import ApiSettings

logger = logging.getLogger(__name__)

SESSION_PATH: Final = SESSION.path
HEADER: Final = "X-Idlegpu-Token"
"""Header for a token sent through the API server's proxy, which does not forward Authorization."""

_MOST_CALLERS: Final = 1000
_MOST_REFUSED: Final = 10_000
_REFUSED_SECONDS: Final = 10.0
"""Time for which a refused token stays refused without a new review."""

_TOKEN_SECONDS: Final = 60.0
"""A token is reviewed again after this time: a removed token stays valid for at most twice as
long."""
_RIGHTS_SECONDS: Final = 30.0
"""The right to list a namespace's pods is checked again after this time."""
_REVIEWS_PER_SECOND: Final = 20.0
"""Maximum average rate of reviews of unknown tokens: guessed tokens must not load the API
server."""

_STRANGERS: Final = 8
_USER_REVIEWS: Final = 24
"""Concurrent reviews of unknown tokens, and of known users: watches and events share the API
server's connections."""
_STRANGERS_WAITING: Final = 20
_STRANGERS_SECONDS: Final = 2.0
"""Limits for unknown tokens from one address: number of waiting reviews, and waiting time."""
_USER_WAITING: Final = 64
"""Waiting reviews of one user, for all of its tokens together."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")

_PARALLEL: Final = 8
"""Concurrent access reviews for one caller."""

_MOST_NAMESPACES: Final = 5000
"""Largest number of namespaces to review for a caller; pods in further ones are hidden."""

_GRACE: Final = 2.0
"""A result is reviewed again at its age limit, and stays valid up to this multiple of the limit."""

_RETRY_SECONDS: Final = 1.0
"""Pause for a caller after the API server failed to answer."""

_NEVER: Final = (False, -math.inf)
"""A right that was not reviewed yet, and when."""

_ReviewToken = Callable[[], Awaitable[User]]
"""Reviews the token and returns its user; raises TokenRefusedError or KubeError."""
_MayList = Callable[[User, str], Awaitable[bool]]
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
    """

    def __init__(
        self,
        user: User,
        *,
        review: _ReviewToken,
        may_list: _MayList,
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
        self._learnt: tuple[frozenset[str] | None, float] = (None, -math.inf)
        """Namespaces whose rights are all known, and the time until which they are."""
        self._lock = asyncio.Lock()
        self._silent_until = -math.inf
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
        if self._monotonic() - self._reviewed_at > _GRACE * self._token_seconds:
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
            self._reviewed_at = -math.inf
            raise AccessError(401, f"the API server refuses the token: {error}") from error
        except KubeError as error:
            self._leave_alone(error)
            raise AccessError(503, f"cannot review the token: {error}") from error
        self._reviewed_at = now

    async def learn(self, namespaces: Iterable[str]) -> None:
        """Review rights for the given and all known namespaces; a failure hides the namespace."""
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
        if len(self._rights) > _GRACE * _MOST_NAMESPACES:
            self._rights = {name: it for name, it in self._rights.items() if self._knows(name)}

    def _known_until(self, namespaces: Iterable[str]) -> float:
        """Return the time until which the rights for all these namespaces are known."""
        oldest = min((self._rights.get(name, _NEVER)[1] for name in namespaces), default=-math.inf)
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
        """Send no reviews for `_RETRY_SECONDS`, because the API server is failing."""
        self._silent_until = self._monotonic() + _RETRY_SECONDS
        self._silence = str(error)

    def _is_due(self, namespace: str) -> bool:
        now = self._monotonic()
        _, at = self._rights.get(namespace, _NEVER)
        return now >= self._silent_until and now - at >= self._rights_seconds

    def _knows(self, namespace: str) -> bool:
        """Check whether a right is granted and not too old."""
        allowed, at = self._rights.get(namespace, _NEVER)
        return allowed and self._monotonic() - at <= _GRACE * self._rights_seconds


class Callers:
    """Maps tokens to callers, with the rights reviewed.

    Args:
        namespaces: returns the namespaces whose pods may appear in answers.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: ApiSettings,
        *,
        namespaces: Callable[[], frozenset[str]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = settings
        self._namespaces = namespaces
        self._monotonic = monotonic
        self._callers: OrderedDict[bytes, Caller] = OrderedDict()
        self._refused: Recent[tuple[float, str]] = Recent(_MOST_REFUSED)
        self._log_throttle = LogThrottle(monotonic=monotonic)
        self._strangers = FairQueue(
            at_once=_STRANGERS,
            waiting_each=_STRANGERS_WAITING,
            wait_seconds=_STRANGERS_SECONDS,
            per_second=_REVIEWS_PER_SECOND,
        )
        self._user_reviews = FairQueue(
            at_once=_USER_REVIEWS, waiting_each=_USER_WAITING, wait_seconds=REVIEW_TIMEOUT_SECONDS
        )

    async def admit(self, token: str, address: str | None) -> Caller:
        """Return the caller of a token, with its rights reviewed.

        Args:
            token: the bearer token.
            address: address of the client, None if unknown.

        Raises:
            AccessError: the token is invalid or expired, or cannot be reviewed now.
        """
        caller = await self._caller(token, address)
        try:
            await caller.renew()
        except AccessError as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                self._refuse(token_key(token), str(error))
            raise
        return caller

    def advice(self) -> str:
        """Return instructions for creating and sending a token."""
        audience = self._settings.audience
        option = f" --audience {audience}" if audience else ""
        return (
            f"kubectl create token ACCOUNT{option} makes one; send it as Authorization: Bearer, as "
            f"{HEADER}, or once to POST {SESSION_PATH}"
        )

    def _refuse(self, key: bytes, cause: str) -> None:
        """Remember a refused token for `_REFUSED_SECONDS`."""
        self._callers.pop(key, None)
        self._refused.put(key, (self._monotonic() + _REFUSED_SECONDS, cause))

    async def _caller(self, token: str, address: str | None) -> Caller:
        """Return the caller of a token from the cache or from a review."""
        if not _TOKEN.fullmatch(token):
            raise AccessError(401, f"malformed token: {self.advice()}")
        key = token_key(token)
        caller = self._callers.get(key)
        if caller is None:
            caller = await self._review_new(key, token, address)
            if len(self._callers) >= _MOST_CALLERS:
                self._forget_one()
        self._callers[key] = caller
        self._callers.move_to_end(key)
        return caller

    def _forget_one(self) -> None:
        """Evict the oldest token of the user with the most tokens."""
        names = Counter(caller.name for caller in self._callers.values())
        ((heaviest, _),) = names.most_common(1)
        del self._callers[
            next(key for key, caller in self._callers.items() if caller.name == heaviest)
        ]

    async def _review_new(self, key: bytes, token: str, address: str | None) -> Caller:
        """Review a token that is not in the cache."""
        self._check_refused(key)
        try:
            async with self._strangers.of(address or ""):
                # Another request with the same token may have finished its review by now.
                known = self._callers.get(key)
                if known is not None:
                    return known
                self._check_refused(key)
                user = await self._review(token)
        except BusyError as error:
            raise AccessError(
                429, f"too many unknown tokens: try again in a second: {error}"
            ) from error
        except TokenRefusedError as error:
            cause = f"the API server refuses the token: {error}: {self.advice()}"
            self._refuse(key, cause)
            raise AccessError(401, cause) from error
        except KubeError as error:
            raise AccessError(503, f"cannot review the token: {error}") from error
        unlogged = self._log_throttle.due("reads", user.name)
        if unlogged is not None:
            logger.info("user reads the API", extra={"user": user.name, "also_unlogged": unlogged})

        async def review() -> User:
            try:
                async with self._user_reviews.of(user.name):
                    return await self._review(token)
            except BusyError as error:
                raise KubeError(str(error)) from error

        return Caller(
            user,
            review=review,
            may_list=self._may_list,
            namespaces=self._namespaces,
            token_seconds=_TOKEN_SECONDS,
            rights_seconds=_RIGHTS_SECONDS,
            monotonic=self._monotonic,
        )

    def _check_refused(self, key: bytes) -> None:
        """Refuse a token that was refused less than `_REFUSED_SECONDS` ago."""
        refused = self._refused.get(key)
        if refused is not None and self._monotonic() < refused[0]:
            raise AccessError(401, refused[1])

    async def _review(self, token: str) -> User:
        return await review_token(
            self._client,
            token,
            audience=self._settings.audience,
            timeout_seconds=REVIEW_TIMEOUT_SECONDS,
        )

    async def _may_list(self, user: User, namespace: str) -> bool:
        """Check whether a user may list a namespace's pods."""
        try:
            async with self._user_reviews.of(user.name):
                return await may_list_pods(
                    self._client, user, namespace, timeout_seconds=REVIEW_TIMEOUT_SECONDS
                )
        except (BusyError, KubeError) as error:
            unlogged = self._log_throttle.due("rights", user.name)
            if unlogged is not None:
                logger.warning(
                    "cannot review a caller's rights",
                    extra={"user": user.name, "cause": str(error), "also_unlogged": unlogged},
                )
            raise KubeError(str(error)) from error
