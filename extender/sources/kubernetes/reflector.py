"""Keeps up with one kind of object: list, watch, list again where the watch cannot go on.

Lists ask for the most recent state, in pages. `resourceVersion=0` would be answered from the API
server's cache, which may be older than what we have seen already (after a reconnect to another
API server), and older servers ignore the page size with it: 150,000 pods in one answer.
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
from extender.runtime.log_throttle import LogThrottle
from extender.sources.kubernetes.json_text import (
    Event,
    read_event,
    read_identity,
    read_object,
    read_page,
)
from extender.sources.kubernetes.object_cache import Pace
from extender.sources.kubernetes.object_kinds import Feed, FollowStatus, ObjectKind

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")

MAX_FAILURES: Final = 3
"""After so many watches that said nothing the list is asked for anew: the version may be one that
this API server does not know (etcd was restored)."""

SHORTEST_WATCH_SECONDS: Final = 1.0
"""A watch that says nothing and ends sooner is a failure: the API server keeps them for minutes."""

MOST_OBJECTS: Final = 500_000
"""Of one list; clusters have up to 150,000 pods."""

MOST_PAGES: Final = 20_000
"""Of one list: they may be empty."""

MOST_UNREADABLE_LINES: Final = 10
"""Objects that cannot be read and are logged, a minute."""

MOST_UNREADABLE_NAMES: Final = 10
"""Objects that cannot be read and are named to people."""

_ABSENT: Final = frozenset({HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowSettings:
    """How the API server is followed.

    Attributes:
        page_size: objects in one page of a list.
        page_timeout_seconds: limit for one page.
        page_limit_bytes: a larger page is refused.
        line_limit_bytes: a longer line of a watch is refused; etcd takes objects up to 1.5 MiB,
            which JSON may double.
        watch_seconds: the API server is asked to end a watch after so long, up to doubled at
            random, so that connections spread over API servers again.
        silence_seconds: a watch without a byte for so long is dead; bookmarks come every minute.
        resync_seconds: time between two complete lists that correct what a watch has lost.
        backoff_first_seconds: wait after a first failure, doubled with each further one ...
        backoff_max_seconds: ... up to this; half to all of it, at random.
        exporter_words: pods whose name or `app` label contains one of these export telemetry: so
            they are called in NVIDIA's charts and in GKE.
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


class Backoff:
    """Waits between attempts, longer after each failure.

    Our own, not stamina: that retries a call until it succeeds, and this loop never ends.
    """

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._failures = 0

    def reset(self) -> None:
        """Start anew after a success."""
        self._failures = 0

    def next_seconds(self) -> float:
        """Return how long to wait now."""
        seconds = min(self._first_seconds * 2.0 ** min(self._failures, 32), self._max_seconds)
        self._failures += 1
        return seconds * random.uniform(0.5, 1.0)


