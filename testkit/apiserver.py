"""API server for tests, benchmarks and the demo: lists in pages, and watches with bookmarks.

Subclasses and users add the writes that they need. The end-to-end tests use a real API server.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import orjson
from aiohttp import web
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

Object = dict[str, Any]

CHUNK_BYTES: Final = 1 << 18
"""Maximum bytes of a burst of events to write before other tasks run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of one object.

    Attributes:
        version: resource version after the change.
        kind: plural name of the object's kind.
        lines: returns the watch events for given query parameters.
    """

    version: int
    kind: str
    lines: Callable[[Mapping[str, str]], Sequence[bytes]]


@dataclass(eq=False, slots=True)
class Watch:
    """Open watch; None in its queue ends it."""

    kind: str
    query: Mapping[str, str]
    lines: asyncio.Queue[Sequence[bytes] | None] = field(default_factory=asyncio.Queue)


class ApiServer:
    """Server of lists and watches; a subclass holds the objects.

    Attributes:
        kinds: kind by plural name.
        version: the latest resource version.
        oldest: oldest resource version for a watch; older ones are refused with 410.
        watchers: the open watches.
    """

    def __init__(
        self,
        kinds: Mapping[str, str],
        *,
        version: int = 1000,
        bookmark_seconds: float = 60.0,
        watch_seconds: float = 3600.0,
        log_length: int = 20_000,
    ) -> None:
        self.kinds = kinds
        self.version = version
        self.oldest = 0
        self.watchers: list[Watch] = []
        self.bookmark_seconds = bookmark_seconds
        self.watch_seconds = watch_seconds
        self._log: deque[Change] = deque(maxlen=log_length)
        self._tokens = count()
        self._lists: dict[str, tuple[int, Sequence[Any]]] = {}

    # --- for subclasses -------------------------------------------------------------------------

    def selected(self, kind: str, query: Mapping[str, str]) -> Sequence[Any]:
        """Return the objects of a list."""
        raise NotImplementedError

    def render(self, item: Any) -> bytes:
        """Return an object as JSON."""
        return orjson.dumps(item)

    def next_version(self) -> int:
        """Advance the resource version, and return it."""
        self.version += 1
        return self.version

    def publish(self, changes: Sequence[Change], *, is_watched: bool = True) -> None:
        """Log changes of one kind, and send them to its watches."""
        if len(self._log) + len(changes) > (self._log.maxlen or 0) and self._log:
            at = min(len(changes), len(self._log)) - 1
            self.oldest = max(self.oldest, self._log[at].version)
        self._log.extend(changes)
        for watch in self.watchers if is_watched and changes else ():
            if watch.kind == changes[0].kind:
                lines = [line for change in changes for line in change.lines(watch.query)]
                if lines:
                    watch.lines.put_nowait(lines)

    # --- faults ---------------------------------------------------------------------------------

    def expire(self) -> None:
        """Discard all past changes and lists, as etcd's compaction does."""
        self.oldest = self.version
        self._log.clear()
        self._lists.clear()

    def end_watches(self) -> None:
        """End every watch."""
        for watch in self.watchers:
            watch.lines.put_nowait(None)

    # --- HTTP -----------------------------------------------------------------------------------

    async def list_or_watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        """Answer a GET of all objects of a kind, as a list or a watch."""
        if request.query.get("watch", "").lower() in {"1", "true"}:
            return await self.watch(request, kind)
        return self.page(request, kind)

    def page(self, request: web.Request, kind: str) -> web.Response:
        """Answer one page of a list; all pages of a list show the same state."""
        token = request.query.get("continue", "")
        name, _, position = token.partition(":")
        if not token:
            name, start = str(next(self._tokens)), 0
            version, items = self.version, self.selected(kind, request.query)
        elif name in self._lists:
            start = int(position)
            version, items = self._lists[name]
        else:
            return refused(410, "Expired", "the continue token is too old")
        end = start + (int(request.query.get("limit", "0")) or len(items))
        metadata: Object = {"resourceVersion": str(version)}
        if end < len(items):
            metadata |= {"continue": f"{name}:{end}", "remainingItemCount": len(items) - end}
            self._lists[name] = version, items
        else:
            self._lists.pop(name, None)
        head = b'{"kind":"%bList","apiVersion":"v1","metadata":%b,"items":[' % (
            self.kinds[kind].encode(),
            orjson.dumps(metadata),
        )
        body = b",".join([self.render(item) for item in items[start:end]])
        return json_response(b"".join((head, body, b"]}\n")))

    async def watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        """Stream changes as JSON lines for `timeoutSeconds` or until the client disconnects."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since = int(request.query.get("resourceVersion") or 0)
        if 0 < since < self.oldest:
            status = status_object(410, "Expired", f"too old resource version: {since}")
            await response.write(event_line("ERROR", orjson.dumps(status)))
            return response
        watch = Watch(kind, dict(request.query))
        watch.lines.put_nowait(self._backlog(kind, since, watch.query))
        self.watchers.append(watch)
        longest = float(request.query.get("timeoutSeconds") or self.watch_seconds)
        try:
            async with asyncio.timeout(min(longest, self.watch_seconds)):
                while (lines := await self._next(watch)) is not None:
                    await _write(response, lines)
        except (TimeoutError, ConnectionResetError):
            pass
        finally:
            self.watchers.remove(watch)
        return response

    def bookmark_line(self, kind: str) -> bytes:
        """Return a bookmark of the latest version."""
        metadata = {"resourceVersion": str(self.version)}
        bookmark = {"kind": self.kinds[kind], "apiVersion": "v1", "metadata": metadata}
        return event_line("BOOKMARK", orjson.dumps(bookmark))

    def _backlog(self, kind: str, since: int, query: Mapping[str, str]) -> list[bytes]:
        """Return the first events of a watch: the changes since its version, or all objects."""
        if not since:
            return [event_line("ADDED", self.render(one)) for one in self.selected(kind, query)]
        changes = [one for one in self._log if one.version > since and one.kind == kind]
        return [line for change in changes for line in change.lines(query)]

    async def _next(self, watch: Watch) -> Sequence[bytes] | None:
        try:
            async with asyncio.timeout(self.bookmark_seconds):
                return await watch.lines.get()
        except TimeoutError:
            return [self.bookmark_line(watch.kind)]


class ObjectServer(ApiServer):
    """API server that stores objects.

    Attributes:
        items: objects by kind and (namespace, name); never modified in place.
    """

    def __init__(self, kinds: Mapping[str, str], **rest: Any) -> None:
        super().__init__(kinds, **rest)
        self.items: dict[str, dict[tuple[str, str], Object]] = {kind: {} for kind in kinds}

    def is_selected(self, query: Mapping[str, str], item: Object) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether the selectors of a query match an object."""
        return True

    @override
    def selected(self, kind: str, query: Mapping[str, str]) -> Sequence[Object]:
        return [item for item in self.items[kind].values() if self.is_selected(query, item)]

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object, or None if it does not exist; do not modify the object."""
        return self.items[kind].get((namespace, name))

    def put(self, kind: str, item: Object, *, is_watched: bool = True) -> Object:
        """Store an object with the next resource version, send it to watches, and return it."""
        before = self.items[kind].get(key_of(item))
        stored = self._stamped(item)
        self.items[kind][key_of(item)] = stored
        self._record(kind, stored, before, is_watched=is_watched)
        return stored

    def remove(
        self, kind: str, namespace: str, name: str, *, is_watched: bool = True
    ) -> Object | None:
        """Remove an object, and return its last state; None if it did not exist."""
        before = self.items[kind].pop((namespace, name), None)
        if before is None:
            return None
        gone = self._stamped(before)
        self._record(kind, None, gone, is_watched=is_watched)
        return gone

    def _stamped(self, item: Object) -> Object:
        version = str(self.next_version())
        return {**item, "metadata": {**item["metadata"], "resourceVersion": version}}

    def _record(
        self, kind: str, after: Object | None, before: Object | None, *, is_watched: bool
    ) -> None:
        """Publish a change; a watch gets DELETED if its selector no longer matches."""
        version = self.version

        def lines(query: Mapping[str, str]) -> Sequence[bytes]:
            was_in = before is not None and self.is_selected(query, before)
            if after is not None and self.is_selected(query, after):
                return (event_line("MODIFIED" if was_in else "ADDED", orjson.dumps(after)),)
            if not was_in or before is None:
                return ()
            metadata = {**before["metadata"], "resourceVersion": str(version)}
            return (event_line("DELETED", orjson.dumps({**before, "metadata": metadata})),)

        self.publish([Change(version=version, kind=kind, lines=lines)], is_watched=is_watched)


def key_of(item: Object) -> tuple[str, str]:
    """Return an object's (namespace, name); the namespace of a node is ""."""
    metadata = item["metadata"]
    return str(metadata.get("namespace", "")), str(metadata.get("name", ""))


def event_line(event: str, item: bytes) -> bytes:
    """Return an event as one line of a watch."""
    return b'{"type":"%b","object":%b}\n' % (event.encode(), item)


def status_object(code: int, reason: str, message: str) -> Object:
    """Return the Status object of a refused request."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def refused(code: int, reason: str, message: str) -> web.Response:
    """Return a response that refuses a request with a Status object."""
    return json_response(orjson.dumps(status_object(code, reason, message)), code)


def json_response(body: bytes, code: int = 200) -> web.Response:
    """Return a response with JSON."""
    return web.Response(body=body, status=code, content_type="application/json")


async def _write(response: web.StreamResponse, lines: Sequence[bytes]) -> None:
    """Write lines in parts of a few hundred kilobytes, and yield to the event loop after each."""
    part: list[bytes] = []
    size = 0
    for line in lines:
        part.append(line)
        size += len(line)
        if size >= CHUNK_BYTES:
            await response.write(b"".join(part))
            part, size = [], 0
            await asyncio.sleep(0)
    if part:
        await response.write(b"".join(part))
