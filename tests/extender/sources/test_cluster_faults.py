import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import orjson
import pytest
from aiohttp import web

from extender.core.nodes.inventory import NodeRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.kube.client import KubeClient
from extender.sources.kubernetes import cluster, reflector
from extender.sources.kubernetes.cluster import ClusterSource
from extender.sources.kubernetes.records import reduce_node
from extender.sources.kubernetes.reflector import ReflectorSettings
from testkit.apiserver import Object
from testkit.fake_kube import (
    FakeKube,
    Fault,
    answer,
    eventually,
    line,
    refusal,
    running_kube,
    status_object,
)
from testkit.kube_objects import node, pod
from testkit.world import World
from tests.extender.sources.watched_cluster import FAST, watched_cluster


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with running_kube() as server:
        yield server


@pytest.mark.parametrize("where", ["status", "event"])
async def test_an_expired_version_leads_to_a_new_list(
    kube: FakeKube, tmp_path: Path, where: str
) -> None:
    kube.put("nodes", node("stays"))
    kube.put("nodes", node("goes"))
    async with watched_cluster(kube, tmp_path) as (source, sink):
        kube.put("nodes", node("new"), is_watched=False)
        kube.delete("nodes", "/goes", is_watched=False)
        if where == "status":
            kube.expire()
            kube.end_watches()
        else:
            kube.say("nodes", line("ERROR", status_object(410, "too old resource version")))

        await eventually(lambda: sorted(sink.nodes) == ["new", "stays"])

        await eventually(lambda: source.status["nodes"].is_connected)
        assert source.status["nodes"].last_error == ""
        assert sink.calls.count("replace nodes") == 1


async def test_a_list_that_expires_between_pages_is_restarted(
    kube: FakeKube, tmp_path: Path
) -> None:
    for number in range(5):
        kube.put("nodes", node(f"n{number}"))
    pages: list[str] = []

    def expire_once(resource: str) -> None:
        pages.append(resource)
        if pages.count("nodes") == 2 and resource == "nodes":
            kube.expire()

    kube.before_page = expire_once
    async with watched_cluster(kube, tmp_path) as (_, sink):
        assert len(sink.nodes) == 5
        assert sink.calls.count("replace nodes") == 1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"<html>bad gateway</html>\n", id="a proxy's page"),
        pytest.param(b"[1,2]\n", id="JSON that is no event"),
        pytest.param(b'{"type":"SURPRISE","object":{}}\n', id="unknown kind of event"),
        pytest.param(line("ERROR", status_object(500, "etcd is gone")), id="error event"),
        pytest.param(line("ERROR", {"code": "x", "message": 7}), id="error event of wrong shape"),
        pytest.param(b"", id="a clean end"),
        pytest.param(b'{"type":"ADDED","obj', id="half a line, then the end"),
    ],
)
async def test_a_broken_watch_is_resumed(kube: FakeKube, tmp_path: Path, data: bytes) -> None:
    async with watched_cluster(kube, tmp_path) as (source, sink):
        if data:
            kube.say("nodes", data)
        kube.end_watches()
        await eventually(lambda: len(kube.watches) >= 4)
        kube.put("nodes", node("n"))

        await eventually(lambda: "n" in sink.nodes)

        await eventually(lambda: source.status["nodes"].is_connected)


async def test_objects_of_any_shape_are_harmless(kube: FakeKube, tmp_path: Path) -> None:
    async with watched_cluster(kube, tmp_path) as (source, sink):
        for raw in ({}, {"metadata": None}, {"metadata": {"name": 7}, "spec": [], "status": "x"}):
            for kind in ("ADDED", "DELETED"):
                kube.say("nodes", line(kind, raw))
                kube.say("pods", line(kind, raw))
        kube.say("nodes", b'{"type":"ADDED","object":null}\n\n\n')
        kube.put("nodes", node("n"))
        kube.put("pods", pod("p"))

        await eventually(lambda: sink.nodes and sink.pods)

        assert all(status.errors == 0 for status in source.status.values())


