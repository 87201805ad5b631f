"""Query Prometheus over HTTP with prometheus-api-client; every failure is a `PrometheusError`.

The library limits neither time nor size, retries for seconds, drops warnings, and fails on answers
of other servers. Therefore it uses a requests session of ours, whose response hook reads and checks
each answer first.
"""

import queue
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from requests.auth import HTTPBasicAuth
from urllib3.util.retry import Retry

from extender.core.quantity import MIB
from extender.sources.prometheus.protocol import PrometheusError, reduce_rows
from extender.sources.prometheus.responses import (
    Recognized,
    Row,
    Rows,
    parse_document,
    recognize_nothing,
    recognize_rows,
)

if TYPE_CHECKING:
    from extender.settings.sources import Prometheus

_T = TypeVar("_T")

_PARALLEL_QUERIES = 4
"""Queries at the same time: Prometheus answers 20 by default, for all its clients."""
_MAX_ANSWER_MIB: Final = 256
"""Largest answer that is read: far above one metric of 40,000 GPUs with all its labels."""
_MAX_ERROR_BYTES: Final = 1 << 16
"""Part of an answer with an error that is read; messages quote its start."""
_CHUNK_BYTES: Final = 1 << 16
_EXCERPT_CHARACTERS: Final = 200
_HINTS: Final[Mapping[int, str]] = {
    400: "check prometheus.selector, prometheus.node_labels and prometheus.metrics",
    401: "check prometheus.bearer_token_file, or username and password_file",
    403: "check prometheus.bearer_token_file, or username and password_file",
    404: "prometheus.url must be the base URL, without /api/v1",
    413: "the answer is too large for the server: narrow prometheus.selector",
    414: "the query is too long for a proxy on the way: shorten prometheus.node_labels",
    422: "the server refused to evaluate the query: check its limits and prometheus.selector",
    429: "the server limits the number of queries: raise prometheus.interval_seconds",
}
_FAULT_HINT: Final = "see the server's log"


class _FileAuth:
    """Read the secret for each request: tokens of service accounts change every hour."""

    def __init__(self, settings: "Prometheus") -> None:
        self._settings = settings

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._settings.bearer_token_file is not None:
            token = _read_secret(self._settings.bearer_token_file)
            request.headers["Authorization"] = f"Bearer {token}"
        elif self._settings.username:
            path = self._settings.password_file
            password = _read_secret(path) if path is not None else ""
            HTTPBasicAuth(self._settings.username, password)(request)
        return request


