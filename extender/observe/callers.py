"""Everybody who has shown a token: whose it is, from memory where it can be.

The API server is asked for few at a time, and for none at the cost of another: strangers come in
turn by their addresses, and whoever is known by their names.
"""

import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from extender.kube import KubeClient, KubeError
from extender.observe.caller import Caller
from extender.observe.seen import AccessError
from extender.reviews import (
    Recent,
    TokenRefusedError,
    User,
    may_list_pods,
    review_token,
    token_key,
)
from extender.seldom import Seldom
from extender.settings.api import Api
from extender.turns import BusyError, Turns

logger = logging.getLogger(__name__)

SESSION_PATH: Final = "/v1/session"
HEADER: Final = "X-Idlegpu-Token"
"""A token here passes the API server's proxy, which keeps Authorization to itself."""

MAX_TOKEN: Final = 8192
MOST_CALLERS: Final = 1000
MOST_REFUSED: Final = 10_000
REFUSED_SECONDS: Final = 10.0
"""So long a token that was refused is refused without asking again."""

STRANGERS: Final = 8
QUESTIONS: Final = 24
"""Questions to the API server at once, about unknown tokens and about those who are known: watching
and events share its connections."""
STRANGERS_WAITING: Final = 20
STRANGERS_SECONDS: Final = 2.0
"""So many unknown tokens of one address may wait for their review, and so long."""
QUESTIONS_WAITING: Final = 64
"""Of one user, whatever tokens they come with."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class Callers:
    """Says whose a token is, and knows what its owner may see by now.

    Args:
        client: the API server.
        settings: who may read.
        namespaces: those whose pods may have to be shown.
        monotonic: seconds since any moment.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: Api,
        *,
        namespaces: Callable[[], frozenset[str]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = settings
        self._namespaces = namespaces
        self._monotonic = monotonic
        self._callers: OrderedDict[bytes, Caller] = OrderedDict()
        self._refused: Recent[tuple[float, str]] = Recent(MOST_REFUSED)
        self._seldom = Seldom(monotonic=monotonic)
        self._strangers = Turns(
            at_once=STRANGERS,
            waiting_each=STRANGERS_WAITING,
            wait_seconds=STRANGERS_SECONDS,
            per_second=settings.reviews_per_second,
        )
        self._questions = Turns(
            at_once=QUESTIONS,
            waiting_each=QUESTIONS_WAITING,
            wait_seconds=settings.review_timeout_seconds,
        )

    async def admit(self, token: str, address: str) -> Caller:
        """Return whose a token is, with what they may see by now.

        Args:
            token: what was shown.
            address: where it came from.

        Raises:
            AccessError: nobody's, or not any more, or that cannot be found out now.
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
        """Return how one gets a token and shows it."""
        audience = self._settings.audience
        option = f" --audience {audience}" if audience else ""
        return (
            f"kubectl create token ACCOUNT{option} makes one; send it as Authorization: Bearer, as "
            f"{HEADER}, or once to POST {SESSION_PATH}"
        )

    def _refuse(self, key: bytes, cause: str) -> None:
        """Refuse a token for a while without asking about it again."""
        self._callers.pop(key, None)
        self._refused.put(key, (self._monotonic() + REFUSED_SECONDS, cause))

    async def _caller(self, token: str, address: str) -> Caller:
        """Return whose a token is; raises as `admit`."""
        if len(token) > MAX_TOKEN or not _TOKEN.fullmatch(token):
            raise AccessError(401, f"that is no token: {self.advice()}")
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
        """Forget the oldest token of the user who has the most."""
        names = Counter(caller.name for caller in self._callers.values())
        ((heaviest, _),) = names.most_common(1)
        del self._callers[
            next(key for key, caller in self._callers.items() if caller.name == heaviest)
        ]

    async def _meet(self, key: bytes, token: str, address: str) -> Caller:
        """Return whose a token is that was not shown before; raises as `admit`."""
        self._check_refused(key)
        try:
            async with self._strangers.of(address):
                # The same token may have come twice: what was found out meanwhile counts.
                known = self._callers.get(key)
                if known is not None:
                    return known
                self._check_refused(key)
                user = await self._review(token)
        except BusyError as error:
            raise AccessError(
                429, f"too many unknown tokens: come again in a second: {error}"
            ) from error
        except TokenRefusedError as error:
            cause = f"the API server refuses the token: {error}: {self.advice()}"
            self._refuse(key, cause)
            raise AccessError(401, cause) from error
        except KubeError as error:
            raise AccessError(503, f"cannot find out whose the token is: {error}") from error
        unlogged = self._seldom.due("reads", user.name)
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
            token_seconds=self._settings.token_seconds,
            rights_seconds=self._settings.rights_seconds,
            monotonic=self._monotonic,
        )

    def _check_refused(self, key: bytes) -> None:
        """Refuse what was refused a moment ago.

        Raises:
            AccessError: it was.
        """
        until, cause = self._refused.get(key) or (0.0, "")
        if self._monotonic() < until:
            raise AccessError(401, cause)

    async def _review(self, token: str) -> User:
        return await review_token(
            self._client,
            token,
            audience=self._settings.audience,
            timeout_seconds=self._settings.review_timeout_seconds,
        )

    async def _may_list(self, user: User, namespace: str) -> bool:
        """Return whether somebody may list a namespace's pods.

        Raises:
            KubeError: that cannot be found out.
        """
        seconds = self._settings.review_timeout_seconds
        try:
            async with self._questions.of(user.name):
                return await may_list_pods(self._client, user, namespace, timeout_seconds=seconds)
        except (BusyError, KubeError) as error:
            unlogged = self._seldom.due("rights", user.name)
            if unlogged is not None:
                logger.warning(
                    "cannot find out what a caller may read",
                    extra={"user": user.name, "cause": str(error), "also_unlogged": unlogged},
                )
            raise KubeError(str(error)) from error
