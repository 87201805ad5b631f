"""Send requests to the API server in plain JSON.

kubernetes-asyncio supplies configuration, login and TLS. Its model classes are not used: they cost
five times as much time and memory as plain JSON.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self

import aiohttp
import orjson
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration

from extender.kube.kubeconfig import (
    SERVICE_ACCOUNT,
    KubeConfigError,
    load_kubeconfig,
    load_service_account,
)
from extender.runtime.decoding import MalformedError, decode_with

_Params = Mapping[str, str | int]

_MERGE_PATCH: Final = "application/merge-patch+json"
_CONNECT_SECONDS: Final = 10.0
_RELOGIN_SECONDS: Final = 10.0
"""Shortest time between two logins after refused requests."""
_ANSWER_BYTES: Final = 16 << 20
"""Limit for an answer with one object; the API server stores at most a few MiB of it."""

_REFUSAL_BYTES: Final = 1 << 16
"""Bytes that are read of the answer to a refused request."""
_SHOWN_CHARACTERS: Final = 200
"""Characters of a non-JSON answer that an error message quotes."""


_FAILURES: Final = (
    OSError,
    aiohttp.ClientError,
    ValueError,  # an invalid header, URL or line
    RuntimeError,  # a login with new credentials closed the session during the request
    config.ConfigException,  # the token file was removed
)


class KubeError(Exception):
    """The API server could not be reached, or refused the request.

    Attributes:
        status: the HTTP status, None without an answer.
        retry_after_seconds: the wait that the API server asks for, 0 if it asks for none.
        right: the missing RBAC right as verb and resource, "" if none is missing.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after_seconds: float = 0.0,
        right: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.right = right

    @property
    def is_gone(self) -> bool:
        """Whether the requested resource version is too old: the caller must list again."""
        return self.status == HTTPStatus.GONE