async def test_an_event_of_five_megabytes_is_read(kube: FakeKube, tmp_path: Path) -> None:
    async with watched_cluster(kube, tmp_path) as (_, sink):
        large = node("large")
        large["metadata"]["annotations"] = {"note": "x" * 5_000_000}
        kube.put("nodes", large)

        await eventually(lambda: "large" in sink.nodes)


async def test_an_event_beyond_the_limit_ends_only_the_watch(
    kube: FakeKube, tmp_path: Path
) -> None:
    settings = ReflectorSettings(
        line_limit_bytes=10_000, backoff_first_seconds=0.01, backoff_max_seconds=0.05
    )
    async with watched_cluster(kube, tmp_path, settings) as (source, sink):
        kube.say("nodes", b"x" * 50_000)

        await eventually(lambda: source.status["nodes"].errors)
        kube.put("nodes", node("n"))
        await eventually(lambda: "n" in sink.nodes)


async def test_a_silent_connection_is_closed(kube: FakeKube, tmp_path: Path) -> None:
    settings = ReflectorSettings(
        silence_seconds=0.1, backoff_first_seconds=0.01, backoff_max_seconds=0.05
    )
    async with watched_cluster(kube, tmp_path, settings) as (source, sink):
        await eventually(lambda: "silent for 0.1 s" in source.status["nodes"].last_error)

        kube.put("nodes", node("n"))
        await eventually(lambda: "n" in sink.nodes)


async def test_a_failed_resync_changes_nothing(kube: FakeKube, tmp_path: Path) -> None:
    kube.put("nodes", node("n"))
    async with watched_cluster(kube, tmp_path, ReflectorSettings(resync_seconds=0.1)) as (
        source,
        sink,
    ):
        kube.faults["list"].extend([refusal(500, "oops")] * 2)

        await eventually(lambda: sum(status.errors for status in source.status.values()) == 2)
        await eventually(lambda: all(status.lists >= 2 for status in source.status.values()))

        assert list(sink.nodes) == ["n"]
        assert [resource for resource, _ in kube.watches].count("nodes") == 1


async def test_a_failed_list_does_not_interrupt_a_working_watch(
    kube: FakeKube, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ReflectorSettings(
        resync_seconds=0.1, backoff_first_seconds=0.01, backoff_max_seconds=0.05
    )
    async with watched_cluster(kube, tmp_path, settings) as (source, sink):
        kube.put("nodes", node("n"))
        kube.put("pods", pod("p", node="n", phase="Running"))
        await eventually(lambda: "n" in sink.nodes and "p" in sink.pods)
        kube.faults["list"].extend([refusal(500, "oops")] * 7)

        await eventually(lambda: sum(status.errors for status in source.status.values()) == 7)

        connections = [
            (status.is_connected, status.last_error) for status in source.status.values()
        ]
        assert connections == [(True, "")] * 2

    assert 1 <= caplog.messages.count("cannot list again") <= 2  # once of each kind
    assert "cannot list or watch" not in caplog.messages


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(answer(b"{}"), id="an empty object"),
        pytest.param(answer(b"<html>", "text/html"), id="a proxy's page"),
        pytest.param(answer(b'{"kind":"Status","metadata":{}}'), id="another kind"),
        pytest.param(answer(b"null"), id="null"),
        pytest.param(refusal(500, "oops"), id="status 500"),
        pytest.param(refusal(429, "slow down", **{"Retry-After": "1"}), id="too many requests"),
    ],
)
async def test_a_bad_answer_never_empties_the_inventory(
    kube: FakeKube, tmp_path: Path, fault: Fault
) -> None:
    kube.put("nodes", node("n"))
    async with watched_cluster(kube, tmp_path) as (source, sink):
        kube.faults["list"].extend([fault] * 2)
        kube.expire()
        kube.version += 1
        kube.oldest = kube.version
        kube.end_watches()

        await eventually(lambda: all(status.lists == 2 for status in source.status.values()))

        assert list(sink.nodes) == ["n"]
        assert "remove n" not in sink.calls


