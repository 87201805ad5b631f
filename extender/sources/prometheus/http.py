"""Speaks HTTP with Prometheus through prometheus-api-client; every way to fail is one exception.

The library has no limit on time or size, retries for seconds, drops warnings and trips over
answers that are not Prometheus's. Its requests session is therefore ours, and a response hook of
the session reads and checks each answer before the library sees it.
"""

import ssl
import time
from collections.abc import Callable, Mapping, Sequence
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

from extender.sources.prometheus.common import PrometheusError
from extender.sources.prometheus.rows import (
    Recognized,
    Row,
    Rows,
    nothing,
    parse_document,
    recognize_rows,
)

if TYPE_CHECKING:
    from extender.settings.config import Prometheus

T = TypeVar("T")

_CHUNK_BYTES: Final = 1 << 16
_EXCERPT_CHARACTERS: Final = 200
_MIB: Final = 1 << 20
_HINTS: Final[Mapping[int, str]] = {
    400: "check prometheus.selector, prometheus.node_labels and prometheus.metrics",
    401: "check prometheus.bearer_token_file, or username and password_file",
    403: "check prometheus.bearer_token_file, or username and password_file",
    404: "prometheus.url must be the base URL, without /api/v1",
    413: "the answer is too large for the server: narrow prometheus.selector",
    414: "the query is too long for a proxy on the way: shorten prometheus.node_labels",
    422: "the server refused to evaluate the query: check its limits and prometheus.selector",
    429: "the server limits our queries: raise prometheus.interval_seconds",
}
_FAULT_HINT: Final = "see the server's log"


class _FileAuth:
    """Reads the secret anew for each request: tokens of service accounts change every hour."""

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
    """Asks one Prometheus; not safe for several threads at once, so each has its own.

    Attributes:
        partial_answers: answers so far that the server itself called incomplete (`warnings`:
            a store of Thanos was down, a limit was reached).
        last_warning: text of the latest such warning.
    """

    def __init__(self, settings: "Prometheus") -> None:
        self.partial_answers = 0
        self.last_warning = ""
        self._settings = settings
        self._deadline = 0.0
        self._recognize: Callable[[memoryview], object] = nothing
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
        recognize: Callable[[memoryview], T | None] = nothing,
    ) -> Rows | Recognized[T]:
        """Ask for the values of now.

        Args:
            text: the query.
            timeout_seconds: how long to wait for the answer.
            recognize: what it makes of the text of rows that it knows comes in their place.

        Raises:
            PrometheusError: no usable answer came within the time.
        """
        limit = {"timeout": _duration(timeout_seconds)}
        self._recognize = recognize
        rows: Rows | Recognized[T] = self._ask(
            lambda: self._connect.custom_query(text, params=limit, timeout=timeout_seconds),
            timeout_seconds,
        )
        return rows

    def query_range(
        self, text: str, *, start: float, end: float, step_seconds: float, timeout_seconds: float
    ) -> Sequence[Row]:
        """Ask for the values from `start` to `end`, seconds since the epoch.

        Raises:
            PrometheusError: no usable answer came within the time.
        """
        rows: Sequence[Row] = self._ask(
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
        """List the metrics that had series since then; some may have none any more.

        Raises:
            PrometheusError: no usable answer came within the time.
        """
        since_then = {"start": f"{since:.0f}"}
        names: Sequence[str] = self._ask(
            lambda: self._connect.get_label_values("__name__", params=since_then), timeout_seconds
        )
        return names

    def _build_session(self) -> requests.Session:
        settings = self._settings
        session = requests.Session()
        session.trust_env = False  # neither proxies nor ~/.netrc of the environment: settings only
        session.stream = True  # the hook reads, within limits
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

    def _ask(self, call: Callable[[], T], timeout_seconds: float) -> T:
        self._deadline = time.monotonic() + timeout_seconds
        try:
            return call()
        except PrometheusError:
            raise
        except requests.exceptions.SSLError as error:
            raise self._error(_cause(error), "check prometheus.ca_file and cert_file") from error
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
            raise self._late() from error
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
        """Read an answer within its limits, and refuse it unless it is Prometheus's, and whole."""
        try:
            body = self._read(response)
        finally:
            response.close()
        status = response.status_code
        if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            target = _redacted(response.headers.get("Location", "nowhere"))
            raise self._error(
                f"it redirects to {target}",
                "set prometheus.url to where it leads, or give credentials if that is a login page",
            )
        document = recognize_rows(body, self._recognize) or parse_document(body)
        if status != HTTPStatus.OK or document.get("status") != "success":
            raise self._refused(response, document, body)
        if "data" not in document:
            raise self._error("the answer has no data", "is prometheus.url a Prometheus?")
        self._check_type(response.url, document["data"])
        if warnings := document.get("warnings"):
            self.partial_answers += 1
            self.last_warning = _excerpt(str(warnings))
        # The library only unwraps it. Its own json() would parse it all at once.
        vars(response)["json"] = lambda: document
        return response

    def _read(self, response: requests.Response) -> bytearray:
        limit = self._settings.max_answer_mib * _MIB
        body = bytearray()
        while True:
            # read1 returns what has arrived: a plain read would wait for a full chunk, and each
            # byte that trickles in would put its timeout off again.
            chunk = response.raw.read1(_CHUNK_BYTES, decode_content=True)
            if not chunk:
                return body
            body += chunk
            if len(body) > limit:
                raise self._error(
                    f"the answer is larger than {self._settings.max_answer_mib} MiB",
                    "narrow prometheus.selector, or raise prometheus.max_answer_mib",
                )
            if time.monotonic() > self._deadline:
                raise self._late()

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

    def _refused(
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

    def _late(self) -> PrometheusError:
        return self._error(
            "no complete answer in time", "raise prometheus.timeout_seconds, or help the server"
        )

    def _connection_error(self, error: requests.exceptions.ConnectionError) -> PrometheusError:
        if "timed out" in str(error):
            return self._late()
        return self._error(_cause(error), "does Prometheus run, and is prometheus.url right?")

    def _error(self, cause: str, remedy: str) -> PrometheusError:
        return PrometheusError(
            f"cannot query Prometheus at {_redacted(self._url)}: {cause}: {remedy}"
        )


def _duration(seconds: float) -> str:
    """Write a duration as Prometheus reads it: whole numbers only."""
    return f"{max(1, round(seconds * 1000))}ms"


def _cause(error: BaseException) -> str:
    """Find the innermost reason: requests wraps urllib3, which wraps the socket's error."""
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
    """Take user and password out of a URL that people will read."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
