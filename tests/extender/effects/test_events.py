import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typing_extensions import override

from extender.core.request.annotations import AnnotationProblem
from extender.core.request.request import PodRef
from extender.effects import events
from extender.effects.events import AnnotationWarnings, EventType, EventWriter, _event_name
from extender.kube.client import KubeClient
from testkit.fake_kube import FakeKube, eventually, refusal, running_kube
from tests.extender.effects.waking import Recorder
from tests.extender.effects.warned import POD, PROBLEM

EVENTS = "/apis/events.k8s.io/v1/namespaces/ns/events"


class Clock:
    def __init__(self) -> None:
        self.now = 1_767_225_600.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with running_kube() as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_PER_SECOND", 10_000.0)
    monkeypatch.setattr(events, "_REPEAT_SECONDS", 60.0)


@contextlib.asynccontextmanager
async def writing(
    kube: FakeKube, folder: Path, *, is_running: bool = True
) -> AsyncIterator[tuple[EventWriter, Clock]]:
    client = await KubeClient.connect(kube.write_kubeconfig(folder / "kubeconfig"))
    clock = Clock()
    writer = EventWriter(client, instance="extender-0", clock=clock)
    task = asyncio.create_task(writer.run() if is_running else asyncio.sleep(0), name="events")
    try:
        yield writer, clock
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()


@pytest.mark.parametrize("writes_events", [False, True])
async def test_bad_annotation_is_logged_once_with_one_event(
    kube: FakeKube, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, writes_events: bool
) -> None:
    async with writing(kube, tmp_path, is_running=False) as (writer, _):
        warnings = AnnotationWarnings(writer, lambda: writes_events)
        for _ in range(2):
            warnings.warn(POD, PROBLEM)

        assert writer.waiting == int(writes_events)
    assert [line.getMessage() for line in caplog.records] == ["annotation cannot be used"]


async def test_a_bad_annotation_becomes_a_warning_on_the_pod(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with writing(kube, tmp_path) as (writer, _):
        writer.warn_annotation(POD, PROBLEM)
        await eventually(lambda: writer.counts.written)

    assert kube.writes == [
        (
            "POST",
            EVENTS,
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {
                    "name": _event_name(
                        POD, EventType.WARNING, "InvalidAnnotation", PROBLEM.message
                    ),
                    "namespace": "ns",
                },
                "type": "Warning",
                "reason": "InvalidAnnotation",
                "note": 'annotation idlegpu.io/strategy: "sprad" is not allowed: must be auto, '
                "spread or pack; used instead: auto",
                "action": "Scheduling",
                "eventTime": "2026-01-01T00:00:00.000000Z",
                "reportingController": "idlegpu.io/extender",
                "reportingInstance": "extender-0",
                "regarding": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "namespace": "ns",
                    "name": "train",
                    "uid": "u1",
                },
            },
        )
    ]


async def test_a_warning_comes_once_for_each_pod_and_value(kube: FakeKube, tmp_path: Path) -> None:
    other = AnnotationProblem(
        annotation=PROBLEM.annotation,
        value="x",
        allowed="auto, spread or pack",
        default_used="spread",
    )
    async with writing(kube, tmp_path) as (writer, clock):
        for _ in range(3):
            writer.warn_annotation(POD, PROBLEM)
            clock.now += 3600
        writer.warn_annotation(POD, other)
        writer.warn_annotation(PodRef(uid="u2", namespace="ns", name="train"), PROBLEM)
        await eventually(lambda: writer.counts.written == 3)

    assert [method for method, _, _ in kube.writes] == ["POST"] * 3


async def test_a_repeat_bumps_the_series_now_and_then(kube: FakeKube, tmp_path: Path) -> None:
    async with writing(kube, tmp_path) as (writer, clock):
        for _ in range(5):
            writer.post(POD, EventType.NORMAL, "Waiting", "for idle GPUs")
        await eventually(lambda: writer.counts.written == 1)
        clock.now += 61
        writer.post(POD, EventType.NORMAL, "Waiting", "for idle GPUs")
        await eventually(lambda: writer.counts.written == 2)

    (_, _, created), (method, path, patch) = kube.writes
    assert (method, path) == ("PATCH", f"{EVENTS}/{created['metadata']['name']}")
    assert patch == {"series": {"count": 6, "lastObservedTime": "2026-01-01T00:01:01.000000Z"}}
    assert kube.write_types[1] == "application/merge-patch+json"


async def test_an_event_that_exists_already_is_bumped(kube: FakeKube, tmp_path: Path) -> None:
    kube.faults["write"].append(refusal(409, "already exists"))
    async with writing(kube, tmp_path) as (writer, _):
        writer.warn_annotation(POD, PROBLEM)
        await eventually(lambda: writer.counts.written == 1)

    assert [method for method, _, _ in kube.writes] == ["POST", "PATCH"]
    assert kube.writes[1][2]["series"]["count"] == 2


