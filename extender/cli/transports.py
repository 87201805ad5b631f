"""Send requests to an HTTP server, and explain its failures."""

import copy
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlencode, urlsplit

import msgspec
import urllib3

from extender.runtime.decoding import MalformedError, decode_with
from extender.runtime.terminal_escapes import escape_text


class Failure(Enum):
    """Kind of a failure; its value is the exit status of the command line."""

    NOT_FOUND = 1
    """The requested thing does not exist, no node is suitable, or the doctor finds an error."""
    BAD_REQUEST = 2
    """The request is invalid: a parameter, a manifest, a setting of the client."""
    UNREACHABLE = 3
    """The server does not answer in time, or the doctor could check nothing. Before Kubernetes 1.37
    a missing Service gives status 1."""
    REFUSED = 4
    """The caller has no right to it."""
    FAULT = 5
    """The answer is malformed, or reports an error of the server."""


class ClientError(Exception):
    """A request to the extender or to the API server failed or was refused.

    The message may quote a server, so control characters in it are escaped.

    Attributes:
        failure: kind of the failure.
    """

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(escape_text(message))
        self.failure = failure


def cause_of(error: Exception) -> str:
    """Return an error's message on one line, without the number and path of a file's error."""
    cause = error.strerror if isinstance(error, OSError) else None
    return " ".join((cause or str(error)).split())


Params = Mapping[str, str]

_CONNECT_SECONDS: Final = 5.0
_SHOWN: Final = 300
"""Maximum number of characters of an unknown answer that an error message quotes."""

_ROUTE: Final = re.compile(r" \(GET /[^)]*\)")
"""Routes that an error message names for programs."""

_ERRNO: Final = re.compile(r"^\[Errno -?[0-9]+\] ")
_PAGE: Final = re.compile(r"/page(?:[/?#].*)?$")

_READY: Final = ("is not ready", "`kubectl get pods -n idlegpu` shows its pods")
_EXTENDER: Final = {
    401: ("wants a valid token", "give one with --token or --token-file (IDLEGPU_TOKEN)"),
    403: ("refuses this", "docs/api.md says which rights a caller needs"),
    429: ("has too many requests", "try again in a minute"),
    502: _READY,
    503: _READY,
    504: _READY,
}
"""Meaning of the extender's statuses, and the remedies."""

_API_SERVER: Final = {
    401: ("refuses the credentials of the kubeconfig", "log in again, as for kubectl"),
    403: ("refuses this", "ask the cluster's administrator for this right"),
    503: ("reaches no extender", "`kubectl get pods -n idlegpu` shows its pods"),
}
"""Meaning of the API server's statuses, and the remedies."""

_FAILED: Final = ("fails", "its log says why")

_ANOTHER: Final = "is not idlegpu's API: as installed, it is on port 8889 (docs/command-line.md)"
"""Message for an answer that neither idlegpu nor the API server gives."""

_FAILURES: Final = {
    400: Failure.BAD_REQUEST,
    401: Failure.REFUSED,
    403: Failure.REFUSED,
    404: Failure.NOT_FOUND,
    409: Failure.BAD_REQUEST,
    413: Failure.BAD_REQUEST,
    422: Failure.BAD_REQUEST,
    429: Failure.REFUSED,
    502: Failure.UNREACHABLE,
    503: Failure.UNREACHABLE,
    504: Failure.UNREACHABLE,
}


