"""Who may read the API: the API server says whose a token is, and which pods its owner may read."""

import asyncio
import hashlib
import ipaddress
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Final

import orjson
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import Counter

from extender.config import Settings
from extender.core.untyped import mapping_of, text_of
from extender.fleet.fleet import Fleet
from extender.kube import KubeClient, KubeError
from extender.observe.answers import NOT_KEPT, error_answer, json_answer
from extender.observe.caller import Caller
from extender.observe.seen import SEES_ALL, VIEWER, AccessError, Viewer
from extender.placement.history import DecisionHistory
from extender.reviews import TokenRefusedError, User, may_list_pods, review_token
from extender.settings.api import Api
from extender.settings.tls import is_loopback

logger = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""What says nothing of pods, and is asked by kubelet and Prometheus, which have no token."""

PAGE_FILES: Final = ("/", "/page", "/page/")
"""The page's own files: the same for everybody, and empty without the API."""

SESSION_PATH: Final = "/v1/session"
COOKIE: Final = "idlegpu-token"
HEADER: Final = "X-Idlegpu-Token"
"""A token here passes the API server's proxy, which keeps Authorization to itself."""

MAX_TOKEN: Final = 8192
MAX_COOKIE: Final = 3800
"""Browsers keep no longer one."""
MAX_BODY: Final = 16 << 10

MOST_CALLERS: Final = 1000
MOST_QUESTIONS: Final = 32
"""To the API server at once, for all callers: watching and events share its connections."""
MOST_REFUSED: Final = 10_000
REFUSED_SECONDS: Final = 10.0
"""So long a token that was refused is refused without asking again."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class Outcome(StrEnum):
    """What became of a question, for metrics."""

    ADMITTED = "admitted"
    OPEN = "open"
    """Nobody needs a token here, or it came through the API server's proxy."""
    NO_TOKEN = "no-token"  # noqa: S105 - the word
    REFUSED = "refused"
    BUSY = "busy"
    UNKNOWN = "unknown"
    """The API server did not answer."""


_OUTCOMES: Final = {401: Outcome.REFUSED, 429: Outcome.BUSY, 503: Outcome.UNKNOWN}


