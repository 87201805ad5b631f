"""Who a token is of: the API server is asked once for each, and says on which node it was given."""

import base64
import binascii
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import orjson

from extender.core.untyped import mapping_of, text_of
from extender.kube.client import KubeClient, KubeError
from extender.kube.token_review import (
    Recent,
    TokenRefusedError,
    User,
    WrongAudienceError,
    review_token,
    token_key,
)
from extender.runtime.decoding import decode_with
from extender.runtime.fair_queue import BusyError, FairQueue
from extender.settings.agents import Agents
from extender.sources.agents.refusal import AgentRefusal, RefusedError

NODE_NAME: Final = "authentication.kubernetes.io/node-name"
POD_NAME: Final = "authentication.kubernetes.io/pod-name"
POD_UID: Final = "authentication.kubernetes.io/pod-uid"

ACCOUNT_PREFIX: Final = "system:serviceaccount:"

MOST_REMEMBERED: Final = 20_000
BAD_SECONDS: Final = 30.0
"""So long a token that was refused is refused without asking again."""

PARALLEL: Final = 8
QUEUE_SECONDS: Final = 20.0
"""Who would have to wait longer for its review comes again later."""
MOST_WAITING: Final = 1000
"""Of one address: where many nodes come from one, they come again later."""

LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Who a token is of.

    Attributes:
        node: name of the node that its pod runs on.
        expires_at: until when it may be believed, seconds since the epoch.
        account: service account, as the API server names it.
        audience: for whom it is.
    """

    node: str
    expires_at: float
    account: str
    audience: str


class TokenReviews:
    """Answers whose a token is, from memory where it can.

    Args:
        client: the API server.
        settings: which tokens are good.
        clock: seconds since the epoch.
        monotonic: seconds since any moment.

    Attributes:
        asked: reviews that the API server was asked for.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: Agents,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.asked = 0
        self._client = client
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self._good: Recent[Sender] = Recent(MOST_REMEMBERED)
        self._bad: Recent[tuple[float, RefusedError]] = Recent(MOST_REMEMBERED)
        self._fair_queue = FairQueue(
            at_once=PARALLEL,
            waiting_each=MOST_WAITING,
            wait_seconds=QUEUE_SECONDS,
            per_second=settings.reviews_per_second,
        )

    def change(self, settings: Agents) -> None:
        """Take other tokens from now on; how long a review counts changes with the next one."""
        self._settings = settings
        self._fair_queue.per_second = settings.reviews_per_second
        self._bad.clear()

    def accepts(self, sender: Sender) -> bool:
        """Tell whether such tokens are taken, by the settings as they are now."""
        settings = self._settings
        return sender.account in settings.usernames and sender.audience == settings.audience

    async def review(self, token: str, address: str = "") -> Sender:
        """Return whose a token is.

        Args:
            token: what was shown.
            address: where it came from: each has its turn.

        Raises:
            RefusedError: it is no token of an agent, or that cannot be found out now.
        """
        key = token_key(token)
        sender = self._remembered(key)
        if sender is not None:
            return sender
        claims = _claims_of(token)
        self._check_claims(claims)
        try:
            async with self._fair_queue.of(address):
                sender = await self._ask(token, claims)
        except BusyError as error:
            text = f"too many tokens are under review: come again later: {error}"
            raise RefusedError(AgentRefusal.BUSY, text) from error
        except RefusedError as error:
            if error.refusal is not AgentRefusal.NOT_REVIEWED:
                self._bad.put(key, (self._monotonic() + BAD_SECONDS, error))
            raise
        self._good.put(key, sender)
        return sender

    def _remembered(self, key: bytes) -> Sender | None:
        """Return whose a token is by what was said of it before.

        Raises:
            RefusedError: it was refused a moment ago.
        """
        sender = self._good.get(key)
        if sender is not None and sender.expires_at > self._clock() and self.accepts(sender):
            return sender
        until, error = self._bad.get(key) or (0.0, None)
        if error is not None and self._monotonic() < until:
            raise RefusedError(error.refusal, str(error))
        return None

    def _check_claims(self, claims: Mapping[str, object]) -> None:
        """Refuse what says itself that it is not for us: that costs the API server nothing.

        Nothing is believed of it: the API server is asked about what passes.

        Raises:
            RefusedError: it says so.
        """
        if not claims:
            return
        told = claims.get("aud")
        audiences = told if isinstance(told, list) else [told]
        if self._settings.audience not in audiences:
            raise _wrong_audience(self._settings.audience)
        subject = text_of(claims.get("sub"))
        if subject not in self._settings.usernames:
            raise _wrong_account(subject)
        expires_at = claims.get("exp")
        if isinstance(expires_at, int | float) and expires_at <= self._clock():
            raise RefusedError(AgentRefusal.EXPIRED, "the token has expired: read it anew")

    async def _ask(self, token: str, claims: Mapping[str, object]) -> Sender:
        """Return whose a token is, as the API server says.

        Raises:
            RefusedError: nobody's, or it is no agent's, or there is no answer.
        """
        self.asked += 1
        audience = self._settings.audience
        try:
            user = await review_token(
                self._client,
                token,
                audience=audience,
                timeout_seconds=self._settings.review_timeout_seconds,
            )
        except WrongAudienceError as error:
            raise _wrong_audience(audience) from error
        except TokenRefusedError as error:
            text = f"the API server refuses the token: {error}"
            raise RefusedError(AgentRefusal.BAD_TOKEN, text) from error
        except KubeError as error:
            raise RefusedError(
                AgentRefusal.NOT_REVIEWED, f"cannot find out whose the token is: {error}"
            ) from error
        if user.name not in self._settings.usernames:
            raise _wrong_account(user.name)
        until = self._clock() + self._settings.token_seconds
        expires_at = claims.get("exp")
        if isinstance(expires_at, int | float):
            until = min(until, float(expires_at))
        node = await self._node_of(user)
        return Sender(node=node, expires_at=until, account=user.name, audience=audience)

    async def _node_of(self, user: User) -> str:
        """Return the node that a token is bound to: by itself, else through its pod.

        Raises:
            RefusedError: to none.
        """
        node = _only(user, NODE_NAME)
        if node:
            return node
        pod = _only(user, POD_NAME)
        if not pod:
            raise RefusedError(
                AgentRefusal.NOT_BOUND,
                "the token is bound to no pod: mount a projected service-account token, which is",
            )
        namespace = user.name.removeprefix(ACCOUNT_PREFIX).partition(":")[0]
        found = await self._pod(namespace, pod)
        uid = text_of(mapping_of(found.get("metadata")).get("uid"))
        node = text_of(mapping_of(found.get("spec")).get("nodeName"))
        if not node or uid != _only(user, POD_UID):
            raise RefusedError(
                AgentRefusal.NOT_BOUND, f"the token's pod {namespace}/{pod} is on no node any more"
            )
        return node

    async def _pod(self, namespace: str, pod: str) -> Mapping[str, object]:
        try:
            return await self._client.get(
                f"/api/v1/namespaces/{namespace}/pods/{pod}",
                {},
                action="get pods",
                timeout_seconds=self._settings.review_timeout_seconds,
                limit_bytes=LIMIT_BYTES,
            )
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return {}
            raise RefusedError(
                AgentRefusal.NOT_REVIEWED, f"cannot find out on which node the token is: {error}"
            ) from error


def _claims_of(token: str) -> Mapping[str, object]:
    """Return what a JSON web token says of itself; {} where it is none."""
    parts = token.split(".")
    if len(parts) != 3:  # noqa: PLR2004 - header, claims, signature
        return {}
    try:
        content = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return mapping_of(decode_with(orjson.loads, content))
    except (binascii.Error, ValueError):
        return {}


def _only(user: User, name: str) -> str:
    """Return the one value of a name, "" where there is not exactly one."""
    values = user.extra.get(name, ())
    return values[0] if len(values) == 1 else ""


def _wrong_audience(audience: str) -> RefusedError:
    return RefusedError(
        AgentRefusal.WRONG_AUDIENCE,
        f"the token is not for {audience!r}: set that as audience of the projected token",
    )


def _wrong_account(name: str) -> RefusedError:
    return RefusedError(
        AgentRefusal.WRONG_ACCOUNT,
        f"the token is of {name[:200]!r}, which is not in agents.service_accounts",
    )