def _read_secret(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()


class PrometheusClient:
    """A client of one Prometheus; it is not thread-safe, so each thread has its own.

    Attributes:
        partial_answers: number of answers that the server marked as incomplete (`warnings`: a store
            of Thanos was down, a limit was reached).
        last_warning: text of the latest such warning.
    """

    def __init__(self, settings: "Prometheus") -> None:
        self.partial_answers = 0
        self.last_warning = ""
        self._settings = settings
        self._deadline = 0.0
        self._recognize: Callable[[memoryview], object] = recognize_nothing
        self._url = settings.url.rstrip("/")
        self._connect = PrometheusConnect(
            url=self._url,
            headers=dict(settings.headers),
            auth=_FileAuth(settings),
            retry=Retry(total=0),
            session=self._build_session(),
            timeout=settings.timeout_seconds,
        )

    def close(self) -> None:
        """Close the connections."""
        self._connect.close()

    def query(
        self,
        text: str,
        timeout_seconds: float,
        recognize: Callable[[memoryview], _T | None] = recognize_nothing,
    ) -> Rows | Recognized[_T]:
        """Query the current values.

        Args:
            text: the query.
            timeout_seconds: time limit for the answer.
            recognize: its result replaces rows whose JSON text it knows.

        Raises:
            PrometheusError: no usable answer came within the time.
        """
        limit = {"timeout": _duration(timeout_seconds)}
        self._recognize = recognize
        rows: Rows | Recognized[_T] = self._query(
            lambda: self._connect.custom_query(text, params=limit, timeout=timeout_seconds),
            timeout_seconds,
        )
        return rows

    def query_range(
        self, text: str, *, start: float, end: float, step_seconds: float, timeout_seconds: float
    ) -> Sequence[Row]:
        """Query the values from `start` to `end`, seconds since the epoch.

        Raises:
            PrometheusError: no usable answer came within the time.
        """
        rows: Sequence[Row] = self._query(
            lambda: self._connect.custom_query_range(
                text,
                start_time=datetime.fromtimestamp(start, UTC),
                end_time=datetime.fromtimestamp(end, UTC),
                step=f"{step_seconds:g}",
                params={"timeout": _duration(timeout_seconds)},
                timeout=timeout_seconds,
            ),
            timeout_seconds,
        )
        return rows

    def metric_names(self, *, since: float, timeout_seconds: float) -> Sequence[str]:
        """Return the metrics that had series since a time; some may have none now.

        Raises:
            PrometheusError: no usable answer came within the time.
        """
        since_then = {"start": f"{since:.0f}"}
        names: Sequence[str] = self._query(
            lambda: self._connect.get_label_values("__name__", params=since_then), timeout_seconds
        )
        return names

    def _build_session(self) -> requests.Session:
        settings = self._settings
        session = requests.Session()
        session.trust_env = False  # use the settings alone, no proxies or ~/.netrc
        session.stream = True  # the hook reads the body, within limits
        session.verify = (
            str(settings.ca_file)
            if settings.ca_file is not None
            else ssl.get_default_verify_paths().cafile or True
        )
        if settings.insecure_skip_verify:
            session.verify = False
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        if settings.cert_file is not None:
            cert, key = str(settings.cert_file), settings.key_file
            session.cert = (cert, str(key)) if key is not None else cert
        session.hooks["response"] = [self._check]
        return session

    def _query(self, call: Callable[[], _T], timeout_seconds: float) -> _T:
        self._deadline = time.monotonic() + timeout_seconds
        try:
            return call()
        except PrometheusError:
            raise
        except MemoryError as error:
            raise self._error(
                "the answer needs too much memory", "narrow prometheus.selector"
            ) from error
        except requests.exceptions.SSLError as error:
            raise self._error(_cause(error), "check prometheus.ca_file and cert_file") from error
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
            raise self._timeout_error() from error
        except requests.exceptions.ConnectionError as error:
            raise self._connection_error(error) from error
        except (
            requests.exceptions.RequestException,
            urllib3.exceptions.HTTPError,
            PrometheusApiClientException,
            OSError,  # a file of the settings cannot be read
            ValueError,  # a header or URL that cannot be sent
        ) as error:
            raise self._error(_cause(error), "check the settings under prometheus") from error

    def _check(self, response: requests.Response, **_kwargs: object) -> requests.Response:
        """Read an answer within its limits; raise unless it is a complete answer of Prometheus."""
        try:
            body = self._read(response)
        finally:
            response.close()
        status = response.status_code
        if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            target = _redacted(response.headers.get("Location", "nowhere"))
            raise self._error(
                f"it redirects to {target}",
                "set prometheus.url to that address, or set credentials if it is a login page",
            )
        document = recognize_rows(body, self._recognize) or parse_document(body)
        if status != HTTPStatus.OK or document.get("status") != "success":
            raise self._server_error(response, document, body)
        if "data" not in document:
            raise self._error("the answer has no data", "is prometheus.url a Prometheus?")
        self._check_type(response.url, document["data"])
        if warnings := document.get("warnings"):
            self.partial_answers += 1
            self.last_warning = _excerpt(str(warnings))
        # The library only unwraps it; json() of requests would parse the whole body at once.
        vars(response)["json"] = lambda: document
        return response

    def _read(self, response: requests.Response) -> bytearray:
        body = bytearray()
        while True:
            # read1 returns the bytes that have arrived. read would wait for a full chunk, and each
            # arriving byte would restart its timeout.
            chunk = response.raw.read1(_CHUNK_BYTES, decode_content=True)
            if not chunk:
                return body
            body += chunk
            if response.status_code != HTTPStatus.OK and len(body) > _MAX_ERROR_BYTES:
                return body
            if len(body) > _MAX_ANSWER_MIB * MIB:
                raise self._error(
                    f"the answer is larger than {_MAX_ANSWER_MIB} MiB", "narrow prometheus.selector"
                )
            if time.monotonic() > self._deadline:
                raise self._timeout_error()

    def _check_type(self, url: str, data: object) -> None:
        path = urlsplit(url).path
        expected = {"/query": "vector", "/query_range": "matrix"}
        kind = next((kind for end, kind in expected.items() if path.endswith(end)), None)
        if kind is None:
            is_right = isinstance(data, list)
        else:
            is_right = (
                isinstance(data, dict)
                and data.get("resultType") == kind
                and isinstance(data.get("result"), Rows | Recognized)
            )
        if not is_right:
            found = data.get("resultType") if isinstance(data, dict) else type(data).__name__
            raise self._error(
                f"the answer is a {found}, not a {kind or 'list'}",
                "is prometheus.url a Prometheus?",
            )

    def _server_error(
        self, response: requests.Response, document: Mapping[str, Any], body: bytearray
    ) -> PrometheusError:
        status = response.status_code
        if "error" in document:
            cause = f"{document.get('errorType', 'error')}: {_excerpt(str(document['error']))}"
        elif status == HTTPStatus.OK:
            kind = response.headers.get("Content-Type", "something").partition(";")[0]
            return self._error(
                f"the answer is {kind}, not JSON of Prometheus",
                "is prometheus.url the base URL of Prometheus, or is a login page in front of it?",
            )
        else:
            cause = _excerpt(body.decode("utf-8", "replace")) or "no text"
        return self._error(f"HTTP {status}: {cause}", _HINTS.get(status, _FAULT_HINT))

    def _timeout_error(self) -> PrometheusError:
        return self._error(
            "no complete answer in time", "raise prometheus.timeout_seconds, or relieve the server"
        )

    def _connection_error(self, error: requests.exceptions.ConnectionError) -> PrometheusError:
        if "timed out" in str(error):
            return self._timeout_error()
        return self._error(_cause(error), "is Prometheus running, and is prometheus.url right?")

    def _error(self, cause: str, remedy: str) -> PrometheusError:
        return PrometheusError(
            f"cannot query Prometheus at {_redacted(self._url)}: {cause}: {remedy}"
        )


def _duration(seconds: float) -> str:
    """Format a duration for Prometheus, which accepts only whole numbers."""
    return f"{max(1, round(seconds * 1000))}ms"


def _cause(error: BaseException) -> str:
    """Return the innermost cause: requests wraps urllib3, which wraps the socket's error."""
    seen = error
    while True:
        inner = getattr(seen, "reason", None) or next(
            (item for item in seen.args if isinstance(item, BaseException)), None
        )
        if not isinstance(inner, BaseException):
            break
        seen = inner
    return _excerpt(str(seen)) or type(seen).__name__


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT_CHARACTERS else line[:_EXCERPT_CHARACTERS] + "..."


def _redacted(url: str) -> str:
    """Remove user and password from a URL for logs and messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


# --- queries in parallel --------------------------------------------------------------------------


class QueryPool:
    """A pool of clients and as many threads, for one round at a time.

    requests is not documented as thread-safe, so a client runs one query at a time.
    """

    def __init__(self, settings: "Prometheus") -> None:
        self._timeout_seconds = settings.timeout_seconds
        self._deadline = 0.0
        self._clients = [PrometheusClient(settings) for _ in range(_PARALLEL_QUERIES)]
        self._idle_clients: queue.SimpleQueue[PrometheusClient] = queue.SimpleQueue()
        for client in self._clients:
            self._idle_clients.put(client)
        self._threads = ThreadPoolExecutor(_PARALLEL_QUERIES, thread_name_prefix="query")

    @property
    def partial_answers(self) -> int:
        """Number of answers so far that the server marked as incomplete."""
        return sum(client.partial_answers for client in self._clients)

    @property
    def last_warning(self) -> str:
        """Warning of a server that marked an answer as incomplete, "" if there was none."""
        return next((client.last_warning for client in self._clients if client.last_warning), "")

    @property
    def remaining_seconds(self) -> float:
        """Time until the deadline of the round; negative after it."""
        return self._deadline - time.monotonic()

    def begin(self, limit_seconds: float) -> None:
        """Start a round: all its queries must start and end within this time."""
        self._deadline = time.monotonic() + limit_seconds

    def close(self) -> None:
        """End the threads after their current queries, and close the connections."""
        self._threads.shutdown(cancel_futures=True)
        for client in self._clients:
            client.close()

    def with_client(self, query: Callable[[PrometheusClient, float], _T]) -> _T:
        """Call `query` with an idle client and its time limit in seconds.

        Raises:
            PrometheusError: no usable answer came, or the deadline has passed.
        """
        remaining_seconds = self.remaining_seconds
        if remaining_seconds <= 0:
            raise PrometheusError(
                "cannot run all queries: the time of the round is over: raise "
                "prometheus.timeout_seconds, or relieve the server"
            )
        client = self._idle_clients.get()
        try:
            return query(client, min(self._timeout_seconds, remaining_seconds))
        finally:
            self._idle_clients.put(client)

    def fetch(
        self,
        text: str,
        reduce: Callable[[Rows], _T],
        recognize: Callable[[memoryview], _T | None] = recognize_nothing,
    ) -> _T:
        """Run a query and reduce its rows: the rows take many times the memory of the result.

        Args:
            text: the query.
            reduce: computes the result from the rows.
            recognize: computes the result from the rows' JSON text; None if it does not know this
                text.

        Raises:
            PrometheusError: no usable answer came, or it has an unexpected shape.
        """
        rows = self.with_client(
            lambda client, limit_seconds: client.query(text, limit_seconds, recognize)
        )
        if isinstance(rows, Recognized):
            return rows.value
        return reduce_rows(reduce, rows)

    def start(self, work: Callable[[], _T]) -> "Future[_T]":
        """Run a function of this round in a thread of the pool; return its future."""
        return self._threads.submit(work)


def wait_for_error(future: "Future[Any]") -> PrometheusError | None:
    """Wait for a future; return its `PrometheusError`, if any, and raise any other exception."""
    try:
        future.result()
    except PrometheusError as error:
        return error
    return None