class KubeClient:
    """A client for one API server with one identity, bound to the running event loop.

    The client loads credentials again when the API server refuses them: a token file, a kubeconfig
    or an exec plugin may have newer ones. It also loads the in-cluster token again every minute.

    Args:
        load: reads the configuration.
    """

    def __init__(self, load: Callable[[], Awaitable[Configuration]]) -> None:
        self._load = load
        self._api: ApiClient | None = None
        self._retired: ApiClient | None = None
        self._login_at = 0.0

    @classmethod
    async def connect(
        cls, kubeconfig: Path | None = None, *, service_account: Path = SERVICE_ACCOUNT
    ) -> Self:
        """Create a client from a kubeconfig file, or else from the pod's service account.

        No request is sent yet.

        Raises:
            KubeConfigError: the configuration cannot be read, or names no API server.
        """

        async def load() -> Configuration:
            if kubeconfig is not None:
                return await load_kubeconfig(kubeconfig)
            return load_service_account(service_account)

        client = cls(load)
        await client.login()
        return client

    async def close(self) -> None:
        """Close all connections."""
        for api in (self._api, self._retired):
            if api is not None:
                await api.close()
        self._api = self._retired = None

    async def get(self, path: str, *, action: str, timeout_seconds: float) -> Mapping[str, object]:
        """Read one object; see `get_text`."""
        body = await self.get_text(
            path, {}, action=action, timeout_seconds=timeout_seconds, limit_bytes=_ANSWER_BYTES
        )
        return parse_object(body, action)

    async def find(
        self, path: str, *, action: str, timeout_seconds: float
    ) -> Mapping[str, object] | None:
        """Read one object as `get` does; return None if it does not exist."""
        try:
            return await self.get(path, action=action, timeout_seconds=timeout_seconds)
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def get_text(
        self, path: str, params: _Params, *, action: str, timeout_seconds: float, limit_bytes: int
    ) -> bytes:
        """Send a GET request and return the body as bytes.

        Args:
            path: path of the object or list.
            params: query parameters.
            action: verb and resource as RBAC names them ("list pods").
            timeout_seconds: limit for the whole answer.
            limit_bytes: a larger answer is refused.

        Raises:
            KubeError: the request failed; the message gives the cause and a hint.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                response = await self._request("GET", path, params=params)
                try:
                    await _check(response, action)
                    body = await _read(response, limit_bytes, action)
                finally:
                    response.close()
        except _FAILURES as error:
            raise self._explain(error, action, timeout_seconds) from error
        return body

    async def send(
        self, method: str, path: str, body: object, *, action: str, timeout_seconds: float
    ) -> bytes:
        """Send an object with `method` and return the answer's body; PATCH sends a merge patch.

        Raises:
            KubeError: the request failed; the message gives the cause and a hint.
        """
        kind = _MERGE_PATCH if method == "PATCH" else "application/json"
        try:
            async with asyncio.timeout(timeout_seconds):
                response = await self._request(method, path, body=body, content_type=kind)
                try:
                    await _check(response, action)
                    answer = await _read(response, _ANSWER_BYTES, action)
                finally:
                    response.close()
        except _FAILURES as error:
            raise self._explain(error, action, timeout_seconds) from error
        return answer

    async def watch_lines(
        self, path: str, params: _Params, *, action: str, silence_seconds: float, limit_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield an empty line at the start of a watch, then its lines until the watch ends.

        Args:
            path: path of the list.
            params: parameters of the query.
            action: verb and resource as RBAC names them ("watch pods").
            silence_seconds: longest time without a byte before the connection counts as dead.
            limit_bytes: a longer line is refused.

        Raises:
            KubeError: the watch could not be started, or the connection broke.
        """
        try:
            async with asyncio.timeout(_CONNECT_SECONDS + silence_seconds):
                response = await self._request("GET", path, params=params)
            try:
                await _check(response, action)
                yield b""
                splitter = _LineSplitter(limit_bytes)
                while True:
                    async with asyncio.timeout(silence_seconds):
                        chunk = await response.content.readany()
                    if not chunk:
                        return
                    for line in splitter.feed(chunk):
                        yield line
            finally:
                _hang_up(response)
        except _FAILURES as error:
            raise self._explain(error, action, silence_seconds) from error

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: _Params | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        """Send a request, and retry it once after a login if the status is 401."""
        response = await self._send_once(method, path, params, body, content_type)
        is_due = time.monotonic() - self._login_at >= _RELOGIN_SECONDS
        if response.status == HTTPStatus.UNAUTHORIZED and is_due:
            response.close()
            await self.login()
            response = await self._send_once(method, path, params, body, content_type)
        return response

    async def _send_once(
        self, method: str, path: str, params: _Params | None, body: object, content_type: str
    ) -> aiohttp.ClientResponse:
        if self._api is None:
            raise KubeError(f"cannot {method} {path}: the client is closed")
        response: aiohttp.ClientResponse = await self._api.call_api(
            path,
            method,
            query_params=list((params or {}).items()),
            header_params={
                "Accept": "application/json",
                # Compressing megabytes costs both sides more time than it saves.
                "Accept-Encoding": "identity",
                "Content-Type": content_type,
            },
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        )
        return response

    async def login(self) -> None:
        """Load the configuration and use it for new requests; open requests keep the old one.

        Raises:
            KubeConfigError: the configuration cannot be read; the old one stays in use.
        """
        self._login_at = time.monotonic()
        configuration = await self._load()
        api = ApiClient(configuration)
        api.user_agent = "idlegpu-extender"
        if self._retired is not None:
            await self._retired.close()
        self._retired, self._api = self._api, api

    def _explain(self, error: Exception, action: str, timeout_seconds: float) -> KubeError:
        """Build a KubeError that names the failed action, its cause and a hint."""
        server = self._api.configuration.host if self._api else "the API server"
        if isinstance(error, KubeConfigError):
            cause = str(error)
        elif isinstance(error, aiohttp.ClientSSLError):
            cause = f"TLS with {server} failed: {error}: check the cluster's CA in the kubeconfig"
        elif isinstance(error, aiohttp.ClientConnectorError):
            cause = f"cannot connect to {server}: {error.os_error}: is the API server up?"
        elif isinstance(error, TimeoutError):
            cause = f"{server} was silent for {timeout_seconds:g} s"
        else:
            cause = f"the connection to {server} broke: {str(error) or type(error).__name__}"
        return KubeError(f"cannot {action}: {cause}")


