"""Verify agents' tokens: the API server reviews each token once and names its node."""

import base64
import binascii
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from extender.core.untyped import mapping_of, text_of
from extender.kube.client import KubeClient, KubeError
from extender.kube.token_review import (
    REVIEW_TIMEOUT_SECONDS,
    Recent,
    TokenRefusedError,
    User,
    WrongAudienceError,
    review_token,
    token_key,
)
from extender.runtime.decoding import decode_with
from extender.runtime.fair_queue import BusyError, FairQueue
from extender.settings.sources import Agents
from extender.sources.agents.refusal import AgentRefusal, RefusedError

NODE_NAME: Final = "authentication.kubernetes.io/node-name"
POD_NAME: Final = "authentication.kubernetes.io/pod-name"
POD_UID: Final = "authentication.kubernetes.io/pod-uid"

_ACCOUNT_PREFIX: Final = "system:serviceaccount:"

_TOKEN_SECONDS: Final = 3600.0
"""A token is reviewed again when it expires, and at least this often: a pod's projected token is
valid for an hour by default."""
_REVIEWS_PER_SECOND: Final = 200.0
"""Most token reviews, on average: all agents of 5,000 nodes come back within 25 s."""
_MAX_CACHED: Final = 20_000
_REJECTED_SECONDS: Final = 30.0
"""A refused token is refused for this long without another review."""

_PARALLEL: Final = 8
_QUEUE_SECONDS: Final = 20.0
"""Longest wait for a review; the agent is refused after it and tries again later."""
_MAX_WAITING: Final = 1000
"""Limit for waiting reviews per address; many nodes may share an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Verified identity of an agent, from its token.

    Attributes:
        node: name of the node that its pod runs on.
        expires_at: until when the token is accepted, seconds since the epoch.
        account: service account, as the API server names it.
        audience: audience of the token.
    """

    node: str
    expires_at: float
    account: str
    audience: str