async def test_a_missing_permission_is_logged_once(
    kube: FakeKube, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = 'pods is forbidden: User "u" cannot list resource "pods"'

    async with watched_cluster(kube, tmp_path, waits_for_sync=False) as (source, _):
        kube.faults["list"].extend([refusal(403, message)] * 8)

        await eventually(lambda: sum(status.errors for status in source.status.values()) >= 6)
        await eventually(lambda: source.is_synced)

    causes = [record.__dict__["cause"] for record in caplog.records if "cause" in record.__dict__]
    assert len(causes) <= 2
    assert any("RBAC must allow this identity to list" in cause for cause in causes)
    assert any(message in cause for cause in causes)


async def test_the_source_recovers_when_the_api_server_returns(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("nodes", node("n"))
    async with watched_cluster(kube, tmp_path) as (source, sink):
        await kube.stop()
        await eventually(lambda: "is the API server up?" in source.status["nodes"].last_error)
        assert source.is_synced
        assert not source.status["nodes"].is_connected
        kube.put("nodes", node("m"))

        await kube.start()

        await eventually(lambda: "m" in sink.nodes)
        status = source.status["nodes"]
        assert (status.is_connected, status.last_error) == (True, "")


@pytest.mark.parametrize(("failures", "lists"), [(2, 1), (3, 2)])
async def test_a_watch_goes_on_without_a_new_list_until_it_fails_three_times(
    kube: FakeKube, tmp_path: Path, failures: int, lists: int
) -> None:
    async with watched_cluster(kube, tmp_path) as (source, sink):
        refused: Counter[str] = Counter()

        async def refuse(request: web.Request) -> web.StreamResponse:
            refused[request.path] += 1
            if refused[request.path] >= failures:
                return await kube.answer(request)
            return await refusal(503, "later")(request)

        kube.faults["watch"].extend([refuse] * 2 * failures)
        kube.end_watches()  # at once after their start, which is a failure, too
        await eventually(
            lambda: [status.errors for status in source.status.values()] == [failures] * 2
        )
        kube.put("nodes", node("n"))
        kube.put("pods", pod("p"))
        await eventually(lambda: "n" in sink.nodes and "p" in sink.pods)

        assert [status.lists for status in source.status.values()] == [lists] * 2


async def test_a_version_from_the_future_leads_to_a_new_list(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with watched_cluster(kube, tmp_path) as (source, _):
        kube.faults["watch"].extend([refusal(504, "Too large resource version")] * 6)

        kube.end_watches()

        await eventually(lambda: all(status.lists >= 2 for status in source.status.values()))


async def test_deep_nesting_breaks_neither_the_list_nor_the_watch(
    kube: FakeKube, tmp_path: Path
) -> None:
    deep = orjson.dumps(node("deep"))[:-1] + b',"extra":' + b"[" * 5000 + b"]" * 5000 + b"}"
    page = b'{"kind":"NodeList","metadata":{"resourceVersion":"1000"},"items":[%b]}' % deep

    async def list_deep_node(request: web.Request) -> web.StreamResponse:
        is_of_nodes = request.match_info["resource"] == "nodes"
        return await (answer(page)(request) if is_of_nodes else kube.answer(request))

    kube.faults["list"].extend([list_deep_node] * 2)  # nodes and pods are listed in any order
    async with watched_cluster(kube, tmp_path) as (source, sink):
        assert list(sink.nodes) == ["deep"]

        kube.say("nodes", b'{"type":"ADDED","object":%b}\n' % deep.replace(b"deep", b"next"))
        kube.say("nodes", line("ADDED", node("odd", zone="x")).replace(b'"x"', b'"\xff"'))
        kube.put("nodes", node("last"))
        await eventually(lambda: sorted(sink.nodes) == ["deep", "last", "next", "odd"])

        assert source.status["nodes"].errors == 0


async def test_an_object_that_our_code_fails_on_is_skipped(
    kube: FakeKube,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reduce(raw: Mapping[str, object], names: ResourceNames) -> NodeRecord | None:
        record = reduce_node(raw, names)
        if record is not None and record.name.startswith("bad"):
            raise IndexError("a fault of ours")
        return record

    monkeypatch.setattr(cluster, "reduce_node", reduce)
    kube.put("nodes", node("bad-1"))
    kube.put("nodes", node("good-1"))
    async with watched_cluster(kube, tmp_path) as (source, sink):
        kube.put("nodes", node("bad-2"))
        kube.put("nodes", node("good-2"))

        await eventually(lambda: sorted(sink.nodes) == ["good-1", "good-2"])

        status = source.status["nodes"]
        assert (status.unreadable, status.unreadable_since_list, status.errors) == (2, 2, 0)
        assert status.unreadable_names == (("", "bad-1"), ("", "bad-2"))
    logged = [line for line in caplog.records if hasattr(line, "object")]
    assert [vars(line)["object"] for line in logged] == ["bad-1", "bad-2"]
    assert all(line.levelname == "ERROR" and line.exc_info for line in logged)


ODD_NUMBER = b"1e999"


def odd_text(raw: Object, odd: bytes = ODD_NUMBER) -> bytes:
    """Return the JSON text of an object with a value that some decoders refuse."""
    return orjson.dumps({**raw, "extra": "odd"}).replace(b'"odd"', odd)


@pytest.mark.parametrize(
    ("odd", "unreadable"),
    [
        pytest.param(ODD_NUMBER, 1, id="a number that no double holds"),
        pytest.param(b"9" * 400, 0, id="an integer of 400 digits"),
        pytest.param(b'"\\ud83d"', 0, id="half a surrogate pair"),
        pytest.param(b'"\xff"', 0, id="no UTF-8"),
    ],
)
async def test_an_odd_value_in_an_event_affects_only_its_object(
    kube: FakeKube, tmp_path: Path, odd: bytes, unreadable: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched_cluster(kube, tmp_path) as (source, sink):
        kube.say("nodes", b'{"type":"ADDED","object":%b}\n' % odd_text(node("strange"), odd))
        kube.put("nodes", node("last"))
        await eventually(lambda: "last" in sink.nodes)

        status = source.status["nodes"]
        assert (status.errors, status.unreadable) == (0, unreadable)
        assert ("strange" in sink.nodes) is (unreadable == 0)
    logged = [line for line in caplog.records if vars(line).get("object") == "strange"]
    assert [(line.levelname, line.exc_info) for line in logged] == [("WARNING", None)] * unreadable
    assert all("JSON" in vars(line)["cause"] for line in logged)


@pytest.mark.parametrize("odd", [ODD_NUMBER, b'"\\ud83d"'], ids=["number", "surrogate"])
async def test_an_odd_value_in_a_list_affects_only_its_object(
    kube: FakeKube, tmp_path: Path, odd: bytes
) -> None:
    kube.faults["list"].extend([listing(kube, "nodes", odd_text(node("strange"), odd))] * 2)
    async with watched_cluster(kube, tmp_path) as (source, _):
        assert source.status["nodes"].errors == 0


def listing(kube: FakeKube, resource: str, *items: bytes) -> Fault:
    """Return a fault that answers a list of one kind with these objects."""
    page = b'{"kind":"AList","metadata":{"resourceVersion":"2000"},"items":[%b]}'

    async def answer_list(request: web.Request) -> web.StreamResponse:
        if request.match_info["resource"] != resource:
            return await kube.answer(request)
        return await answer(page % b",".join(items))(request)

    return answer_list


@pytest.mark.parametrize(
    ("resource", "raw"),
    [("pods", pod("held", node="n", phase="Running")), ("nodes", node("held"))],
    ids=["pod", "node"],
)
async def test_an_unreadable_listed_object_keeps_its_record(
    kube: FakeKube, tmp_path: Path, resource: str, raw: Object
) -> None:
    kube.put(resource, raw)
    async with watched_cluster(kube, tmp_path, replace(FAST, resync_seconds=0.05)) as (
        source,
        sink,
    ):
        kube.faults["list"].extend([listing(kube, resource, odd_text(raw))] * 4)
        await eventually(lambda: source.status[resource].unreadable)
        lists = source.status[resource].lists

        await eventually(lambda: source.status[resource].lists > lists)

        assert "remove held" not in sink.calls


async def test_a_deletion_needs_only_a_readable_identity(kube: FakeKube, tmp_path: Path) -> None:
    raw = pod("held", node="n", phase="Running")
    kube.put("pods", raw)
    async with watched_cluster(kube, tmp_path) as (_, sink):
        kube.say("pods", b'{"type":"DELETED","object":%b}\n' % odd_text(raw))

        await eventually(lambda: "held" not in sink.pods)


async def test_the_last_unreadable_objects_are_named_once_each(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with watched_cluster(kube, tmp_path) as (source, sink):
        for number in (*range(15), 9):
            text = odd_text(pod(f"p{number}"))
            kube.say("pods", b'{"type":"ADDED","object":%b}\n' % text)
        kube.put("pods", pod("last"))
        await eventually(lambda: "last" in sink.pods)

        names = [name for _, name in source.status["pods"].unreadable_names]
        assert names == [*(f"p{number}" for number in (5, 6, 7, 8, 10, 11, 12, 13, 14, 9))]


async def test_a_list_that_repeats_a_page_fails(kube: FakeKube, tmp_path: Path) -> None:
    page = b'{"kind":"AList","metadata":{"resourceVersion":"9","continue":"again"},"items":[]}'
    kube.faults["list"].extend([answer(page)] * 40)
    async with watched_cluster(kube, tmp_path, waits_for_sync=False) as (source, _):
        await eventually(lambda: "never ends" in source.status["nodes"].last_error)

        assert len([resource for resource, _ in kube.lists if resource == "nodes"]) <= 4


@pytest.mark.parametrize("limit", ["_MAX_PAGES", "_MAX_OBJECTS"])
async def test_an_endless_list_fails(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(reflector, limit, 3)
    for number in range(7):
        kube.put("nodes", node(f"n{number}"))
    async with watched_cluster(
        kube, tmp_path, replace(FAST, page_size=2), waits_for_sync=False
    ) as (source, _):
        await eventually(lambda: "does not end" in source.status["nodes"].last_error)


class BriefServer:
    """API server with an empty list, whose watches end after some lines.

    Attributes:
        watches: number of watches.
    """

    def __init__(self, *lines: bytes) -> None:
        self.watches = 0
        self._lines = lines

    async def get_text(self, *_: object, **__: object) -> bytes:
        return b'{"kind":"NodeList","metadata":{"resourceVersion":"7"},"items":[]}'

    async def watch_lines(self, *_: object, **__: object) -> AsyncIterator[bytes]:
        self.watches += 1
        assert self.watches < 50, "without a pause"
        yield b""
        for each in self._lines:
            yield each


@pytest.mark.parametrize("end", [b"", line("ERROR", status_object(410, "too old")).strip()])
async def test_watches_that_end_at_once_are_repeated_ever_later(
    monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    bookmark = {"metadata": {"resourceVersion": "9"}}
    server = BriefServer(line("BOOKMARK", bookmark).strip(), *filter(None, [end]))
    source = ClusterSource(
        cast(KubeClient, server), World().fleet, resources=ResourceNames(), clock=lambda: 0.0
    )
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds:
            delays.append(seconds)
        if len(delays) == 6:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await source._reflectors["nodes"]._list_and_watch()

    assert delays[0] <= 0.5
    assert delays[-1] >= 8.0
