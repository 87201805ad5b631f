"""Who may read the API: the API server says whose a token is, and which pods its owner may read."""

import ipaddress
import logging
import time
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from http import HTTPStatus
from operator import is_not
from typing import Final

import orjson
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import Counter

from extender.config import Settings
from extender.core.tally import Tally
from extender.core.untyped import mapping_of, text_of
from extender.decoding import MalformedError, decode_with
from extender.fleet.fleet import Fleet
from extender.kube import KubeClient
from extender.observe.answers import NOT_KEPT, error_answer, json_answer
from extender.observe.caller import Caller
from extender.observe.callers import HEADER, SESSION_PATH, Callers
from extender.observe.seen import SEES_ALL, VIEWER, AccessError, Viewer
from extender.placement.history import DecisionHistory
from extender.settings.api import Api
from extender.settings.tls import is_loopback

logger = logging.getLogger(__name__)

METRICS_PATH: Final = "/metrics"
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", METRICS_PATH})
"""What says nothing of pods, and is asked by kubelet and Prometheus, which have no token."""

PAGE_FILES: Final = ("/", "/page", "/page/")
"""The page's own files: the same for everybody, and empty without the API."""

COOKIE: Final = "idlegpu-token"

MAX_COOKIE: Final = 3800
"""Browsers keep no longer one."""
MAX_BODY: Final = 16 << 10


class Outcome(StrEnum):
    """What became of a question, for metrics."""

    ADMITTED = "admitted"
    OPEN = "open"
    """Nobody needs a token here, or it came through the API server's proxy."""
    NO_TOKEN = "no-token"  # noqa: S105 - the word
    REFUSED = "refused"
    BUSY = "busy"
    WRONG_HOST = "wrong-host"
    """It was asked under a name that somebody else may have pointed here."""
    UNKNOWN = "unknown"
    """The API server did not answer."""


LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")

_OUTCOMES: Final = {401: Outcome.REFUSED, 429: Outcome.BUSY, 503: Outcome.UNKNOWN}


class Access:
    """Lets those in who may read, and says for each what they may see.

    Args:
        client: the API server.
        settings: who may read.
        is_open: whether nobody needs a token.
        namespaces: those whose pods may have to be shown.
        requests: counts by outcome.
        hosts: names that a question must be for, lower case, where not any may be asked for; empty
            for any.
        monotonic: seconds since any moment.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: Api,
        *,
        is_open: bool,
        namespaces: Callable[[], frozenset[str]],
        requests: Counter,
        hosts: Collection[str] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_open = is_open
        self.callers = Callers(client, settings, namespaces=namespaces, monotonic=monotonic)
        self._requests = requests
        for outcome in Outcome:
            requests.labels(outcome)
        self._networks = settings.networks
        self._hosts = hosts

    def guard(self, open_paths: Collection[str] = ()) -> Middleware:
        """Return what every question passes before it is answered, whatever its route.

        Args:
            open_paths: paths of routes, as they were added, that look after themselves, or show
                nothing that is anybody's.
        """
        free = OPEN_PATHS | frozenset(PAGE_FILES) | frozenset(open_paths)
        if self._hosts:
            free -= {METRICS_PATH}  # it names nodes

        @web.middleware
        async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
            resource = request.match_info.route.resource
            path = "" if resource is None else resource.canonical
            is_login = path == SESSION_PATH and request.method in {hdrs.METH_POST, hdrs.METH_DELETE}
            if path in free or path.startswith(PAGE_FILES[-1]) or is_login:
                return await handler(request)
            if self._hosts and not _is_for(request.headers.get(hdrs.HOST), self._hosts):
                self._requests.labels(Outcome.WRONG_HOST).inc()
                return _wrong_host(request, self._hosts)
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
            raise AccessError(401, f"there is no token: {self.callers.advice()}")
        try:
            caller = await self.callers.admit(token, request.remote or "")
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
            token = text_of(mapping_of(decode_with(orjson.loads, body)).get("token")).strip()
        except MalformedError:
            return error_answer(400, 'the body is no JSON: send {"token": "..."}')
        if len(token) > MAX_COOKIE:
            return error_answer(
                400, f"the token is longer than {MAX_COOKIE} bytes, which no browser keeps"
            )
        if not self.is_open:
            try:
                await self.callers.admit(token, request.remote or "")
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

    # A site's page may not read what is on this machine, unless its name leads here: whoever has
    # the site may have it do so (DNS rebinding), and there is no token that would stop it.
    hosts = {*LOCAL_HOSTS, host, *settings.api.hosts} if is_open and is_loopback(host) else ()
    return Access(
        client,
        settings.api,
        is_open=is_open,
        namespaces=_Namespaces(fleet.namespaces, history.namespaces),
        requests=requests,
        hosts=frozenset(map(str.lower, hosts)),
    )


class _Namespaces:
    """The names of several tallies together; the same object as long as they are the same."""

    def __init__(self, *tallies: Tally) -> None:
        self._tallies = tallies
        self._parts: tuple[frozenset[str], ...] = ()
        self._names: frozenset[str] = frozenset()

    def __call__(self) -> frozenset[str]:
        parts = tuple(tally.names for tally in self._tallies)
        if any(map(is_not, parts, self._parts)) or not self._parts:
            self._parts, self._names = parts, frozenset().union(*parts)
        return self._names


def token_of(headers: Mapping[str, str], cookies: Mapping[str, str]) -> str:
    """Return the token that is shown, "" where there is none; a header comes before a cookie."""
    scheme, _, token = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get(HEADER, "").strip() or cookies.get(COOKIE, "")


def _is_for(host: str | None, hosts: Collection[str]) -> bool:
    """Tell whether a question is for one of these names, or for a loopback address.

    One that names no host is no browser's.
    """
    if host is None:
        return True
    name = _without_port(host)
    return name in hosts or (name != "localhost" and is_loopback(name))


def _without_port(host: str) -> str:
    """Return the name in a Host header, lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, colon, port = host.rpartition(":")
    is_port = bool(colon) and ":" not in name and (port.isdigit() or not port)
    return (name if is_port else host).lower().removesuffix(".")


def _wrong_host(request: web.Request, hosts: Collection[str]) -> web.Response:
    return error_answer(
        421,
        f"Host {request.headers.get(hdrs.HOST, '')[:80]!r} is not allowed here: "
        f"must be one of {', '.join(sorted(hosts))}, or be named in api.hosts",
    )


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
    if error.status == HTTPStatus.UNAUTHORIZED:
        response.headers[hdrs.WWW_AUTHENTICATE] = 'Bearer realm="idlegpu"'
    return response
