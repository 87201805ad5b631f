"""Ways to an HTTP server, and what its failures mean to people."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlencode, urlsplit

import msgspec
import urllib3

from extender.cli.remote.errors import ClientError, Failure
from extender.runtime.decoding import MalformedError, decode_with

Params = Mapping[str, str]

CONNECT_SECONDS: Final = 5.0
SHOWN: Final = 300
"""So much of an answer that says nothing we know is shown to people."""

NOTHING: Final = "nothing more"

_FAILURES: Final = {
    400: Failure.BAD_QUESTION,
    401: Failure.REFUSED,
    403: Failure.REFUSED,
    404: Failure.NOT_FOUND,
    409: Failure.BAD_QUESTION,
    413: Failure.BAD_QUESTION,
    422: Failure.BAD_QUESTION,
    429: Failure.REFUSED,
    502: Failure.UNREACHABLE,
    503: Failure.UNREACHABLE,
    504: Failure.UNREACHABLE,
}


class Transport(Protocol):
    """A way to the extender."""

    def ask(
        self, method: str, path: str, params: Params | None = None, body: bytes | None = None
    ) -> bytes:
        """Return the body of an answer.

        Raises:
            ClientError: there is none, or it says no.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How a server is talked to.

    Attributes:
        headers: sent with every question.
        ca_file: who signs the server's certificate, None for whom this machine trusts.
        cert_file: our own certificate, None for none ...
        key_file: ... and its key.
        verifies: whether the server's certificate is looked at.
        server_name: the name in it, None for the URL's.
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
    """The way to a server at a URL.

    Args:
        url: base URL, `http://` or `https://`.
        login: how it is talked to.

    Raises:
        ClientError: that is no such URL, or a file of the login is not there.
    """

    def __init__(self, url: str, login: Login) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ClientError(
                f"url {url!r} is not allowed: must be like https://localhost:8889",
                Failure.BAD_QUESTION,
            )
        self.url = url.rstrip("/")
        self._headers = dict(login.headers)
        self._pool = urllib3.PoolManager(
            num_pools=2,
            retries=False,
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=login.timeout_seconds),
            **_tls(parts.scheme, login),
        )

    def adding(self, headers: Mapping[str, str]) -> "UrlTransport":
        """Return the same way with further headers."""
        way = copy.copy(self)
        way._headers = {**self._headers, **headers}  # noqa: SLF001 - our own
        return way

    def ask(
        self, method: str, path: str, params: Params | None = None, body: bytes | None = None
    ) -> bytes:
        """Return the body of an answer.

        Raises:
            ClientError: there is none, or it says no.
        """
        query = f"?{urlencode(params)}" if params else ""
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        try:
            response = self._pool.request(
                method, f"{self.url}{path}{query}", body=body, headers=headers
            )
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            cause = _cause(error, is_plain=self.url.startswith("http:"))
            raise ClientError(f"cannot reach {self.url}: {cause}", _kind(error)) from error
        if response.status >= HTTPStatus.MULTIPLE_CHOICES:
            failure = _FAILURES.get(response.status, Failure.FAULT)
            text = message_of(response.data)
            # What is wrong with the question is no news of the server.
            is_ours = failure in {Failure.NOT_FOUND, Failure.BAD_QUESTION} and text != NOTHING
            where = "" if is_ours else f"{self.url} answers {response.status}: "
            raise ClientError(f"{where}{text}", failure)
        return response.data


def _tls(scheme: str, login: Login) -> dict[str, Any]:
    """Return what urllib3 wants to know of TLS.

    Raises:
        ClientError: a file is not there.
    """
    if scheme == "http":
        return {}
    for name, file in (("CA", login.ca_file), ("certificate", login.cert_file)):
        if file is not None and not Path(file).is_file():
            raise ClientError(f"{name} file {file!r}: there is no such file", Failure.BAD_QUESTION)
    known = {
        "cert_reqs": "CERT_REQUIRED" if login.verifies else "CERT_NONE",
        "ca_certs": login.ca_file,
        "cert_file": login.cert_file,
        "key_file": login.key_file,
        "server_hostname": login.server_name,
        "assert_hostname": login.server_name,
    }
    return {name: value for name, value in known.items() if value is not None}


def message_of(body: bytes) -> str:
    """Return what an answer says is wrong: ours, a Status of the API server, or its text.

    Example:
        >>> message_of(b'{"error": "no"}'), message_of(b'{"kind": "Status", "message": "x"}')
        ('no', 'x')
    """
    try:
        told = decode_with(msgspec.json.decode, body)
    except MalformedError:
        told = None
    if isinstance(told, dict):
        for name in ("error", "message"):
            if isinstance(told.get(name), str) and told[name]:
                return str(told[name])
    return " ".join(body.decode(errors="replace").split())[:SHOWN] or NOTHING


def _kind(error: Exception) -> Failure:
    return Failure.BAD_QUESTION if isinstance(error, ValueError) else Failure.UNREACHABLE


def _cause(error: BaseException, *, is_plain: bool) -> str:
    """Return in a few words why a server cannot be reached."""
    is_late = isinstance(error, urllib3.exceptions.ConnectTimeoutError)
    if is_late and not isinstance(error, urllib3.exceptions.NewConnectionError):
        return f"no connection within {CONNECT_SECONDS:g} s"
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return "no answer in time (--timeout sets how long)"
    if isinstance(error, urllib3.exceptions.NameResolutionError):
        return "its name is not known"
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return str(error).rpartition(": ")[2]
    if any(isinstance(each, ConnectionResetError) for each in error.args):
        hint = " (https:// where it speaks TLS)" if is_plain else ""
        return f"it closes the connection{hint}"
    text = str(error.__cause__ or error)
    text = text.partition(">: ")[2] or text
    return " ".join(text.split())[:SHOWN] or type(error).__name__
