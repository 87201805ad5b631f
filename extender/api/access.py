"""Authenticate API requests with bearer tokens, and authorize callers through the API server."""

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

from extender.answers import routes
from extender.answers.answer import Session
from extender.api.caller import HEADER, SESSION_PATH, Caller, Callers
from extender.core.untyped import mapping_of, text_of
from extender.fleet.fleet import Fleet
from extender.fleet.pods import NameCounts
from extender.kube.client import KubeClient
from extender.placement.history import DecisionHistory
from extender.runtime.decoding import MalformedError, decode_with
from extender.server.json_api import NOT_KEPT, error_answer, json_answer
from extender.server.redaction import SEES_ALL, VIEWER, AccessError, Viewer
from extender.settings.api import ApiSettings, is_loopback
from extender.settings.config import Settings

logger = logging.getLogger(__name__)

_OPEN_PATHS: Final = frozenset({routes.HEALTHZ.path, routes.READYZ.path, routes.METRICS.path})
"""Paths without pod data, which kubelet and Prometheus read without a token."""

_PAGE_PATHS: Final = frozenset({"/", "/page"})
_PAGE_FILES: Final = "/page/"
"""Redirects to the page, and the prefix of its files: the same for every caller, without data."""

COOKIE: Final = "idlegpu-token"

_MAX_COOKIE: Final = 3800
"""Longest token that browsers store in a cookie, in bytes."""
_MAX_BODY: Final = 16 << 10


class _AccessOutcome(StrEnum):
    """Result of authenticating a request, as a metric label."""

    ADMITTED = "admitted"
    OPEN = "open"
    """No token is required, or the request came through the API server's proxy."""
    NO_TOKEN = "no-token"  # noqa: S105 - a metric label
    REFUSED = "refused"
    BUSY = "busy"
    WRONG_HOST = "wrong-host"
    """The Host header names a host that is not allowed: possible DNS rebinding."""
    UNKNOWN = "unknown"
    """The API server did not answer."""


_OUTCOMES: Final = {
    401: _AccessOutcome.REFUSED,
    429: _AccessOutcome.BUSY,
    503: _AccessOutcome.UNKNOWN,
}