class TokenReviewer:
    """Verify tokens, and cache the results.

    Args:
        settings: accepted service accounts and audience, and time limits.
        clock: seconds since the epoch.

    Attributes:
        review_count: number of reviews by the API server.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: Agents,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.review_count = 0
        self._client = client
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self._accepted: Recent[Sender] = Recent(_MAX_CACHED)
        self._rejected: Recent[tuple[float, AgentRefusal, str]] = Recent(_MAX_CACHED)
        self._fair_queue = FairQueue(
            at_once=_PARALLEL,
            waiting_each=_MAX_WAITING,
            wait_seconds=_QUEUE_SECONDS,
            per_second=_REVIEWS_PER_SECOND,
        )

    def adopt(self, settings: Agents) -> None:
        """Apply new settings; rejected tokens are reviewed again."""
        self._settings = settings
        self._rejected.clear()

    def accepts(self, sender: Sender) -> bool:
        """Return whether the settings accept the service account and audience of an agent."""
        settings = self._settings
        return sender.account in settings.usernames and sender.audience == settings.audience

    async def review(self, token: str, address: str = "") -> Sender:
        """Return the identity of a token's owner.

        Args:
            address: address of the agent; reviews are queued fairly by address.

        Raises:
            RefusedError: the token is not an agent's, or cannot be reviewed now.
        """
        key = token_key(token)
        sender = self._cached(key)
        if sender is not None:
            return sender
        claims = _claims_of(token)
        self._check_claims(claims)
        try:
            async with self._fair_queue.of(address):
                sender = await self._review(token, claims)
        except BusyError as error:
            text = f"too many tokens are under review: try again later: {error}"
            raise RefusedError(AgentRefusal.BUSY, text) from error
        except RefusedError as error:
            if error.refusal is not AgentRefusal.NOT_REVIEWED:
                # Not the error: its traceback would keep the token in memory.
                until = self._monotonic() + _REJECTED_SECONDS
                self._rejected.put(key, (until, error.refusal, str(error)))
            raise
        self._accepted.put(key, sender)
        return sender

    def _cached(self, key: bytes) -> Sender | None:
        """Return the cached identity of a token's owner, None if there is none."""
        sender = self._accepted.get(key)
        if sender is not None and sender.expires_at > self._clock() and self.accepts(sender):
            return sender
        rejected = self._rejected.get(key)
        if rejected is not None and self._monotonic() < rejected[0]:
            raise RefusedError(*rejected[1:])
        return None

    def _check_claims(self, claims: Mapping[str, object]) -> None:
        """Refuse a token whose own claims are wrong, without a request to the API server.

        The claims are not trusted: the API server reviews every token that passes.
        """
        if not claims:
            return
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        if self._settings.audience not in audiences:
            raise _wrong_audience(self._settings.audience)
        subject = text_of(claims.get("sub"))
        if subject not in self._settings.usernames:
            raise _wrong_account(subject)
        expires_at = claims.get("exp")
        if isinstance(expires_at, int | float) and expires_at <= self._clock():
            raise RefusedError(AgentRefusal.EXPIRED, "the token has expired: read it again")

    async def _review(self, token: str, claims: Mapping[str, object]) -> Sender:
        """Return the identity of a token's owner according to the API server."""
        self.review_count += 1
        audience = self._settings.audience
        try:
            user = await review_token(
                self._client, token, audience=audience, timeout_seconds=REVIEW_TIMEOUT_SECONDS
            )
        except WrongAudienceError as error:
            raise _wrong_audience(audience) from error
        except TokenRefusedError as error:
            text = f"the API server refuses the token: {error}"
            raise RefusedError(AgentRefusal.BAD_TOKEN, text) from error
        except KubeError as error:
            raise RefusedError(
                AgentRefusal.NOT_REVIEWED, f"cannot review the token: {error}"
            ) from error
        if user.name not in self._settings.usernames:
            raise _wrong_account(user.name)
        until = self._clock() + _TOKEN_SECONDS
        expires_at = claims.get("exp")
        if isinstance(expires_at, int | float):
            until = min(until, float(expires_at))
        node = await self._node_of(user)
        return Sender(node=node, expires_at=until, account=user.name, audience=audience)

    async def _node_of(self, user: User) -> str:
        """Return the node that a token is bound to, directly or through its pod."""
        node = _single_value(user, NODE_NAME)
        if node:
            return node
        pod = _single_value(user, POD_NAME)
        if not pod:
            raise RefusedError(
                AgentRefusal.NOT_BOUND,
                "the token is not bound to a pod: mount a projected service-account token",
            )
        namespace = user.name.removeprefix(_ACCOUNT_PREFIX).partition(":")[0]
        found = await self._pod(namespace, pod)
        uid = text_of(mapping_of(found.get("metadata")).get("uid"))
        node = text_of(mapping_of(found.get("spec")).get("nodeName"))
        if not node or uid != _single_value(user, POD_UID):
            raise RefusedError(
                AgentRefusal.NOT_BOUND, f"the token's pod {namespace}/{pod} is not on a node"
            )
        return node

    async def _pod(self, namespace: str, pod: str) -> Mapping[str, object]:
        try:
            found = await self._client.find(
                f"/api/v1/namespaces/{namespace}/pods/{pod}",
                action="get pods",
                timeout_seconds=REVIEW_TIMEOUT_SECONDS,
            )
            return found or {}
        except KubeError as error:
            raise RefusedError(
                AgentRefusal.NOT_REVIEWED, f"cannot find the node of the token's pod: {error}"
            ) from error


def _claims_of(token: str) -> Mapping[str, object]:
    """Return the claims of a JSON web token, {} if it is not one."""
    parts = token.split(".")
    if len(parts) != 3:  # noqa: PLR2004 - header, claims, signature
        return {}
    try:
        content = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return mapping_of(decode_with(orjson.loads, content))
    except (binascii.Error, ValueError):
        return {}


def _single_value(user: User, name: str) -> str:
    """Return the only value of a name, "" if there are none or several."""
    values = user.extra.get(name, ())
    return values[0] if len(values) == 1 else ""


def _wrong_audience(audience: str) -> RefusedError:
    return RefusedError(
        AgentRefusal.WRONG_AUDIENCE,
        f"the token is not for {audience!r}: set this as audience of the projected token",
    )


def _wrong_account(name: str) -> RefusedError:
    return RefusedError(
        AgentRefusal.WRONG_ACCOUNT,
        f"the token belongs to {name[:200]!r}, which is not in agents.service_accounts",
    )
