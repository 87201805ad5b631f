"""Reviews of tokens and rights: what is sent, and which answers are accepted."""

import json
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from extender.kube.client import KubeClient
from extender.kube.token_review import (
    Recent,
    TokenRefusedError,
    User,
    WrongAudienceError,
    may_list_pods,
    review_token,
)

ACCEPTED = {
    "authenticated": True,
    "audiences": ["idlegpu"],
    "user": {
        "username": "ann",
        "uid": "u1",
        "groups": ["team"],
        "extra": {"scopes.example.com": ["a", "b"]},
    },
}
ANN = User(name="ann", uid="u1", groups=("team",), extra={"scopes.example.com": ("a", "b")})


@dataclass
class Answering:
    """Client of an API server with one answer."""

    status: object
    sent: list[Any] = field(default_factory=list)

    async def send(self, method: str, path: str, body: object, **_: object) -> bytes:
        self.sent.append((method, path.rpartition("/")[2], body))
        return json.dumps({"status": self.status}).encode()


async def reviewed(status: object, audience: str = "idlegpu") -> User:
    client = cast("KubeClient", Answering(status))
    return await review_token(client, "secret", audience=audience, timeout_seconds=1.0)


async def test_an_accepted_token_has_its_user() -> None:
    client = Answering(ACCEPTED)

    user = await review_token(
        cast("KubeClient", client), "secret", audience="idlegpu", timeout_seconds=1.0
    )

    assert user == ANN
    ((method, path, body),) = client.sent
    assert (method, path) == ("POST", "tokenreviews")
    assert body == {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": "secret", "audiences": ["idlegpu"]},
    }
    assert await reviewed(ACCEPTED, audience="") == ANN


@pytest.mark.parametrize("authenticated", [False, None, "true", 1])
async def test_a_token_that_is_not_authenticated_is_refused(authenticated: object) -> None:
    status = ACCEPTED | {"authenticated": authenticated}

    with pytest.raises(TokenRefusedError, match="no such token"):
        await reviewed(status)
    with pytest.raises(TokenRefusedError, match="expired"):
        await reviewed(status | {"error": "expired"})


@pytest.mark.parametrize("audiences", [["other"], [], None])
async def test_a_token_for_another_audience_is_refused(audiences: object) -> None:
    with pytest.raises(WrongAudienceError, match="it is not for 'idlegpu'"):
        await reviewed(ACCEPTED | {"audiences": audiences})


@pytest.mark.parametrize(
    ("status", "may"),
    [
        ({"allowed": True}, True),
        ({"allowed": True, "denied": True}, False),
        ({"allowed": False}, False),
        ({"allowed": "true"}, False),
        (None, False),
    ],
)
async def test_rights_are_those_of_the_api_servers_answer(status: object, *, may: bool) -> None:
    client = Answering(status)

    assert await may_list_pods(cast("KubeClient", client), ANN, "ns", timeout_seconds=1.0) is may

    ((method, path, body),) = client.sent
    assert (method, path) == ("POST", "subjectaccessreviews")
    assert body | {"spec": None} == {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": None,
    }
    assert body["spec"] == {
        "user": "ann",
        "uid": "u1",
        "groups": ["team"],
        "extra": {"scopes.example.com": ["a", "b"]},
        "resourceAttributes": {"namespace": "ns", "verb": "list", "resource": "pods"},
    }


def test_the_cache_keeps_the_latest_values() -> None:
    recent = Recent[int](2)
    for number in range(2):
        recent.put(bytes([number]), number)
    recent.put(b"\x00", 7)
    recent.put(b"\x02", 2)

    assert [recent.get(bytes([number])) for number in range(3)] == [7, None, 2]
    recent.clear()
    assert recent.get(b"\x02") is None
