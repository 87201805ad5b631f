"""Talks to the API server in plain JSON: kubernetes-asyncio brings configuration, login and TLS.

Its model classes are left out on purpose: they cost five times plain JSON, in time and memory.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self

import aiohttp
import orjson

from extender.decoding import MalformedError, decode_with
from extender.kube_config import (
    SERVICE_ACCOUNT,
    KubeConfigError,
    load_kubeconfig,
    load_service_account,
)
from extender.kube_library import ApiClient, Configuration, config

Params = Mapping[str, str | int]

MERGE_PATCH: Final = "application/merge-patch+json"
CONNECT_SECONDS: Final = 10.0
RELOGIN_SECONDS: Final = 10.0
SHOWN_CHARACTERS: Final = 200
"""So much of an answer that is no JSON is shown to people."""


_FAILURES: Final = (
    OSError,
    aiohttp.ClientError,
    ValueError,  # a header, URL or line that cannot be
    RuntimeError,  # the session was closed under a request, by newer credentials
    config.ConfigException,  # the token file is gone
)


class KubeError(Exception):
    """The API server could not be asked, or refused.

    Attributes:
        status: the HTTP status, None where there was no answer.
        retry_after_seconds: how long the API server asks to wait, 0 where it does not say.
        right: the right that is missing, as verb and resource; "" where none is.
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
        """Whether what was asked for is too old by now: list anew."""
        return self.status == HTTPStatus.GONE


class KubeClient:
    """One identity at one API server; bound to the running event loop.

    Credentials are read anew where the API server refuses them: a token file, a kubeconfig or an
    exec plugin may have newer ones. The in-cluster token is read anew every minute besides.

    Args:
        load: reads the configuration.
        relogin_seconds: credentials are read anew at most so often, however often refused.
    """

    def __init__(
        self,
        load: Callable[[], Awaitable[Configuration]],
        *,
        relogin_seconds: float = RELOGIN_SECONDS,
    ) -> None:
        self._load = load
        self._relogin_seconds = relogin_seconds
        self._api: ApiClient | None = None
        self._retired: ApiClient | None = None
        self._login_at = 0.0

    @classmethod
    async def connect(
        cls,
        kubeconfig: Path | None = None,
        *,
        service_account: Path = SERVICE_ACCOUNT,
        relogin_seconds: float = RELOGIN_SECONDS,
    ) -> Self:
        """Return a client for the API server that `kubeconfig` names, else for the own cluster's.

        Nothing is sent yet.

        Raises:
            KubeConfigError: the configuration cannot be read, or names no API server.
        """

        async def load() -> Configuration:
            if kubeconfig is not None:
                return await load_kubeconfig(kubeconfig)
            return load_service_account(service_account)

        client = cls(load, relogin_seconds=relogin_seconds)
        await client.login()
        return client

    async def close(self) -> None:
        """Close every connection."""
        for api in (self._api, self._retired):
            if api is not None:
                await api.close()
        self._api = self._retired = None

    async def get(
        self, path: str, params: Params, *, action: str, timeout_seconds: float, limit_bytes: int
    ) -> Mapping[str, object]:
        """Return a JSON object; see `get_text`."""
        body = await self.get_text(
            path, params, action=action, timeout_seconds=timeout_seconds, limit_bytes=limit_bytes
        )
        return parse_object(body, action)

    async def get_text(
        self, path: str, params: Params, *, action: str, timeout_seconds: float, limit_bytes: int
    ) -> bytes:
        """Return what the API server answers, as it comes.

        Args:
            path: path of the object or list.
            params: parameters of the query.
            action: verb and resource as RBAC names them ("list pods").
            timeout_seconds: limit for the whole answer.
            limit_bytes: a larger answer is refused.

        Raises:
            KubeError: there is no such answer; the message says why, and what to do.
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
        """Create or change an object, and return what is answered; PATCH sends a merge patch.

        Raises:
            KubeError: it was not done; the message says why, and what to do.
        """
        kind = MERGE_PATCH if method == "PATCH" else "application/json"
        try:
            async with asyncio.timeout(timeout_seconds):
                response = await self._request(method, path, body=body, content_type=kind)
                try:
                    await _check(response, action)
                    answer: bytes = await response.read()
                finally:
                    response.close()
        except _FAILURES as error:
            raise self._explain(error, action, timeout_seconds) from error
        return answer

    async def watch_lines(
        self,
        path: str,
        params: Params,
        *,
        action: str,
        silence_seconds: float,
        limit_bytes: int,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch until the API server ends it; first an empty one on its start.

        Args:
            path: path of the list.
            params: parameters of the query.
            action: verb and resource as RBAC names them ("watch pods").
            silence_seconds: so long without a byte, and the connection counts as dead.
            limit_bytes: a longer line is refused.

        Raises:
            KubeError: the watch could not be started, or broke.
        """
        try:
            async with asyncio.timeout(CONNECT_SECONDS + silence_seconds):
                response = await self._request("GET", path, params=params)
            try:
                await _check(response, action)
                yield b""
                splitter = LineSplitter(limit_bytes)
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
        params: Params | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        """Send a request, once more where the credentials were too old; the body is not read."""
        response = await self._send_once(method, path, params, body, content_type)
        is_due = time.monotonic() - self._login_at >= self._relogin_seconds
        if response.status == HTTPStatus.UNAUTHORIZED and is_due:
            response.close()
            await self.login()
            response = await self._send_once(method, path, params, body, content_type)
        return response

    async def _send_once(
        self, method: str, path: str, params: Params | None, body: object, content_type: str
    ) -> aiohttp.ClientResponse:
        if self._api is None:
            raise KubeError(f"cannot {method} {path}: the client is closed")
        response: aiohttp.ClientResponse = await self._api.call_api(
            path,
            method,
            query_params=list((params or {}).items()),
            header_params={
                "Accept": "application/json",
                # Packing megabytes costs the API server and us more time than it saves.
                "Accept-Encoding": "identity",
                "Content-Type": content_type,
            },
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )
        return response

    async def login(self) -> None:
        """Read the configuration, and use it from now on; requests under way keep the old one.

        Raises:
            KubeConfigError: it cannot be read; the old one stays in use.
        """
        self._login_at = time.monotonic()
        configuration = await self._load()
        api = ApiClient(configuration)
        api.user_agent = "idlegpu-extender"
        if self._retired is not None:
            await self._retired.close()
        self._retired, self._api = self._api, api

    def _explain(self, error: Exception, action: str, timeout_seconds: float) -> KubeError:
        """Return the error with its cause, and what to do about it."""
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


