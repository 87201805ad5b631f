"""Cache of callers by token, with limits on reviews of unknown tokens.

Two fair queues protect the API server, so that no caller delays all others: one for unknown tokens,
by client address, and one for known users, by user name.
"""

import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from extender.answers.routes import SESSION
from extender.api.caller import Caller
from extender.kube.client import KubeClient, KubeError
from extender.kube.token_review import (
    REVIEW_TIMEOUT_SECONDS,
    Recent,
    TokenRefusedError,
    User,
    may_list_pods,
    review_token,
    token_key,
)
from extender.runtime.fair_queue import BusyError, FairQueue
from extender.runtime.log_throttle import LogThrottle
from extender.server.redaction import AccessError
from extender.settings.api import ApiSettings

logger = logging.getLogger(__name__)

SESSION_PATH: Final = SESSION.path
HEADER: Final = "X-Idlegpu-Token"
"""Header for a token sent through the API server's proxy, which does not forward Authorization."""

_MAX_TOKEN: Final = 8192
MOST_CALLERS: Final = 1000
_MOST_REFUSED: Final = 10_000
REFUSED_SECONDS: Final = 10.0
"""Time for which a refused token stays refused without a new review."""

TOKEN_SECONDS: Final = 60.0
"""A token is reviewed again after this time: a removed token stays valid for at most twice as
long."""
RIGHTS_SECONDS: Final = 30.0
"""The right to list a namespace's pods is checked again after this time."""
REVIEWS_PER_SECOND: Final = 20.0
"""Maximum average rate of reviews of unknown tokens: guessed tokens must not load the API
server."""

_STRANGERS: Final = 8
QUESTIONS: Final = 24
"""Concurrent reviews of unknown tokens, and of known users: watches and events share the API
server's connections."""
_STRANGERS_WAITING: Final = 20
STRANGERS_SECONDS: Final = 2.0
"""Limits for unknown tokens from one address: number of waiting reviews, and waiting time."""
_QUESTIONS_WAITING: Final = 64
"""Waiting reviews of one user, for all of its tokens together."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class Callers:
    """Maps tokens to callers, with the rights reviewed.

    Args:
        client: client for the API server.
        settings: access settings.
        namespaces: returns the namespaces whose pods may appear in answers.
        monotonic: monotonic clock in seconds.
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
            wait_seconds=STRANGERS_SECONDS,
            per_second=REVIEWS_PER_SECOND,
        )
        self._questions = FairQueue(
            at_once=QUESTIONS,
            waiting_each=_QUESTIONS_WAITING,
            wait_seconds=REVIEW_TIMEOUT_SECONDS,
        )

    async def admit(self, token: str, address: str) -> Caller:
        """Return the caller of a token, with its rights reviewed.

        Args:
            token: the bearer token.
            address: address of the client.

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
        """Remember a refused token for `REFUSED_SECONDS`."""
        self._callers.pop(key, None)
        self._refused.put(key, (self._monotonic() + REFUSED_SECONDS, cause))

    async def _caller(self, token: str, address: str) -> Caller:
        """Return the caller of a token from the cache or from a review.

        Raises:
            AccessError: as `admit`.
        """
        if len(token) > _MAX_TOKEN or not _TOKEN.fullmatch(token):
            raise AccessError(401, f"malformed token: {self.advice()}")
        key = token_key(token)
        caller = self._callers.get(key)
        if caller is None:
            caller = await self._meet(key, token, address)
            if len(self._callers) >= MOST_CALLERS:
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

    async def _meet(self, key: bytes, token: str, address: str) -> Caller:
        """Review a token that is not in the cache.

        Raises:
            AccessError: as `admit`.
        """
        self._check_refused(key)
        try:
            async with self._strangers.of(address):
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
            logger.info("reads the API", extra={"user": user.name, "also_unlogged": unlogged})

        async def review() -> User:
            try:
                async with self._questions.of(user.name):
                    return await self._review(token)
            except BusyError as error:
                raise KubeError(str(error)) from error

        return Caller(
            user,
            review=review,
            may_list=self._may_list,
            namespaces=self._namespaces,
            token_seconds=TOKEN_SECONDS,
            rights_seconds=RIGHTS_SECONDS,
            monotonic=self._monotonic,
        )

    def _check_refused(self, key: bytes) -> None:
        """Refuse a token that was refused less than `REFUSED_SECONDS` ago.

        Raises:
            AccessError: the token was refused.
        """
        until, cause = self._refused.get(key) or (0.0, "")
        if self._monotonic() < until:
            raise AccessError(401, cause)

    async def _review(self, token: str) -> User:
        return await review_token(
            self._client,
            token,
            audience=self._settings.audience,
            timeout_seconds=REVIEW_TIMEOUT_SECONDS,
        )

    async def _may_list(self, user: User, namespace: str) -> bool:
        """Check whether a user may list a namespace's pods.

        Raises:
            KubeError: the API server did not answer.
        """
        try:
            async with self._questions.of(user.name):
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
