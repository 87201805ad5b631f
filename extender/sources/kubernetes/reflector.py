"""Keep the records of one kind of object up to date by a list and a watch of the API server.

Lists ask for the most recent state, in pages. With `resourceVersion=0` the API server would answer
from its cache. That cache may be older than the objects received before (after a reconnect to
another API server), and older servers ignore the page size with it: 150,000 pods in one answer.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec

from extender.core.untyped import mapping_of, text_of
from extender.kube.client import KubeClient, KubeError
from extender.runtime.cooperative import YieldControl, yield_to_loop
from extender.runtime.decoding import paired_json, shallow_json
from extender.runtime.logs import LogThrottle
from extender.sources.kubernetes.json_text import (
    Event,
    read_event,
    read_identity,
    read_object,
    read_page,
)
from extender.sources.kubernetes.objects import Feed, ObjectKind, Pacer, ReflectorStatus

logger = logging.getLogger(__name__)

_Parsed = TypeVar("_Parsed")

_MAX_FAILURES: Final = 3
"""Failed watches in a row after which the list is requested again: the API server may not know the
resource version any more (etcd was restored)."""

_MIN_WATCH_SECONDS: Final = 1.0
"""A watch that ends sooner counts as failed, even if it sent events: the API server keeps a watch
open for minutes. A watch that ends after one event must not be repeated without a pause."""

_MAX_OBJECTS: Final = 500_000
"""Limit for the objects of one list; clusters have up to 150,000 pods."""

_MAX_PAGES: Final = 20_000
"""Limit for the pages of one list; pages may be empty."""

_MAX_UNREADABLE_LINES: Final = 10
"""Limit for log lines about unreadable objects, per minute."""

_MAX_UNREADABLE_NAMES: Final = 10
"""Number of unreadable objects whose names are kept for the status."""

_ABSENT: Final = frozenset({HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectorSettings:
    """Settings of a list and watch.

    Attributes:
        page_size: objects per page of a list.
        page_timeout_seconds: time limit for one page.
        page_limit_bytes: size limit for one page.
        line_limit_bytes: size limit for one line of a watch; etcd accepts objects up to 1.5 MiB,
            which JSON may double.
        watch_seconds: minimum duration of a watch; up to twice as long at random, so that
            connections are spread over the API servers again.
        silence_seconds: a watch without data for this long is considered broken; bookmarks arrive
            every minute.
        resync_seconds: time between two complete lists, which correct records that the watch
            missed.
        backoff_first_seconds: delay after the first failure; it doubles with each further failure.
        backoff_max_seconds: maximum delay; 50 to 100 % of the delay are used, at random.
        exporter_words: pods whose name or `app` label contains one of these words are telemetry
            exporters; the default is the name in NVIDIA's charts and in GKE.
        reads_limits: read the memory limits of pods from variables and arguments.
        reads_groups: watch the objects that state the sizes of pod groups.
    """

    page_size: int = 100
    page_timeout_seconds: float = 30.0
    page_limit_bytes: int = 256 << 20
    line_limit_bytes: int = 32 << 20
    watch_seconds: int = 300
    silence_seconds: float = 150.0
    resync_seconds: float = 600.0
    backoff_first_seconds: float = 0.5
    backoff_max_seconds: float = 30.0
    exporter_words: tuple[str, ...] = ("dcgm-exporter",)
    reads_limits: bool = False
    reads_groups: bool = False


class _Backoff:
    """Compute the delay between attempts, which grows with each failure.

    stamina does not fit: it retries a call until it succeeds, and a reflector never ends.
    """

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first_seconds = self._next_seconds = first_seconds
        self._max_seconds = max_seconds

    def reset(self) -> None:
        """Start again with the first delay, after a success."""
        self._next_seconds = self._first_seconds

    def next_seconds(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        seconds = min(self._next_seconds, self._max_seconds)
        self._next_seconds = 2.0 * seconds
        return seconds * random.uniform(0.5, 1.0)


class Reflector:
    """List and watch one kind of object until cancelled.

    Args:
        feed: receives the objects.
        settings: limits, intervals and delays.
        clock: seconds since the epoch.
        yield_control: yields the event loop to other tasks.
        on_reconnected: called when the API server answers again after a failure.
        on_relisted: called when objects that a change made outdated are listed again.
    """

    def __init__(
        self,
        client: KubeClient,
        kind: ObjectKind,
        feed: Feed,
        settings: ReflectorSettings,
        *,
        clock: Callable[[], float],
        yield_control: YieldControl = yield_to_loop,
        on_reconnected: Callable[[], None] = lambda: None,
        on_relisted: Callable[[], Awaitable[None]] = yield_to_loop,
    ) -> None:
        self.status = ReflectorStatus()
        self._client = client
        self._path = kind.path
        self._resource = kind.resource
        self._is_optional = kind.is_optional
        self._absence_level = kind.absence_level
        self._feed = feed
        self._settings = settings
        self._clock = clock
        self._yield_control = yield_control
        self._on_reconnected = on_reconnected
        self._on_relisted = on_relisted
        self._selection: dict[str, str | int] = (
            {"fieldSelector": kind.field_selector} if kind.field_selector else {}
        )
        self._version = ""
        self._lock = asyncio.Lock()
        self._failures = 0
        self._backoff = _Backoff(settings.backoff_first_seconds, settings.backoff_max_seconds)
        self._is_outdated = False
        self._list_error = ""
        self._throttle = LogThrottle(most=_MAX_UNREADABLE_LINES)

    def adopt(self, settings: ReflectorSettings, *, is_outdated: bool) -> None:
        """Apply new settings with the next `run`; records stay.

        Args:
            settings: limits, intervals and delays.
            is_outdated: objects are reduced differently now, so they are listed at once, beside the
                watch.
        """
        self._settings = settings
        self._backoff = _Backoff(settings.backoff_first_seconds, settings.backoff_max_seconds)
        self._is_outdated |= is_outdated and self.status.is_listed

    @property
    def is_outdated(self) -> bool:
        """Whether some records were reduced with earlier settings."""
        return self._is_outdated

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._list_and_watch(), name=f"watch {self._resource}")
            group.create_task(self._resync(), name=f"resync {self._resource}")

    async def _list_and_watch(self) -> None:
        """List once, then watch; list again when the watch cannot continue."""
        while True:
            try:
                if not self._version:
                    self._version = await self._list()
                await self._watch()
            except KubeError as error:
                if self._is_optional and not self.status.is_listed and error.status in _ABSENT:
                    self._note_absence(error)
                    await asyncio.sleep(self._settings.resync_seconds)
                    continue
                self._note_failure(error)
                self._failures += 1
                if error.is_gone or self._failures >= _MAX_FAILURES:
                    self._version = ""
                requested_seconds = min(
                    error.retry_after_seconds, self._settings.backoff_max_seconds
                )
                await asyncio.sleep(max(self._backoff.next_seconds(), requested_seconds))

    async def _resync(self) -> None:
        """List periodically beside the watch, to correct records that the watch missed."""
        settings = self._settings
        # A separate one: a working watch resets `self._backoff`.
        backoff = _Backoff(settings.backoff_first_seconds, settings.backoff_max_seconds)
        while True:
            if not self._is_outdated:
                jitter = random.uniform(0.9, 1.1)
                await asyncio.sleep(settings.resync_seconds * jitter)
            if self.status.is_listed:
                try:
                    await self._list()
                    was_outdated = self._is_outdated
                    self._is_outdated, self._list_error = False, ""
                    backoff.reset()
                    if was_outdated:
                        await self._on_relisted()
                except KubeError as error:
                    self._note_failure(error, is_watch_broken=False)
                    await asyncio.sleep(backoff.next_seconds())

    async def _list(self) -> str:
        """Read a complete list; return its resource version.

        Raises:
            KubeError: the list failed; the records stay as they are.
        """
        async with self._lock:
            self._feed.begin_list()
            self.status.unreadable_since_list = 0
            try:
                version = await self._read_pages()
            except BaseException:
                self._feed.abort_list()
                raise
            await self._feed.end_list(Pacer(self._yield_control))
        status = self.status
        status.lists += 1
        status.last_event_at = self._clock()
        if not status.is_listed:
            status.is_listed, status.is_absent = True, False
            status.is_connected = not status.last_error
            logger.info("listed the cluster", extra={"resource": self._resource})
        return version

    async def _read_pages(self) -> str:
        """Pass every object of a list to the feed; return the list's resource version."""
        action = f"list {self._resource}"
        pacer = Pacer(self._yield_control)
        token, tokens, taken = "", set[str](), 0
        while len(tokens) < _MAX_PAGES:
            body = await self._client.get_text(
                self._path,
                {**self._selection, "limit": self._settings.page_size}
                | ({"continue": token} if token else {}),
                action=action,
                timeout_seconds=self._settings.page_timeout_seconds,
                limit_bytes=self._settings.page_limit_bytes,
            )
            page = await _parse(read_page, body, action)
            taken += len(page.items)
            if taken > _MAX_OBJECTS:
                break
            for item in page.items:
                await self._add_listed(item, action)
                await pacer.yield_if_due()
            token = page.token
            if not token:
                return page.version
            if token in tokens:
                raise KubeError(f"cannot {action}: the list repeats a page and never ends")
            tokens.add(token)
        raise KubeError(
            f"cannot {action}: the list does not end after {len(tokens)} pages, {taken} objects"
        )

    async def _add_listed(self, item: msgspec.Raw, action: str) -> None:
        """Pass one object of a list to the feed; skip the object if it cannot be read."""
        raw: Mapping[str, object] = {}
        try:
            if self._feed.is_relevant(item):
                raw = await _parse(read_object, bytes(item), action)
                self._feed.add_listed(raw)
        except Exception as error:  # noqa: BLE001 - see above
            raw = raw or read_identity(bytes(item))
            self._feed.keep_unreadable(raw)
            self._note_unreadable(raw, error)

    async def _watch(self) -> None:
        """Pass changes to the feed until the API server ends the watch."""
        settings = self._settings
        action = f"watch {self._resource}"
        jitter = random.uniform(1.0, 2.0)
        lines = self._client.watch_lines(
            self._path,
            {
                **self._selection,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": self._version,
                "timeoutSeconds": int(settings.watch_seconds * jitter),
            },
            action=action,
            silence_seconds=settings.silence_seconds,
            limit_bytes=settings.line_limit_bytes,
        )
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        pacer = Pacer(self._yield_control)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(contextlib.aclosing(lines))
            async for line in lines:
                if not line:  # accepted: a watch that lasts works, even without any event
                    timer = loop.call_later(_MIN_WATCH_SECONDS, self._note_lasting_watch)
                    stack.callback(timer.cancel)
                    continue
                change = self._feed.irrelevant_change(line)
                if change is None:
                    await self._handle_event(await _parse(read_event, line, action), action)
                else:
                    self._version = change.version
                self._note_success()
                await pacer.yield_if_due()
        if loop.time() - started_at < _MIN_WATCH_SECONDS:
            raise KubeError(f"cannot {action}: the API server ended the watch at once")

    async def _handle_event(self, event: Event, action: str) -> None:
        """Process one event of the watch."""
        if event.kind in {"ADDED", "MODIFIED", "DELETED"}:
            raw = await self._handle_change(event, action)
        else:
            raw = await _parse(read_object, event.text, action)
        if event.kind == "ERROR":
            code = raw.get("code")
            raise KubeError(
                f"cannot {action}: {text_of(raw.get('message')) or 'the API server gave up'}",
                status=code if isinstance(code, int) else None,
            )
        if event.kind not in {"ADDED", "MODIFIED", "DELETED", "BOOKMARK"}:
            raise KubeError(f"cannot {action}: unknown event type {event.kind!r}")
        version = text_of(mapping_of(raw.get("metadata")).get("resourceVersion"))
        if version:
            self._version = version

    async def _handle_change(self, event: Event, action: str) -> Mapping[str, object]:
        """Pass a changed object to the feed and return it; skip the object if it cannot be read."""
        is_gone = event.kind == "DELETED"
        raw: Mapping[str, object] = {}
        try:
            raw = await _parse(read_object, event.text, action)
            (self._feed.drop if is_gone else self._feed.put)(raw)
        except Exception as error:  # noqa: BLE001 - see above
            raw = read_identity(event.text)
            if is_gone:
                self._feed.drop(raw)
            self._note_unreadable(raw, error)
        return raw

    def _note_success(self) -> None:
        status = self.status
        status.last_event_at = self._clock()
        if not status.is_connected:
            status.is_connected = True
            self._on_reconnected()
        if status.last_error:
            logger.info("the API server answers again", extra={"resource": self._resource})
            status.last_error = ""
        self._failures = 0

    def _note_lasting_watch(self) -> None:
        """Record that a watch works: the delay after its end is the first one again."""
        self._note_success()
        self._backoff.reset()

    def _note_absence(self, error: KubeError) -> None:
        """Note that an optional kind is not available; log it once."""
        status = self.status
        if not status.is_absent:
            is_forbidden = error.status == HTTPStatus.FORBIDDEN
            logger.log(
                logging.WARNING if is_forbidden else self._absence_level,
                "the API server does not serve these objects: continuing without them",
                extra={"resource": self._resource, "cause": str(error)},
            )
        status.is_absent, status.is_connected, status.last_error = True, False, ""

    def _note_unreadable(self, raw: Mapping[str, object], error: Exception) -> None:
        """Count and log an object that is not JSON, or that our code failed to process."""
        metadata = mapping_of(raw.get("metadata"))
        names = (text_of(metadata.get("namespace")), text_of(metadata.get("name")))
        name = "/".join(filter(None, names)) or "an object without a name"
        self.status.unreadable += 1
        self.status.unreadable_since_list += 1
        others = [one for one in self.status.unreadable_names if one != names]
        self.status.unreadable_names = (*others, names)[-_MAX_UNREADABLE_NAMES:]
        if self._throttle.due(name) is None:
            return
        extra, is_fault = {"resource": self._resource, "object": name}, True
        if isinstance(error, KubeError):
            extra["cause"], is_fault = str(error), False
        logger.log(
            logging.ERROR if is_fault else logging.WARNING,
            "cannot read an object: it is ignored",
            extra=extra,
            exc_info=error if is_fault else None,
        )

    def _note_failure(self, error: KubeError, *, is_watch_broken: bool = True) -> None:
        """Note a failure; log it if its cause is new.

        Args:
            is_watch_broken: no changes arrive any more; False if the watch still works.
        """
        status = self.status
        status.errors += 1
        if error.is_gone:
            return  # normal: the API server keeps few old versions, and the list is read again
        cause = str(error)
        if cause != (status.last_error if is_watch_broken else self._list_error):
            logger.warning(
                "cannot list or watch" if is_watch_broken else "cannot list again",
                extra={"resource": self._resource, "cause": cause},
            )
        if is_watch_broken:
            status.is_connected = False
            status.last_error = cause
        else:
            self._list_error = cause


async def _parse(parse: Callable[[bytes, str], _Parsed], body: bytes, action: str) -> _Parsed:
    """Parse data from the API server; after a failure retry without invalid UTF-8 and deep nesting.

    Raises:
        KubeError: it cannot be parsed.
    """
    try:
        return parse(body, action)
    except KubeError:
        repaired = await asyncio.to_thread(_repair, body)
        if repaired == body:
            raise
        return parse(repaired, action)


def _repair(body: bytes) -> bytes:
    return shallow_json(paired_json(body.decode(errors="replace").encode()))
