"""Who a token is of: the API server is asked once for each, and says on which node it was given."""

import asyncio
import base64
import binascii
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import orjson

from extender.core.untyped import mapping_of, text_of
from extender.kube import KubeClient, KubeError, parse_object
from extender.settings.agents import Agents
from extender.sources.agents.refusal import Refusal, RefusedError

PATH: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
ACTION: Final = "create tokenreviews.authentication.k8s.io"

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

LIMIT_BYTES: Final = 1 << 20

Value = TypeVar("Value")


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
        self._good: OrderedDict[bytes, Sender] = OrderedDict()
        self._bad: OrderedDict[bytes, tuple[float, RefusedError]] = OrderedDict()
        self._parallel = asyncio.Semaphore(PARALLEL)
        self._due_at = 0.0

    def change(self, settings: Agents) -> None:
        """Take other tokens from now on; how long a review counts changes with the next one."""
        self._settings = settings
        self._bad.clear()

    def accepts(self, sender: Sender) -> bool:
        """Tell whether such tokens are taken, by the settings as they are now."""
        settings = self._settings
        return sender.account in settings.usernames and sender.audience == settings.audience

    async def review(self, token: str) -> Sender:
        """Return whose a token is.

        Raises:
            RefusedError: it is no token of an agent, or that cannot be found out now.
        """
        key = hashlib.sha256(token.encode()).digest()
        sender = self._remembered(key)
        if sender is not None:
            return sender
        claims = _claims_of(token)
        self._check_claims(claims)
        await self._wait_turn()
        try:
            async with self._parallel:
                sender = await self._ask(token, claims)
        except RefusedError as error:
            if error.refusal is not Refusal.NOT_REVIEWED:
                _put(self._bad, key, (self._monotonic() + BAD_SECONDS, error))
            raise
        _put(self._good, key, sender)
        return sender

    def _remembered(self, key: bytes) -> Sender | None:
        """Return whose a token is by what was said of it before.

        Raises:
            RefusedError: it was refused a moment ago.
        """
        sender = self._good.get(key)
        if sender is not None and sender.expires_at > self._clock() and self.accepts(sender):
            return sender
        until, error = self._bad.get(key, (0.0, None))
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
            raise RefusedError(Refusal.EXPIRED, "the token has expired: read it anew")

    async def _wait_turn(self) -> None:
        """Wait until another review is within the rate.

        Raises:
            RefusedError: that would take long.
        """
        now = self._monotonic()
        wait = max(self._due_at - now, 0.0)
        if wait > QUEUE_SECONDS:
            raise RefusedError(Refusal.BUSY, "too many tokens are under review: come again later")
        self._due_at = max(self._due_at, now - 1.0) + 1.0 / self._settings.reviews_per_second
        if wait:
            await asyncio.sleep(wait)

    async def _ask(self, token: str, claims: Mapping[str, object]) -> Sender:
        """Return whose a token is, as the API server says.

        Raises:
            RefusedError: nobody's, or it is no agent's, or there is no answer.
        """
        self.asked += 1
        status = await self._status(token)
        user = mapping_of(status.get("user"))
        if status.get("authenticated") is not True:
            cause = text_of(status.get("error")) or "no such token"
            raise RefusedError(Refusal.BAD_TOKEN, f"the API server refuses the token: {cause}")
        audiences, audience = status.get("audiences"), self._settings.audience
        if not isinstance(audiences, list) or audience not in audiences:
            raise _wrong_audience(audience)
        name = text_of(user.get("username"))
        if name not in self._settings.usernames:
            raise _wrong_account(name)
        until = self._clock() + self._settings.token_seconds
        expires_at = claims.get("exp")
        if isinstance(expires_at, int | float):
            until = min(until, float(expires_at))
        node = await self._node_of(user, name)
        return Sender(node=node, expires_at=until, account=name, audience=audience)

    async def _status(self, token: str) -> Mapping[str, object]:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._settings.audience]},
        }
        try:
            answer = await self._client.send(
                "POST",
                PATH,
                body,
                action=ACTION,
                timeout_seconds=self._settings.review_timeout_seconds,
            )
            return mapping_of(parse_object(answer, ACTION).get("status"))
        except KubeError as error:
            raise RefusedError(
                Refusal.NOT_REVIEWED, f"cannot find out whose the token is: {error}"
            ) from error

    async def _node_of(self, user: Mapping[str, object], name: str) -> str:
        """Return the node that a token is bound to: by itself, else through its pod.

        Raises:
            RefusedError: to none.
        """
        extra = mapping_of(user.get("extra"))
        node = _only(extra, NODE_NAME)
        if node:
            return node
        pod = _only(extra, POD_NAME)
        if not pod:
            raise RefusedError(
                Refusal.NOT_BOUND,
                "the token is bound to no pod: mount a projected service-account token, which is",
            )
        namespace = name.removeprefix(ACCOUNT_PREFIX).partition(":")[0]
        found = await self._pod(namespace, pod)
        uid = text_of(mapping_of(found.get("metadata")).get("uid"))
        node = text_of(mapping_of(found.get("spec")).get("nodeName"))
        if not node or uid != _only(extra, POD_UID):
            raise RefusedError(
                Refusal.NOT_BOUND, f"the token's pod {namespace}/{pod} is on no node any more"
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
            if error.status == 404:  # noqa: PLR2004 - HTTP's NOT FOUND
                return {}
            raise RefusedError(
                Refusal.NOT_REVIEWED, f"cannot find out on which node the token is: {error}"
            ) from error


def _claims_of(token: str) -> Mapping[str, object]:
    """Return what a JSON web token says of itself; {} where it is none."""
    parts = token.split(".")
    if len(parts) != 3:  # noqa: PLR2004 - header, claims, signature
        return {}
    try:
        content = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return mapping_of(orjson.loads(content))
    except (binascii.Error, ValueError):
        return {}


def _only(extra: Mapping[str, object], name: str) -> str:
    """Return the one value of a name, "" where there is not exactly one."""
    values = extra.get(name)
    return text_of(values[0]) if isinstance(values, list) and len(values) == 1 else ""


def _wrong_audience(audience: str) -> RefusedError:
    return RefusedError(
        Refusal.WRONG_AUDIENCE,
        f"the token is not for {audience!r}: set that as audience of the projected token",
    )


def _wrong_account(name: str) -> RefusedError:
    return RefusedError(
        Refusal.WRONG_ACCOUNT,
        f"the token is of {name[:200]!r}, which is not in agents.service_accounts",
    )


def _put(memory: OrderedDict[bytes, Value], key: bytes, value: Value) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > MOST_REMEMBERED:
        memory.popitem(last=False)
