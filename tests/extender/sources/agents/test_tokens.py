"""Test what a token's own claims decide, and for how long a review counts."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import orjson
import pytest

from extender.kube.client import KubeClient, KubeError
from extender.kube.token_review import TokenRefusedError, User, WrongAudienceError
from extender.settings.sources import Agents
from extender.sources.agents import tokens
from extender.sources.agents.refusal import AgentRefusal, RefusedError
from extender.sources.agents.tokens import NODE_NAME, POD_NAME, POD_UID, TokenReviewer
from testkit.fake_kube import FakeKube, running_kube

NOW: Final = 10_000.0
ACCOUNT: Final = "system:serviceaccount:idlegpu-agent:idlegpu-agent"
GOOD: Final[dict[str, object]] = {"aud": ["idlegpu-extender", "b"], "sub": ACCOUNT, "exp": NOW + 60}
ON_NODE: Final = {NODE_NAME: ("n",)}
IN_POD: Final = {POD_NAME: ("p",), POD_UID: ("u",)}


def token_of(claims: object) -> str:
    content = base64.urlsafe_b64encode(orjson.dumps(claims)).decode().rstrip("=")
    return f"header.{content}.signature"


class Reviews:
    """Reviews tokens in place of the API server."""

    def __init__(self) -> None:
        self.user = User(name=ACCOUNT, extra=ON_NODE)
        self.error: Exception | None = None
        self.now = NOW

    async def __call__(self, *_: object, **__: object) -> User:
        if self.error is not None:
            raise self.error
        return self.user


@pytest.fixture
def reviews(monkeypatch: pytest.MonkeyPatch) -> Reviews:
    made = Reviews()
    monkeypatch.setattr(tokens, "review_token", made)
    return made


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with running_kube() as server:
        yield server


@pytest.fixture
async def reviewer(
    kube: FakeKube, tmp_path: Path, reviews: Reviews
) -> AsyncIterator[TokenReviewer]:
    client = await KubeClient.connect(kube.write_kubeconfig(tmp_path / "kubeconfig"))
    yield TokenReviewer(client, Agents(), clock=lambda: reviews.now, monotonic=lambda: reviews.now)
    await client.close()


async def refusal(reviewer: TokenReviewer, token: str) -> AgentRefusal:
    with pytest.raises(RefusedError) as caught:
        await reviewer.review(token)
    return caught.value.refusal


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"aud": "other"}, AgentRefusal.WRONG_AUDIENCE),
        ({"aud": []}, AgentRefusal.WRONG_AUDIENCE),
        ({"sub": "system:serviceaccount:ns:other"}, AgentRefusal.WRONG_ACCOUNT),
        ({"exp": NOW}, AgentRefusal.EXPIRED),
        ({"exp": NOW - 1}, AgentRefusal.EXPIRED),
    ],
    ids=["audience", "no audience", "account", "expires now", "expired"],
)
async def test_a_token_with_a_wrong_claim_is_not_reviewed(
    reviewer: TokenReviewer, changes: dict[str, object], expected: AgentRefusal
) -> None:
    assert await refusal(reviewer, token_of({**GOOD, **changes})) is expected
    assert reviewer.review_count == 0


@pytest.mark.parametrize(
    ("token", "until"),
    [
        (token_of(GOOD), NOW + 60),
        (token_of({**GOOD, "aud": "idlegpu-extender"}), NOW + 60),
        (token_of({**GOOD, "exp": NOW + 1e6}), NOW + 3600),
        (token_of({**GOOD, "exp": "soon"}), NOW + 3600),
        (token_of([1]), NOW + 3600),
        ("a.b", NOW + 3600),
        ("a.b.c.d", NOW + 3600),
        ("a.!.c", NOW + 3600),
        ("a.YWJj.c", NOW + 3600),
    ],
    ids=["good", "audience", "long", "no time", "list", "2 parts", "4 parts", "no base64", "text"],
)
async def test_a_review_counts_until_the_token_expires_and_for_an_hour_at_most(
    reviewer: TokenReviewer, reviews: Reviews, token: str, until: float
) -> None:
    sender = await reviewer.review(token)
    assert (sender.node, sender.account, sender.expires_at) == ("n", ACCOUNT, until)

    reviews.now = until - 1
    assert await reviewer.review(token) is sender
    assert reviewer.review_count == 1
    reviews.now = until
    if until == NOW + 60:
        assert await refusal(reviewer, token) is AgentRefusal.EXPIRED
    else:
        assert await reviewer.review(token) is not sender


@pytest.mark.parametrize(
    ("error", "expected", "reviews_until_30_seconds"),
    [
        (WrongAudienceError("x"), AgentRefusal.WRONG_AUDIENCE, 1),
        (TokenRefusedError("x"), AgentRefusal.BAD_TOKEN, 1),
        (KubeError("x"), AgentRefusal.NOT_REVIEWED, 2),
    ],
    ids=["audience", "refused", "no review"],
)
async def test_a_refusal_counts_for_half_a_minute_and_a_failed_review_not_at_all(
    reviewer: TokenReviewer,
    reviews: Reviews,
    error: Exception,
    expected: AgentRefusal,
    reviews_until_30_seconds: int,
) -> None:
    reviews.error = error
    assert await refusal(reviewer, token_of(GOOD)) is expected
    reviews.now += 29.0
    assert await refusal(reviewer, token_of(GOOD)) is expected
    assert reviewer.review_count == reviews_until_30_seconds

    reviews.now, reviews.error = NOW + 30.0, None

    assert (await reviewer.review(token_of(GOOD))).node == "n"


async def test_new_settings_forget_refusals_and_check_accepted_senders_again(
    reviewer: TokenReviewer, reviews: Reviews
) -> None:
    sender = await reviewer.review(token_of(GOOD))
    assert reviewer.accepts(sender)
    reviews.error = TokenRefusedError("x")
    other = token_of({**GOOD, "jti": "other"})
    assert await refusal(reviewer, other) is AgentRefusal.BAD_TOKEN
    reviews.error = None

    reviewer.adopt(Agents(audience="b"))

    assert not reviewer.accepts(sender)
    assert (await reviewer.review(other)).audience == "b"
    reviewer.adopt(Agents(service_accounts=("ns/other",)))
    assert not reviewer.accepts(sender)


@pytest.mark.parametrize(
    ("extra", "pod", "expected"),
    [
        (ON_NODE, ("u", "other"), "n"),
        (IN_POD, ("u", "n"), "n"),
        (IN_POD, ("another", "n"), AgentRefusal.NOT_BOUND),
        (IN_POD, ("u", ""), AgentRefusal.NOT_BOUND),
        (IN_POD, None, AgentRefusal.NOT_BOUND),
        ({**IN_POD, POD_NAME: ("p", "q")}, ("u", "n"), AgentRefusal.NOT_BOUND),
        ({}, ("u", "n"), AgentRefusal.NOT_BOUND),
    ],
    ids=["node", "pod", "another pod", "no node", "gone", "two pods", "nothing"],
)
async def test_the_node_is_that_of_the_token_or_of_its_pod(
    reviewer: TokenReviewer,
    reviews: Reviews,
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, tuple[str, ...]],
    pod: tuple[str, str] | None,
    expected: str | AgentRefusal,
) -> None:
    async def find(_: KubeClient, path: str, **__: object) -> dict[str, object] | None:
        if pod is None or path != "/api/v1/namespaces/idlegpu-agent/pods/p":
            return None
        return {"metadata": {"uid": pod[0]}, "spec": {"nodeName": pod[1]}}

    monkeypatch.setattr(KubeClient, "find", find)
    reviews.user = User(name=ACCOUNT, extra=extra)

    if isinstance(expected, AgentRefusal):
        assert await refusal(reviewer, token_of(GOOD)) is expected
    else:
        assert (await reviewer.review(token_of(GOOD))).node == expected


async def test_an_account_is_checked_as_the_api_server_names_it(
    reviewer: TokenReviewer, reviews: Reviews
) -> None:
    reviews.user = User(name="system:serviceaccount:ns:other", extra=ON_NODE)

    assert await refusal(reviewer, token_of(GOOD)) is AgentRefusal.WRONG_ACCOUNT


async def test_a_refusal_names_an_account_of_any_length_in_200_characters(
    reviewer: TokenReviewer, reviews: Reviews
) -> None:
    reviews.user = User(name="a" * 5000, extra=ON_NODE)

    with pytest.raises(RefusedError, match=f" to '{'a' * 200}', "):
        await reviewer.review(token_of(GOOD))


async def test_a_pod_that_cannot_be_read_leaves_the_token_unreviewed(
    kube: FakeKube, reviewer: TokenReviewer, reviews: Reviews
) -> None:
    reviews.user = User(name=ACCOUNT, extra=IN_POD)
    await kube.stop()

    assert await refusal(reviewer, token_of(GOOD)) is AgentRefusal.NOT_REVIEWED