class Reflector:
    """Follows one kind of object, for ever.

    Args:
        client: the API server.
        kind: which objects.
        feed: takes the objects.
        settings: how to follow.
        clock: seconds since the epoch.
        yield_control: lets others have a turn.
        regained: is called when the API server is heard again after it was not.
        relisted: is called when what a change outdated has been listed anew.
    """

    def __init__(
        self,
        client: KubeClient,
        kind: ObjectKind,
        feed: Feed,
        settings: FollowSettings,
        *,
        clock: Callable[[], float],
        yield_control: YieldControl = yield_to_loop,
        regained: Callable[[], None] = lambda: None,
        relisted: Callable[[], Awaitable[None]] = yield_to_loop,
    ) -> None:
        self.status = FollowStatus()
        self._client = client
        self._path = kind.path
        self._resource = kind.resource
        self._is_optional = kind.is_optional
        self._feed = feed
        self._settings = settings
        self._clock = clock
        self._yield_control = yield_control
        self._regained = regained
        self._relisted = relisted
        self._selection: dict[str, str | int] = (
            {"fieldSelector": kind.field_selector} if kind.field_selector else {}
        )
        self._version = ""
        self._lock = asyncio.Lock()
        self._failures = 0
        self._backoff = Backoff(settings.backoff_first_seconds, settings.backoff_max_seconds)
        self._is_outdated = False
        self._list_error = ""
        self._throttle = LogThrottle(most=MOST_UNREADABLE_LINES)

    def change(self, settings: FollowSettings, *, is_outdated: bool) -> None:
        """Follow otherwise from the next `run` on; what is held stays.

        Args:
            settings: how to follow.
            is_outdated: objects are reduced otherwise now: the list is asked for at once, while
                the watch goes on.
        """
        self._settings = settings
        self._backoff = Backoff(settings.backoff_first_seconds, settings.backoff_max_seconds)
        self._is_outdated |= is_outdated and self.status.is_listed

    @property
    def is_outdated(self) -> bool:
        """Whether some of what is held is as it was read before a change."""
        return self._is_outdated

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name=f"follow {self._resource}")
            group.create_task(self._resync(), name=f"resync {self._resource}")

    async def _follow(self) -> None:
        """List once, then watch; list again where the watch cannot go on."""
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
                if error.is_gone or self._failures >= MAX_FAILURES:
                    self._version = ""
                asked_seconds = min(error.retry_after_seconds, self._settings.backoff_max_seconds)
                await asyncio.sleep(max(self._backoff.next_seconds(), asked_seconds))

    async def _resync(self) -> None:
        """List again now and then, while the watch goes on, and correct what it has lost."""
        settings = self._settings
        # Its own: a watch that works puts the other back with each event.
        backoff = Backoff(settings.backoff_first_seconds, settings.backoff_max_seconds)
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
                        await self._relisted()
                except KubeError as error:
                    self._note_failure(error, is_cut_off=False)
                    await asyncio.sleep(backoff.next_seconds())

    async def _list(self) -> str:
        """Take a complete list; return its version.

        Raises:
            KubeError: it could not be had; what was held before stays.
        """
        async with self._lock:
            self._feed.begin_list()
            self.status.unreadable_since_list = 0
            try:
                version = await self._take_pages()
            except (KubeError, asyncio.CancelledError):
                self._feed.abort_list()
                raise
            corrections = await self._feed.end_list(Pace(self._yield_control))
        status = self.status
        status.lists += 1
        status.corrections += corrections
        status.last_event_at = self._clock()
        if not status.is_listed:
            status.is_listed, status.is_absent = True, False
            status.is_connected = not status.last_error
            logger.info("listed the cluster", extra={"resource": self._resource})
        return version

    async def _take_pages(self) -> str:
        """Hand every object of a list to the feed, page by page; return the list's version."""
        action = f"list {self._resource}"
        pace = Pace(self._yield_control)
        token, tokens, taken = "", set[str](), 0
        while len(tokens) < MOST_PAGES:
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
            if taken > MOST_OBJECTS:
                break
            for item in page.items:
                await self._take_listed(item, action)
                await pace.breathe()
            token = page.token
            if not token:
                return page.version
            if token in tokens:
                raise KubeError(f"cannot {action}: it comes to the same page again, and never ends")
            tokens.add(token)
        raise KubeError(
            f"cannot {action}: it does not end after {len(tokens)} pages of {taken} objects"
        )

    async def _take_listed(self, item: msgspec.Raw, action: str) -> None:
        """Take one object of a list; one that cannot be read costs that object alone."""
        raw: Mapping[str, object] = {}
        try:
            if self._feed.may_matter(item):
                raw = await _parse(read_object, bytes(item), action)
                self._feed.add_listed(raw)
        except Exception as error:  # noqa: BLE001 - see above
            raw = raw or read_identity(bytes(item))
            self._feed.keep_listed(raw)
            self._note_unreadable(raw, error)

    async def _watch(self) -> None:
        """Hand changes to the feed until the API server ends the watch.

        Raises:
            KubeError: the watch could not be started, or broke.
        """
        settings = self._settings
        action = f"watch {self._resource}"
        stretch = random.uniform(1.0, 2.0)
        lines = self._client.watch_lines(
            self._path,
            {
                **self._selection,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": self._version,
                "timeoutSeconds": int(settings.watch_seconds * stretch),
            },
            action=action,
            silence_seconds=settings.silence_seconds,
            limit_bytes=settings.line_limit_bytes,
        )
        self.status.watches += 1
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        is_silent = True
        pace = Pace(self._yield_control)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(contextlib.aclosing(lines))
            async for line in lines:
                if not line:  # accepted: if it lasts, it works, however quiet the cluster is
                    timer = loop.call_later(SHORTEST_WATCH_SECONDS, self._note_success)
                    stack.callback(timer.cancel)
                    continue
                change = self._feed.idle_change(line)
                if change is None:
                    await self._take_event(await _parse(read_event, line, action), action)
                else:
                    self._version = change.version
                self._note_success()
                is_silent = False
                await pace.breathe()
        if is_silent and loop.time() - started_at < SHORTEST_WATCH_SECONDS:
            raise KubeError(f"cannot {action}: the API server ended the watch at once")

    async def _take_event(self, event: Event, action: str) -> None:
        """Take one event of the watch.

        Raises:
            KubeError: it says that the watch cannot go on, or is no event.
        """
        if event.kind in {"ADDED", "MODIFIED", "DELETED"}:
            raw = await self._take_change(event, action)
        else:
            raw = await _parse(read_object, event.text, action)
        if event.kind == "ERROR":
            code = raw.get("code")
            raise KubeError(
                f"cannot {action}: {text_of(raw.get('message')) or 'the API server gave up'}",
                status=code if isinstance(code, int) else None,
            )
        if event.kind not in {"ADDED", "MODIFIED", "DELETED", "BOOKMARK"}:
            raise KubeError(f"cannot {action}: {event.kind!r} is no kind of event")
        version = text_of(mapping_of(raw.get("metadata")).get("resourceVersion"))
        if version:
            self._version = version

    async def _take_change(self, event: Event, action: str) -> Mapping[str, object]:
        """Take a changed object and return it; one that cannot be read costs that object alone."""
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
        """Note that the watch works."""
        status = self.status
        status.last_event_at = self._clock()
        if not status.is_connected:
            status.is_connected = True
            self._regained()
        if status.last_error:
            logger.info("following the API server again", extra={"resource": self._resource})
            status.last_error = ""
        self._failures = 0
        self._backoff.reset()

    def _note_absence(self, error: KubeError) -> None:
        """Note that what is optional is not to be had; said once."""
        status = self.status
        if not status.is_absent:
            is_forbidden = error.status == HTTPStatus.FORBIDDEN
            logger.log(
                logging.WARNING if is_forbidden else logging.INFO,
                "going on without these objects",
                extra={"resource": self._resource, "cause": str(error)},
            )
        status.is_absent, status.is_connected, status.last_error = True, False, ""

    def _note_unreadable(self, raw: Mapping[str, object], error: Exception) -> None:
        """Note an object that is no JSON, or that our code cannot take: a fault of ours."""
        metadata = mapping_of(raw.get("metadata"))
        names = (text_of(metadata.get("namespace")), text_of(metadata.get("name")))
        name = "/".join(filter(None, names)) or "an object without a name"
        self.status.unreadable += 1
        self.status.unreadable_since_list += 1
        others = [one for one in self.status.unreadable_names if one != names]
        self.status.unreadable_names = (*others, names)[-MOST_UNREADABLE_NAMES:]
        if self._throttle.due(name) is None:
            return
        extra, is_fault = {"resource": self._resource, "object": name}, True
        if isinstance(error, KubeError):
            extra["cause"], is_fault = str(error), False
        logger.log(
            logging.ERROR if is_fault else logging.WARNING,
            "cannot read an object: going on without it",
            extra=extra,
            exc_info=error if is_fault else None,
        )

    def _note_failure(self, error: KubeError, *, is_cut_off: bool = True) -> None:
        """Note a failure; each new cause is logged once.

        Args:
            error: what failed.
            is_cut_off: nothing is heard now; not so where the watch goes on beside it.
        """
        status = self.status
        status.errors += 1
        if error.is_gone:
            status.expired += 1
            return  # the API server's memory is short: listing anew is all there is to it
        cause = str(error)
        if cause != (status.last_error if is_cut_off else self._list_error):
            logger.warning(
                "cannot follow the API server" if is_cut_off else "cannot list again",
                extra={"resource": self._resource, "cause": cause},
            )
        if is_cut_off:
            status.is_connected = False
            status.last_error = cause
        else:
            self._list_error = cause


async def _parse(parse: Callable[[bytes, str], Parsed], body: bytes, action: str) -> Parsed:
    """Parse what the API server sent, without what is no text or nests too deeply.

    Raises:
        KubeError: it cannot be parsed.
    """
    try:
        return parse(body, action)
    except KubeError:
        mended = await asyncio.to_thread(_mend, body)
        if mended == body:
            raise
        return parse(mended, action)


def _mend(body: bytes) -> bytes:
    return shallow_json(paired_json(body.decode(errors="replace").encode()))