async def test_an_event_that_the_api_server_deleted_is_created_again(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with writing(kube, tmp_path) as (writer, clock):
        writer.post(POD, EventType.NORMAL, "Waiting", "for idle GPUs")
        await eventually(lambda: writer.counts.written == 1)
        kube.faults["write"].append(refusal(404, "not found"))
        clock.now += 3601
        writer.post(POD, EventType.NORMAL, "Waiting", "for idle GPUs")
        await eventually(lambda: writer.counts.written == 2)

    assert [method for method, _, _ in kube.writes] == ["POST", "PATCH", "POST"]


async def test_a_full_queue_drops_and_counts_and_never_waits(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_QUEUE_SIZE", 3)
    async with writing(kube, tmp_path, is_running=False) as (writer, _):
        for number in range(10):
            pod = PodRef(uid=f"u{number}", namespace="ns", name="p")
            writer.post(pod, EventType.NORMAL, "Waiting", "for idle GPUs")

        assert writer.counts.dropped == 7


async def test_nothing_is_written_about_a_pod_without_a_name(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with writing(kube, tmp_path, is_running=False) as (writer, _):
        writer.warn_annotation(PodRef(uid="u", namespace="", name=""), PROBLEM)

        assert writer._queue.empty()


async def test_one_pod_cannot_flood(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PER_POD", 4)
    async with writing(kube, tmp_path, is_running=False) as (writer, _):
        for number in range(10):
            writer.post(POD, EventType.NORMAL, "Waiting", f"for {number}")

        assert writer.counts.dropped == 6


async def test_the_memory_of_events_is_bounded(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_MAX_KNOWN", 5)
    monkeypatch.setattr(events, "_PER_POD", 2)
    async with writing(kube, tmp_path, is_running=False) as (writer, _):
        for number in range(100):
            pod = PodRef(uid=f"u{number}", namespace="ns", name="p")
            writer.post(pod, EventType.NORMAL, "Waiting", "for idle GPUs")

        assert len(writer._known) == len(writer._per_pod) == 5


def test_the_memory_of_reported_annotations_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "_REMEMBERED", 2)
    warnings = AnnotationWarnings(EventWriter(Recorder(), instance=""), lambda: False)

    for uid in ("u1", "u2", "u2", "u3", "u2", "u1"):
        warnings.warn(PodRef(uid=uid, namespace="ns", name=uid), PROBLEM)

    pods = [line.__dict__["pod"] for line in caplog.records]
    assert pods == ["ns/u1", "ns/u2", "ns/u3", "ns/u1"]


@pytest.mark.looptime
async def test_the_rate_is_bounded_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_BURST", 3)
    monkeypatch.setattr(events, "_PER_SECOND", 20.0)
    written_at: list[float] = []

    class Noting(Recorder):
        @override
        async def send(self, *_: object, **__: object) -> bytes:
            written_at.append(asyncio.get_running_loop().time())
            return b"{}"

    writer = EventWriter(Noting(), instance="extender-0")
    for number in range(6):
        writer.post(POD, EventType.NORMAL, "Waiting", f"for {number}")
    task = asyncio.create_task(writer.run())
    await asyncio.sleep(60.0)
    task.cancel()

    since = [at - written_at[0] for at in written_at]
    assert since == pytest.approx([0.0, 0.0, 0.0, 0.05, 0.1, 0.15])


async def test_a_missing_right_is_logged_once_and_named_and_its_end(
    kube: FakeKube, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "extender.effects.events")
    kube.faults["write"].extend([refusal(403, "events is forbidden")] * 3)
    async with writing(kube, tmp_path) as (writer, _):
        for number in range(3):
            writer.post(POD, EventType.NORMAL, "Waiting", f"for {number}")
        await eventually(lambda: writer.counts.failed == 3)

        for number in range(2):
            writer.post(POD, EventType.NORMAL, "Waiting", f"for {number}")
        await eventually(lambda: writer.counts.written == 2)

    failed, again = (line for line in caplog.records if line.name == "extender.effects.events")
    assert (failed.levelname, again.message) == ("WARNING", "writing events again")
    assert (
        "RBAC must allow this identity to create events.events.k8s.io" in failed.__dict__["cause"]
    )


async def test_an_api_server_that_is_gone_is_survived(kube: FakeKube, tmp_path: Path) -> None:
    async with writing(kube, tmp_path) as (writer, _):
        await kube.stop()
        writer.warn_annotation(POD, PROBLEM)
        await eventually(lambda: writer.counts.failed == 1)
        await kube.start()

        writer.warn_annotation(POD, PROBLEM)

        await eventually(lambda: writer.counts.written == 1)


async def test_a_refusal_other_than_a_conflict_is_a_failure(kube: FakeKube, tmp_path: Path) -> None:
    async with writing(kube, tmp_path) as (writer, clock):
        kube.faults["write"].append(refusal(500, "oops"))
        writer.post(POD, EventType.NORMAL, "Waiting", "for idle GPUs")
        await eventually(lambda: writer.counts.failed == 1)
        writer.post(POD, EventType.NORMAL, "Waiting", "for idle GPUs")
        await eventually(lambda: writer.counts.written == 1)
        kube.faults["write"].append(refusal(500, "oops"))
        clock.now += 61
        writer.post(POD, EventType.NORMAL, "Waiting", "for idle GPUs")
        await eventually(lambda: writer.counts.failed == 2)

    assert [method for method, _, _ in kube.writes] == ["POST", "POST", "PATCH"]


@pytest.mark.parametrize("letter", ["x", "\N{EURO SIGN}"])
async def test_names_and_notes_stay_within_the_api_servers_limits(
    kube: FakeKube, tmp_path: Path, letter: str
) -> None:
    long = PodRef(uid="u", namespace="ns", name="p" * 253)
    async with writing(kube, tmp_path) as (writer, _):
        writer.post(long, EventType.NORMAL, "R" * 500, letter * 5000)
        await eventually(lambda: writer.counts.written == 1)

    event = kube.writes[0][2]
    assert len(event["metadata"]["name"]) <= 253
    assert len(event["note"].encode()) <= 1024
    assert len(event["reason"]) <= 128