class LineSplitter:
    """Cuts a stream of bytes into lines, each byte looked at once.

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
            >>> splitter = LineSplitter(100)
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
    """Return a JSON object.

    Raises:
        KubeError: it is none, as when a proxy answers in the API server's place.
    """
    try:
        value = decode_with(orjson.loads, body)
    except MalformedError as error:
        raise KubeError(f"cannot {action}: the answer is no JSON: {_show(body)}") from error
    if not isinstance(value, dict):
        raise KubeError(f"cannot {action}: the answer is no JSON object: {_show(body)}")
    return value


async def _read(response: aiohttp.ClientResponse, limit_bytes: int, action: str) -> bytes:
    """Return the body, in steps that leave the loop to others."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise KubeError(f"cannot {action}: the answer is larger than {limit_bytes} bytes")
        await asyncio.sleep(0)
    return bytes(body)


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """End a stream at once: the polite end of TLS waits for the peer, and may outlast the loop."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


async def _check(response: aiohttp.ClientResponse, action: str) -> None:
    """Return if the API server agreed.

    Raises:
        KubeError: it did not.
    """
    status = response.status
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return
    message = _message(await response.content.read(1 << 16))
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
    """Return the message of a Status object, else the start of what came instead."""
    try:
        value = decode_with(orjson.loads, body)
    except MalformedError:
        return _show(body)
    message = value.get("message") if isinstance(value, dict) else None
    return message if isinstance(message, str) and message else _show(body)


def _show(body: bytes) -> str:
    """Return the start of a body in one line."""
    text = body[:SHOWN_CHARACTERS].decode(errors="replace")
    return repr(" ".join(text.split()))
