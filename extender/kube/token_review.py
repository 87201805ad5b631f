"""Authenticate a token through the API server, and check whether its user may list pods."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from extender.core.untyped import items_of, mapping_of, text_of
from extender.kube.client import KubeClient, parse_object

_TOKENS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_REVIEW_TOKENS: Final = "create tokenreviews.authentication.k8s.io"
_REVIEW_ACCESS: Final = "create subjectaccessreviews.authorization.k8s.io"

ALL_NAMESPACES: Final = ""

REVIEW_TIMEOUT_SECONDS: Final = 5.0
"""Limit for one review: an API server that works answers within milliseconds."""

_Value = TypeVar("_Value")


class TokenRefusedError(ValueError):
    """The API server does not accept a token; the message says why."""


class WrongAudienceError(TokenRefusedError):
    """The API server accepts the token, but for another audience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """The user that the API server found for a token.

    Attributes:
        name: user name.
        uid: user UID, "" if there is none.
        groups: groups of the user.
        extra: further attributes by which the API server authorizes.
    """

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


async def review_token(
    client: KubeClient, token: str, *, audience: str, timeout_seconds: float
) -> User:
    """Send a TokenReview, and return the user of the token.

    Args:
        audience: the required audience, or "" for the API server itself.
        timeout_seconds: limit for the answer.

    Raises:
        TokenRefusedError: the API server does not accept the token.
        WrongAudienceError: the token is for another audience.
        KubeError: the request failed or was refused.
    """
    spec: dict[str, object] = {"token": token}
    if audience:
        spec["audiences"] = [audience]
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
    answer = await client.send(
        "POST", _TOKENS, body, action=_REVIEW_TOKENS, timeout_seconds=timeout_seconds
    )
    status = mapping_of(parse_object(answer, _REVIEW_TOKENS).get("status"))
    if status.get("authenticated") is not True:
        raise TokenRefusedError(text_of(status.get("error")) or "no such token")
    # An authenticator without audience support returns none, so the audience is unknown.
    if audience and audience not in items_of(status.get("audiences")):
        raise WrongAudienceError(f"it is not for {audience!r}")
    user = mapping_of(status.get("user"))
    return User(
        name=text_of(user.get("username")),
        uid=text_of(user.get("uid")),
        groups=_texts(user.get("groups")),
        extra={name: _texts(values) for name, values in mapping_of(user.get("extra")).items()},
    )


async def may_list_pods(
    client: KubeClient, user: User, namespace: str, *, timeout_seconds: float
) -> bool:
    """Return whether a user may list the pods of a namespace, or of `ALL_NAMESPACES`.

    Raises:
        KubeError: the request failed or was refused.
    """
    spec: dict[str, object] = {
        "user": user.name,
        "uid": user.uid,
        "groups": list(user.groups),
        "extra": {name: list(values) for name, values in user.extra.items()},
        "resourceAttributes": {"namespace": namespace, "verb": "list", "resource": "pods"},
    }
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = await client.send(
        "POST", _ACCESS, body, action=_REVIEW_ACCESS, timeout_seconds=timeout_seconds
    )
    status = mapping_of(parse_object(answer, _REVIEW_ACCESS).get("status"))
    return status.get("allowed") is True and status.get("denied") is not True


def token_key(token: str) -> bytes:
    """Hash a token, so that a cache does not hold the token itself."""
    return hashlib.sha256(token.encode()).digest()


class Recent(Generic[_Value]):
    """Cache of values by token hash; a full cache drops the value that was stored first.

    Args:
        most: maximum number of entries.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[bytes, _Value] = OrderedDict()

    def get(self, key: bytes) -> _Value | None:
        """Return the cached value of a token hash, or None."""
        return self._values.get(key)

    def put(self, key: bytes, value: _Value) -> None:
        """Store a value, and drop the oldest one if the cache is full."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Remove all entries."""
        self._values.clear()


def _texts(values: object) -> tuple[str, ...]:
    return tuple(value for value in items_of(values) if isinstance(value, str))
