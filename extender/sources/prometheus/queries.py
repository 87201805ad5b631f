"""Runs the queries of one round side by side, within one deadline. Lives in the worker process."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from extender.sources.prometheus.common import PrometheusError, read_rows
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.rows import Recognized, Rows, nothing

if TYPE_CHECKING:
    from extender.settings.config import Prometheus

T = TypeVar("T")


class Queries:
    """A few clients and as many threads; one round at a time uses them.

    requests promises no safety across threads, so a client serves one query at a time.
    """

    def __init__(self, settings: "Prometheus") -> None:
        count = settings.parallel_queries
        self._timeout_seconds = settings.timeout_seconds
        self._deadline = 0.0
        self._all = [PrometheusClient(settings) for _ in range(count)]
        self._idle: queue.SimpleQueue[PrometheusClient] = queue.SimpleQueue()
        for client in self._all:
            self._idle.put(client)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="query")

    @property
    def partial_answers(self) -> int:
        """Answers so far that the server called incomplete."""
        return sum(client.partial_answers for client in self._all)

    @property
    def last_warning(self) -> str:
        """A text with which the server called an answer incomplete."""
        return next((client.last_warning for client in self._all if client.last_warning), "")

    @property
    def left_seconds(self) -> float:
        """Time until the round is over; below 0 once it is."""
        return self._deadline - time.monotonic()

    def begin(self, limit_seconds: float) -> None:
        """Start a round: no query begins after so long, and none runs beyond it."""
        self._deadline = time.monotonic() + limit_seconds

    def close(self) -> None:
        """End the threads once their queries are done, and close the connections."""
        self._threads.shutdown(cancel_futures=True)
        for client in self._all:
            client.close()

    def using(self, ask: Callable[[PrometheusClient, float], T]) -> T:
        """Ask with a client of one's own, and the seconds that are left.

        Raises:
            PrometheusError: no usable answer came, or the round's time is over.
        """
        left_seconds = self.left_seconds
        if left_seconds <= 0:
            raise PrometheusError(
                "cannot ask Prometheus everything: the time of the round is over: raise "
                "prometheus.round_timeout_seconds or parallel_queries, or help the server"
            )
        client = self._idle.get()
        try:
            return ask(client, min(self._timeout_seconds, left_seconds))
        finally:
            self._idle.put(client)

    def reduced(
        self,
        text: str,
        reduce: Callable[[Rows], T],
        recognize: Callable[[memoryview], T | None] = nothing,
    ) -> T:
        """Ask, and reduce the answer before it is kept: a large one is many times its numbers.

        Args:
            text: the query.
            reduce: makes of the rows what is wanted.
            recognize: likewise, of the text of rows that it knows; None for others.

        Raises:
            PrometheusError: no usable answer came, or it has not the shape of an answer.
        """
        rows = self.using(
            lambda client, limit_seconds: client.query(text, limit_seconds, recognize)
        )
        if isinstance(rows, Recognized):
            return rows.value
        return read_rows(reduce, rows)

    def start(self, work: Callable[[], T]) -> "Future[T]":
        """Start work of this round in a thread."""
        return self._threads.submit(work)


def outcome(future: "Future[Any]") -> PrometheusError | None:
    """Wait for work, and say why it failed; any other fault than Prometheus's propagates."""
    try:
        future.result()
    except PrometheusError as error:
        return error
    return None