class _LineSplitter:
    """Splits a stream of bytes into lines; scans each byte only once.

    Args:
        limit_bytes: a longer line is refused.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> Sequence[bytes]:
        r"""Return the lines that `chunk` completes, without empty ones.

        Raises:
            ValueError: a line is too long.

        Example:
            >>> splitter = _LineSplitter(100)
            >>> splitter.feed(b"one\ntwo\nth"), splitter.feed(b"ree\n")
            ([b'one', b'two'], [b'three'])
        """
        end = chunk.rfind(b"\n")
        if end < 0:
            self._rest += chunk
            lines = []
        else:
            self._rest += chunk[:end]
            lines = [line for line in bytes(self._rest).split(b"\n") if line]
            self._rest = bytearray(chunk[end + 1 :])
        longest = max([len(self._rest), *map(len, lines)])
        if longest > self._limit_bytes:
            raise ValueError(f"a line is longer than {self._limit_bytes} bytes")
        return lines


def parse_object(body: bytes, action: str) -> Mapping[str, object]:
    """Parse a JSON object.

    Raises:
        KubeError: the body is not a JSON object, for example because a proxy answered instead of
            the API server.
    """
    try:
        value = decode_with(orjson.loads, body)
    except MalformedError as error:
        raise KubeError(f"cannot {action}: the answer is not JSON: {_show(body)}") from error
    if not isinstance(value, dict):
        raise KubeError(f"cannot {action}: the answer is not a JSON object: {_show(body)}")
    return value


async def _read(response: aiohttp.ClientResponse, limit_bytes: int, action: str) -> bytes:
    """Read the body, and yield the event loop after each chunk."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise KubeError(f"cannot {action}: the answer is larger than {limit_bytes} bytes")
        await asyncio.sleep(0)
    return bytes(body)


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """Abort a stream: a clean TLS shutdown waits for the peer, and may outlast the event loop."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


async def _check(response: aiohttp.ClientResponse, action: str) -> None:
    """Raise KubeError if the API server refused the request."""
    status = response.status
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return
    message = _message(await response.content.read(_REFUSAL_BYTES))
    hints = {
        HTTPStatus.UNAUTHORIZED: ": check the token or client certificate",
        HTTPStatus.FORBIDDEN: f": RBAC must allow this identity to {action}",
    }
    hint = next((text for code, text in hints.items() if code == status), "")
    wait = response.headers.get("Retry-After", "")
    raise KubeError(
        f"cannot {action}: status {status}: {message}{hint}",
        status=status,
        retry_after_seconds=float(wait) if wait.isdecimal() else 0.0,
        right=action if status == HTTPStatus.FORBIDDEN else "",
    )


def _message(body: bytes) -> str:
    """Return the message of a Status object, or else the start of the body."""
    try:
        value = decode_with(orjson.loads, body)
    except MalformedError:
        return _show(body)
    message = value.get("message") if isinstance(value, dict) else None
    return message if isinstance(message, str) and message else _show(body)


def _show(body: bytes) -> str:
    """Return the start of a body on one line."""
    text = body[:_SHOWN_CHARACTERS].decode(errors="replace")
    return repr(" ".join(text.split()))


_MAX_REMEMBERED: Final = 32


class OnceLogger:
    """Logs each cause of a failure once, and its end.

    Args:
        logger: receives the lines.
        failed: message for a failure; the cause is a field.
        recovered: message for the first success afterwards.
    """

    def __init__(self, logger: logging.Logger, failed: str, recovered: str) -> None:
        self._logger = logger
        self._failed = failed
        self._recovered = recovered
        self._causes: dict[str, None] = {}

    def note(self, error: KubeError) -> None:
        """Log a failure with a new cause; the API server's message names the verb and resource."""
        # A refusal also names the object, but the missing right is the same for all objects.
        cause = error.right or str(error)
        if cause in self._causes:
            return
        self._causes[cause] = None
        if len(self._causes) > _MAX_REMEMBERED:
            del self._causes[next(iter(self._causes))]
        self._logger.warning(self._failed, extra={"cause": str(error)})

    def end(self) -> None:
        """Record a success, and log it after a failure."""
        if self._causes:
            self._causes.clear()
            self._logger.info(self._recovered)