class Access:
    """Lets those in who may read, and says for each what they may see.

    Args:
        client: the API server.
        settings: who may read.
        is_open: whether nobody needs a token.
        namespaces: those whose pods may have to be shown.
        requests: counts by outcome.
        monotonic: seconds since any moment.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: Api,
        *,
        is_open: bool,
        namespaces: Callable[[], Collection[str]],
        requests: Counter,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = settings
        self.is_open = is_open
        self._namespaces = namespaces
        self._requests = requests
        self._monotonic = monotonic
        self._networks = settings.networks
        self._callers: OrderedDict[bytes, Caller] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._due_at = 0.0
        self._questions = asyncio.Semaphore(MOST_QUESTIONS)

    def guard(self, open_paths: Collection[str] = ()) -> Middleware:
        """Return what every question passes before it is answered, whatever its route.

        Args:
            open_paths: paths of routes, as they were added, that look after themselves, or show
                nothing that is anybody's.
        """
        free = OPEN_PATHS | frozenset(PAGE_FILES) | frozenset(open_paths)

        @web.middleware
        async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
            resource = request.match_info.route.resource
            path = "" if resource is None else resource.canonical
            is_login = path == SESSION_PATH and request.method in {hdrs.METH_POST, hdrs.METH_DELETE}
            if path in free or path.startswith(PAGE_FILES[-1]) or is_login:
                return await handler(request)
            try:
                viewer = await self._viewer(request)
            except AccessError as error:
                return _refusal(error)
            # For this answer alone: the next one on this connection may be another's.
            whose = VIEWER.set(viewer)
            try:
                return await handler(request)
            finally:
                VIEWER.reset(whose)

        return admit

    def routes(self) -> list[web.RouteDef]:
        """Return the routes by which a browser shows a token once."""
        return [
            web.get(SESSION_PATH, self._tell),
            web.post(SESSION_PATH, self._log_in),
            web.delete(SESSION_PATH, self._log_out),
        ]

    async def _viewer(self, request: web.Request) -> Viewer:
        """Return who asks.

        Raises:
            AccessError: nobody who may.
        """
        token = token_of(request.headers, request.cookies)
        if self.is_open or (not token and self._is_proxy(request.remote)):
            self._requests.labels(Outcome.OPEN).inc()
            return SEES_ALL
        if not token:
            self._requests.labels(Outcome.NO_TOKEN).inc()
            raise AccessError(401, f"there is no token: {self._advice()}")
        try:
            caller = await self._admit(token)
        except AccessError as error:
            self._requests.labels(_OUTCOMES[error.status]).inc()
            raise
        self._requests.labels(Outcome.ADMITTED).inc()
        return caller

    def _is_proxy(self, remote: str | None) -> bool:
        """Whether somebody comes from where the API server's proxy does."""
        try:
            address = ipaddress.ip_address(remote or "")
        except ValueError:
            return False
        plain = getattr(address, "ipv4_mapped", None) or address
        return any(plain in network for network in self._networks)

    async def _admit(self, token: str) -> Caller:
        """Return whose a token is, with what they may see by now.

        Raises:
            AccessError: nobody's, or not any more, or that cannot be found out now.
        """
        caller = await self._caller(token)
        try:
            await caller.renew()
        except AccessError as error:
            if error.status == 401:  # noqa: PLR2004 - HTTP's UNAUTHORIZED
                self._refuse(_key(token), str(error))
            raise
        return caller

    def _refuse(self, key: bytes, cause: str) -> None:
        """Refuse a token for a while without asking about it again."""
        self._callers.pop(key, None)
        self._refused[key] = (self._monotonic() + REFUSED_SECONDS, cause)
        self._refused.move_to_end(key)
        if len(self._refused) > MOST_REFUSED:
            self._refused.popitem(last=False)

    async def _caller(self, token: str) -> Caller:
        """Return whose a token is.

        Raises:
            AccessError: nobody's, or that cannot be found out now.
        """
        if len(token) > MAX_TOKEN or not _TOKEN.fullmatch(token):
            raise AccessError(401, f"that is no token: {self._advice()}")
        key = _key(token)
        caller = self._callers.get(key)
        if caller is None:
            caller = await self._meet(key, token)
        self._callers[key] = caller
        self._callers.move_to_end(key)
        if len(self._callers) > MOST_CALLERS:
            self._callers.popitem(last=False)
        return caller

    async def _meet(self, key: bytes, token: str) -> Caller:
        """Return whose a token is that was not shown before.

        Raises:
            AccessError: nobody's, or that cannot be found out now.
        """
        until, cause = self._refused.get(key, (0.0, ""))
        now = self._monotonic()
        if now < until:
            raise AccessError(401, cause)
        if self._due_at > now:
            raise AccessError(429, "too many unknown tokens: come again in a second")
        # A burst of one second's worth, then one after the other.
        rate = self._settings.reviews_per_second
        self._due_at = max(self._due_at + 1.0 / rate, now - 1.0 + 1.0 / rate)
        timeout_seconds = self._settings.review_timeout_seconds
        audience = self._settings.audience

        async def review() -> User:
            async with self._questions:
                return await review_token(
                    self._client, token, audience=audience, timeout_seconds=timeout_seconds
                )

        try:
            user = await review()
        except TokenRefusedError as error:
            cause = f"the API server refuses the token: {error}: {self._advice()}"
            self._refuse(key, cause)
            raise AccessError(401, cause) from error
        except KubeError as error:
            raise AccessError(503, f"cannot find out whose the token is: {error}") from error
        logger.info("reads the API", extra={"user": user.name})

        async def may_list(whose: User, namespace: str) -> bool:
            async with self._questions:
                return await may_list_pods(
                    self._client, whose, namespace, timeout_seconds=timeout_seconds
                )

        return Caller(
            user,
            review=review,
            may_list=may_list,
            namespaces=self._namespaces,
            token_seconds=self._settings.token_seconds,
            rights_seconds=self._settings.rights_seconds,
            monotonic=self._monotonic,
        )

    def _advice(self) -> str:
        audience = self._settings.audience
        option = f" --audience {audience}" if audience else ""
        return (
            f"kubectl create token ACCOUNT{option} makes one; send it as Authorization: Bearer, as "
            f"{HEADER}, or once to POST {SESSION_PATH}"
        )

    async def _tell(self, _: web.Request) -> web.StreamResponse:
        """Say who asks, and what they see."""
        viewer = VIEWER.get()
        if not isinstance(viewer, Caller):
            return json_answer({"user": None, "sees_all": viewer.sees(""), "namespaces": []})
        return json_answer(
            {
                "user": viewer.user.name,
                "sees_all": viewer.sees_all,
                "namespaces": viewer.seen_namespaces(),
            }
        )

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        """Take a token from a browser, and have it shown by the browser from now on.

        Only JSON is taken: another site's page cannot send it without our leave.
        """
        if request.content_type != "application/json":
            return error_answer(415, 'send {"token": "..."} as application/json')
        body = bytearray()
        async for part in request.content.iter_any():
            body += part
            if len(body) > MAX_BODY:
                return error_answer(413, f"the body is larger than {MAX_BODY} bytes")
        try:
            token = text_of(mapping_of(orjson.loads(body)).get("token")).strip()
        except orjson.JSONDecodeError:
            return error_answer(400, 'the body is no JSON: send {"token": "..."}')
        if len(token) > MAX_COOKIE:
            return error_answer(
                400, f"the token is longer than {MAX_COOKIE} bytes, which no browser keeps"
            )
        if not self.is_open:
            try:
                await self._admit(token)
            except AccessError as error:
                return _refusal(error)
        response = web.Response(status=204, headers=NOT_KEPT)
        if not self.is_open:
            _set_cookie(request, response, token)
        return response

    async def _log_out(self, request: web.Request) -> web.StreamResponse:
        """Have the browser forget the token."""
        response = web.Response(status=204, headers=NOT_KEPT)
        _set_cookie(request, response, "")
        return response