class Transport(Protocol):
    """Sends requests to the extender."""

    def request(
        self, method: str, path: str, params: Params | None = None, body: bytes | None = None
    ) -> bytes:
        """Send a request and return the body of the answer.

        Raises:
            ClientError: the request failed or was refused.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Credentials and TLS settings for a server.

    Attributes:
        headers: headers of every request.
        ca_file: CA of the server's certificate, None for the CAs of this machine.
        cert_file: client certificate, None for none.
        key_file: key of the client certificate, None for none.
        verifies: whether to verify the server's certificate.
        server_name: name in the server's certificate, None for the URL's host.
        timeout_seconds: limit for one answer.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verifies: bool = True
    server_name: str | None = None
    timeout_seconds: float = 30.0


class UrlTransport:
    """Sends requests to the server at a URL.

    Args:
        url: base URL, `http://` or `https://`.
        login: credentials and TLS settings.
        if_unreachable: remedy if the server does not answer.

    Raises:
        ClientError: the URL is invalid, or a file of the login is missing.
    """

    def __init__(self, url: str, login: Login, *, if_unreachable: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ClientError(
                f"url {url!r} is not allowed: must be like https://localhost:8889",
                Failure.BAD_REQUEST,
            )
        self.url = url.rstrip("/")
        self._if_unreachable = if_unreachable
        self._connect_seconds = min(_CONNECT_SECONDS, login.timeout_seconds)
        self._headers = dict(login.headers)
        self._pool = urllib3.PoolManager(
            num_pools=2,
            retries=False,
            timeout=urllib3.Timeout(connect=self._connect_seconds, read=login.timeout_seconds),
            **_tls(parts.scheme, login),
        )

    def with_headers(self, headers: Mapping[str, str]) -> "UrlTransport":
        """Return a copy of this transport with additional headers."""
        copied = copy.copy(self)
        copied._headers = {**self._headers, **headers}  # noqa: SLF001 - our own
        return copied

    def request(
        self, method: str, path: str, params: Params | None = None, body: bytes | None = None
    ) -> bytes:
        """Send a request and return the body of the answer.

        Raises:
            ClientError: the request failed or was refused.
        """
        query = f"?{urlencode(params)}" if params else ""
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        try:
            response = self._pool.request(
                method, f"{self.url}{path}{query}", body=body, headers=headers
            )
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            cause = self._cause(error)
            raise ClientError(
                f"cannot reach {self.url}: {cause}; {self._if_unreachable}", _kind(error)
            ) from error
        if response.status >= HTTPStatus.MULTIPLE_CHOICES:
            failure = _FAILURES.get(response.status, Failure.FAULT)
            said = _said(response.data)
            # An error in the request says nothing about the server: leave its address out.
            is_request = failure in {Failure.NOT_FOUND, Failure.BAD_REQUEST}
            if said and is_request:
                raise ClientError(_ROUTE.sub("", said), failure)
            if failure is Failure.NOT_FOUND or response.status < HTTPStatus.BAD_REQUEST:
                raise ClientError(f"{self.url} {_ANOTHER}", Failure.FAULT)
            raise ClientError(self._explain(response), failure)
        return response.data

    def _cause(self, error: BaseException) -> str:
        """Return the reason why the server cannot be reached, in a few words."""
        is_late = isinstance(error, urllib3.exceptions.ConnectTimeoutError)
        if is_late and not isinstance(error, urllib3.exceptions.NewConnectionError):
            return f"no connection within {self._connect_seconds:g} s"
        if isinstance(error, urllib3.exceptions.ReadTimeoutError):
            return "no answer in time (--timeout sets how long)"
        if isinstance(error, urllib3.exceptions.NameResolutionError):
            return "its host name cannot be resolved"
        if isinstance(error, urllib3.exceptions.NewConnectionError):
            return _ERRNO.sub("", str(error).rpartition(": ")[2])
        for each in error.args:
            if why := _tls_cause(each):
                return why
        if any(isinstance(each, ConnectionResetError) for each in error.args):
            hint = " (use https:// if it speaks TLS)" if self.url.startswith("http:") else ""
            return f"it closes the connection{hint}"
        text = str(error.__cause__ or error)
        text = text.partition(">: ")[2] or text
        return " ".join(text.split())[:_SHOWN] or type(error).__name__

    def _explain(self, response: urllib3.BaseHTTPResponse) -> str:
        """Return the meaning of a server's error, and the remedy."""
        text = _said(response.data) or " ".join(response.data.decode(errors="replace").split())
        words = _API_SERVER if _is_status(response.data) else _EXTENDER
        means, remedy = words.get(response.status, _FAILED)
        said = f": {text[:_SHOWN]}" if text else ""
        return f"{self.url} {means}{said}; {remedy}"


def _tls_cause(error: object) -> str:
    """Return the reason why TLS failed, in a few words; "" if it is not known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message} (--ca-file: its CA)"
    reason = error.reason if isinstance(error, ssl.SSLError) else ""
    return {
        "WRONG_VERSION_NUMBER": "it does not speak TLS (use http://)",
        "TLSV13_ALERT_CERTIFICATE_REQUIRED": (
            "it demands a client certificate, as port 8888 does (the API: port 8889)"
        ),
    }.get(reason, "")


def _is_status(body: bytes) -> bool:
    """Return whether an answer is a Status object, which comes from the API server itself."""
    try:
        document = decode_with(msgspec.json.decode, body)
    except MalformedError:
        return False
    return isinstance(document, dict) and document.get("kind") == "Status"


def base_of(url: str) -> str:
    """Return the base URL of an extender from that URL, or from a link to a view of its page.

    Example:
        >>> base_of("http://localhost:8888/page/?view=pending"), base_of("http://localhost:8888/")
        ('http://localhost:8888', 'http://localhost:8888')
    """
    return _PAGE.sub("", url).rstrip("/")


def _tls(scheme: str, login: Login) -> dict[str, Any]:
    """Return the TLS arguments of urllib3's pool."""
    if scheme == "http":
        return {}
    for name, file in (("CA", login.ca_file), ("certificate", login.cert_file)):
        if file is not None and not Path(file).is_file():
            raise ClientError(f"{name} file {file!r}: no such file", Failure.BAD_REQUEST)
    known = {
        "cert_reqs": "CERT_REQUIRED" if login.verifies else "CERT_NONE",
        "ca_certs": login.ca_file,
        "cert_file": login.cert_file,
        "key_file": login.key_file,
        "server_hostname": login.server_name,
        "assert_hostname": login.server_name,
    }
    return {name: value for name, value in known.items() if value is not None}


def _said(body: bytes) -> str:
    """Return the error message in our JSON or in a Status object, "" if there is none.

    Example:
        >>> _said(b'{"error": "no"}'), _said(b'{"kind": "Status", "message": "x"}'), _said(b"404")
        ('no', 'x', '')
    """
    try:
        document = decode_with(msgspec.json.decode, body)
    except MalformedError:
        document = None
    if isinstance(document, dict):
        for name in ("error", "message"):
            if isinstance(document.get(name), str) and document[name]:
                return str(document[name])
    return ""


def _kind(error: Exception) -> Failure:
    return Failure.BAD_REQUEST if isinstance(error, ValueError) else Failure.UNREACHABLE
