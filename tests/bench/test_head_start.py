"""Head starts by one clock, including filter calls that come before the event."""

import pytest

from bench import head_start
from bench.head_start import Measured, bound, rows
from bench.noting import HEAD_STARTS, Notes, build_app
from testkit.webhook_requests import MakeClient

PODS = 8


def measured(single: list[float], webhooks: list[float]) -> Measured:
    return Measured(nodes=100, single=single, burst=[0.2, 0.4], webhooks=webhooks)


def test_head_start_counts_the_first_event_and_first_request() -> None:
    notes = Notes()
    for at in (1.0, 2.0):
        notes.received("p", at)
    for at in (4.0, 8.0):
        notes.called("p", at)

    assert notes.take() == [3.0]


def test_a_pod_counts_once() -> None:
    notes = Notes()
    taken = []
    for at in (1.0, 5.0):
        notes.received("p", at)
        notes.called("p", at + 0.5)
        taken.append(notes.take())

    assert taken[-1] == []


def test_head_start_is_negative_if_the_request_comes_first() -> None:
    notes = Notes()
    notes.called("p", 1.0)
    notes.received("p", 1.5)

    assert notes.take() == [-0.5]


def test_a_pod_is_left_for_later_until_both_are_known() -> None:
    notes = Notes()
    notes.called("p", 1.0)
    first = notes.take()
    notes.received("p", 1.5)

    assert (first, notes.take(), notes.take()) == ([], [-0.5], [])


async def test_filter_is_noted_and_answered_and_prioritize_is_not_noted(
    aiohttp_client: MakeClient,
) -> None:
    notes = Notes()
    client = await aiohttp_client(build_app(notes, shortlist=1))
    for uid in ("p", "q"):
        notes.received(uid, 0.0)

    filtered = await client.post("/filter", json=filter_args("p"))
    await client.post("/prioritize", json=filter_args("q"))

    assert (await filtered.json())["NodeNames"] == ["a"]
    assert len(await (await client.get(HEAD_STARTS)).json()) == 1


def filter_args(pod: str) -> dict[str, object]:
    return {"Pod": {"metadata": {"uid": pod}}, "Nodes": None, "NodeNames": ["a", "b"]}


def test_every_request_form_has_a_row_in_milliseconds() -> None:
    single, burst, webhooks = rows(measured([-0.001, 0.001, 0.002, 0.003], [0.001]))

    assert (single["least ms"], single["called before the event"]) == (-1.0, "25.0%")
    assert burst["median ms"] == pytest.approx(300)
    assert webhooks["pods"] == 1


@pytest.mark.parametrize(
    ("nodes", "p10_seconds", "is_met"),
    [(5000, 0.009, True), (5000, 0.005, False), (100, -0.001, True)],
    ids=["shorter", "longer", "no-wait-where-requests-come-first"],
)
def test_bench_webhooks_waits_no_longer_than_nine_of_ten_pods_have(
    nodes: int, p10_seconds: float, *, is_met: bool
) -> None:
    found = Measured(nodes=nodes, single=[p10_seconds, 1.0], burst=[1.0], webhooks=[1.0])

    assert bound(found).is_met is is_met


def test_bench_webhooks_is_measured_as_kube_scheduler_is() -> None:
    found = head_start.measure_webhooks(20, PODS)

    assert len(found) == PODS