def make_access(
    client: KubeClient,
    settings: Settings,
    fleet: Fleet,
    history: DecisionHistory,
    requests: Counter,
) -> Access:
    """Return who may read the API as it is served by the settings; say so where all may."""
    host, port = settings.status_address
    is_open = settings.api.is_open(host)
    if is_open and not is_loopback(host):
        logger.warning(
            "the API is open: whoever reaches it sees all pods; api.access: token asks who it is",
            extra={"address": f"{host}:{port}"},
        )

    def namespaces() -> set[str]:
        pods = {pod.namespace for pod in fleet.pods.values()}
        return pods | {record.pod.namespace for record in history}

    return Access(client, settings.api, is_open=is_open, namespaces=namespaces, requests=requests)


def token_of(headers: Mapping[str, str], cookies: Mapping[str, str]) -> str:
    """Return the token that is shown, "" where there is none; a header comes before a cookie."""
    scheme, _, token = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get(HEADER, "").strip() or cookies.get(COOKIE, "")


def _key(token: str) -> bytes:
    """Return under what a token is remembered: not the token itself."""
    return hashlib.sha256(token.encode()).digest()


def _set_cookie(request: web.Request, response: web.Response, token: str) -> None:
    """Have a token shown from now on, by this site's own pages alone; "" for no longer.

    Without a path the browser takes that of the request, up to its last slash: what is under /v1,
    and behind a proxy nothing else that it leads to.
    """
    response.set_cookie(
        COOKIE,
        token,
        max_age=None if token else 0,
        httponly=True,
        samesite="Strict",
        secure=request.secure,
    )
    response.cookies[COOKIE]["path"] = ""


def _refusal(error: AccessError) -> web.Response:
    response = error_answer(error.status, str(error))
    if error.status == 401:  # noqa: PLR2004 - HTTP's UNAUTHORIZED
        response.headers[hdrs.WWW_AUTHENTICATE] = 'Bearer realm="idlegpu"'
    return response