class Access:
    """Admits callers who may read the API, and determines which pods each may see.

    Args:
        is_open: whether requests need no token.
        namespaces: returns the namespaces whose pods may appear in answers.
        requests: counts requests by outcome.
        hosts: allowed names in the Host header besides loopback addresses, lower case; empty for
            any.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: ApiSettings,
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
        for outcome in _AccessOutcome:
            requests.labels(outcome)
        self._networks = settings.networks
        self._hosts = hosts

    def guard(self, open_paths: Collection[str] = ()) -> Middleware:
        """Return the middleware that authenticates every request before its handler runs.

        Args:
            open_paths: canonical paths of further routes that authenticate by themselves or return
                no pod data.
        """
        free = _OPEN_PATHS | _PAGE_PATHS | frozenset(open_paths)
        if self._hosts:
            free -= {routes.METRICS.path}  # it names nodes

        @web.middleware
        async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
            resource = request.match_info.route.resource
            path = "" if resource is None else resource.canonical
            is_login = path == SESSION_PATH and request.method in {hdrs.METH_POST, hdrs.METH_DELETE}
            if path in free or path.startswith(_PAGE_FILES) or is_login:
                return await handler(request)
            if self._hosts and not _is_for(request.headers.get(hdrs.HOST), self._hosts):
                self._requests.labels(_AccessOutcome.WRONG_HOST).inc()
                return _wrong_host(request, self._hosts)
            try:
                viewer = await self._viewer(request)
            except AccessError as error:
                return _refusal(error)
            # Reset afterwards: the next request on this connection may have another caller.
            previous = VIEWER.set(viewer)
            try:
                return await handler(request)
            finally:
                VIEWER.reset(previous)

        return admit

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for a browser's session: read, log in, log out."""
        return [
            web.get(SESSION_PATH, self._show_session),
            web.post(SESSION_PATH, self._log_in),
            web.delete(SESSION_PATH, self._log_out),
        ]

    async def _viewer(self, request: web.Request) -> Viewer:
        """Authenticate a request and return its caller."""
        token = _token_of(request.headers, request.cookies)
        if self.is_open or (not token and self._is_proxy(request.remote)):
            self._requests.labels(_AccessOutcome.OPEN).inc()
            return SEES_ALL
        if not token:
            self._requests.labels(_AccessOutcome.NO_TOKEN).inc()
            raise AccessError(401, f"there is no token: {self.callers.advice()}")
        try:
            caller = await self.callers.admit(token, request.remote)
        except AccessError as error:
            self._requests.labels(_OUTCOMES[error.status]).inc()
            raise
        self._requests.labels(_AccessOutcome.ADMITTED).inc()
        return caller

    def _is_proxy(self, remote: str | None) -> bool:
        """Check whether an address is in the networks of the API server's proxy."""
        try:
            address = ipaddress.ip_address(remote or "")
        except ValueError:
            return False
        plain = getattr(address, "ipv4_mapped", None) or address
        return any(plain in network for network in self._networks)

    async def _show_session(self, _: web.Request) -> web.StreamResponse:
        """Return the caller's user name and visible namespaces."""
        viewer = VIEWER.get()
        if not isinstance(viewer, Caller):
            return json_answer(Session(user=None, sees_all=viewer.sees(""), namespaces=[]))
        return json_answer(
            Session(
                user=viewer.user.name, sees_all=viewer.sees_all, namespaces=viewer.seen_namespaces()
            )
        )

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        """Store a token in a cookie, so that the browser sends it with each request.

        Only JSON is accepted: another site's page cannot send that without a CORS preflight.
        """
        if request.content_type != "application/json":
            return error_answer(415, 'send {"token": "..."} as application/json')
        body = bytearray()
        async for part in request.content.iter_any():
            body += part
            if len(body) > _MAX_BODY:
                return error_answer(413, f"the body is larger than {_MAX_BODY} bytes")
        try:
            token = text_of(mapping_of(decode_with(orjson.loads, body)).get("token")).strip()
        except MalformedError:
            return error_answer(400, 'the body is not JSON: send {"token": "..."}')
        if len(token) > _MAX_COOKIE:
            return error_answer(
                400, f"the token is longer than {_MAX_COOKIE} bytes, which no browser stores"
            )
        if not self.is_open:
            try:
                await self.callers.admit(token, request.remote)
            except AccessError as error:
                return _refusal(error)
        response = web.Response(status=204, headers=NOT_KEPT)
        if not self.is_open:
            _set_cookie(request, response, token)
        return response

    async def _log_out(self, request: web.Request) -> web.StreamResponse:
        """Delete the token's cookie."""
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
    """Build the API's access control from the settings; warn if the API is open to the network."""
    host, port = settings.status_address
    is_open = settings.api.is_open(host)
    if is_open and not is_loopback(host):
        logger.warning(
            "the API is open: every client sees all pods; set api.access: token to require tokens",
            extra={"address": f"{host}:{port}"},
        )

    # DNS rebinding: a web site can point its own name at this machine, and its page could then read
    # an open API on a loopback address. Checking the Host header prevents that.
    hosts = ("localhost", *settings.api.hosts) if is_open and is_loopback(host) else ()
    return Access(
        client,
        settings.api,
        is_open=is_open,
        namespaces=_Namespaces(fleet.namespaces, history.namespaces),
        requests=requests,
        hosts=frozenset(map(str.lower, hosts)),
    )


class _Namespaces:
    """Union of several sets of counted names; the same object until a name is added or removed."""

    def __init__(self, *tallies: NameCounts) -> None:
        self._tallies = tallies
        self._parts: tuple[frozenset[str], ...] = ()
        self._names: frozenset[str] = frozenset()

    def __call__(self) -> frozenset[str]:
        parts = tuple(tally.names for tally in self._tallies)
        if any(map(is_not, parts, self._parts)) or not self._parts:
            self._parts, self._names = parts, frozenset().union(*parts)
        return self._names


def _token_of(headers: Mapping[str, str], cookies: Mapping[str, str]) -> str:
    """Return the request's token, "" if there is none; a header overrides a cookie."""
    scheme, _, token = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get(HEADER, "").strip() or cookies.get(COOKIE, "")


def _is_for(host: str | None, hosts: Collection[str]) -> bool:
    """Check whether a Host header names one of the hosts or a loopback address.

    A request without the header does not come from a browser, and is allowed.
    """
    if host is None:
        return True
    name = _without_port(host)
    return name in hosts or is_loopback(name)


def _without_port(host: str) -> str:
    """Return a Host header's name in lower case, without port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, colon, port = host.rpartition(":")
    is_port = bool(colon) and ":" not in name and (port.isdigit() or not port)
    return (name if is_port else host).lower().removesuffix(".")


def _wrong_host(request: web.Request, hosts: Collection[str]) -> web.Response:
    return error_answer(
        421,
        f"Host {request.headers.get(hdrs.HOST, '')[:80]!r} is not allowed here: "
        f"must be {', '.join(sorted(hosts))} or a loopback address, or be named in api.hosts",
    )


def _set_cookie(request: web.Request, response: web.Response, token: str) -> None:
    """Set the token's cookie for this site's own pages; "" deletes it.

    The path is omitted: the browser then derives it from the request, so that behind a proxy it
    covers only the extender's /v1.
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
