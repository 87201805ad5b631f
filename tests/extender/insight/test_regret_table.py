"""Outcomes of placements as a table and as metrics, redacted for each caller."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import Result
from prometheus_client import CollectorRegistry

from extender.answers.routes import REGRET
from extender.cli.commands.regret import command
from extender.core.policy import Policy
from extender.core.request.request import PodRef
from extender.insight.regret_table import (
    _PEERS_PATH,
    _PIECE_OUTCOMES,
    RegretMetrics,
    RegretTable,
    _newest,
)
from extender.insight.regret_watch import MOST_NODES, PlacementOutcome, RegretWatch
from extender.insight.replicas import NoReplicas, Replicas
from extender.server.redaction import SEES_ALL, SeesNone, Viewer
from testkit.api_requests import get, meanwhile
from testkit.cli_serving import runner, serving
from testkit.others import FAR, NEAR, LearnsTeam, OtherReplicas, serve_to
from testkit.outcomes import OUTCOMES, outcome
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

MANY = 5 * _PIECE_OUTCOMES

OURS = outcome("ours", got=0.5, choice=0.2, followed=False)


@pytest.fixture
def watch() -> RegretWatch:
    world = World()
    watch = RegretWatch(world.fleet, lambda: world.now, pods=100, after_seconds=3600.0)
    watch.outcomes.extend(OUTCOMES)
    return watch


def app_for(watch: RegretWatch, viewer: Viewer = SEES_ALL) -> web.Application:
    app = World().build_app(viewer=viewer)
    app.add_routes(RegretTable(lambda: watch).routes())
    return app


async def test_the_newest_come_first_with_means_of_those_that_can_be_compared(
    watch: RegretWatch, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(app_for(watch))

    answer = await get(client, REGRET.path)

    assert [one["pod"] for one in answer["placements"]] == [
        "team/third",
        "team/second",
        "team/first",
    ]
    assert [one["regret_ratio"] for one in answer["placements"]] == [None, 0.0, pytest.approx(0.3)]
    assert answer["placements"][-1] == {
        "pod": "team/first",
        "uid": "uid-first",
        "bound_at": "2027-01-15T08:00:00.000+00:00",
        "seconds": 3600.0,
        "node": "node-1",
        "choice": "node-2",
        "best": "node-3",
        "is_followed": False,
        "is_shadow": True,
        "is_known": False,
        "gpus": 2,
        "got_ratio": 0.5,
        "choice_ratio": 0.2,
        "best_ratio": 0.05,
        "got_then_ratio": 0.1,
        "choice_then_ratio": None,
        "regret_ratio": pytest.approx(0.3),
        "hindsight_ratio": pytest.approx(0.45),
    }

    def means(placements: int, got: float, choice: float) -> dict[str, object]:
        return {
            "placements": placements,
            "got_ratio": pytest.approx(got),
            "choice_ratio": pytest.approx(choice),
            "best_ratio": 0.05,
            "got_then_ratio": 0.1,
            "choice_then_ratio": None,
        }

    assert answer["all"] == means(2, 0.3, 0.15)
    assert answer["followed"] == means(1, 0.1, 0.1)
    assert answer["not_followed"] == means(1, 0.5, 0.2)
    totals = ("after_seconds", "watched", "left_out", "total", "unreachable")
    assert [answer[name] for name in totals] == [3600.0, 0, 0, 3, []]
    limited = await get(client, REGRET.path, limit="1")
    assert (len(limited["placements"]), limited["total"]) == (1, 3)
    assert (await get(client, REGRET.path, namespace="other"))["total"] == 0
    assert "must be a whole number" in (await get(client, REGRET.path, 400, limit="0"))["error"]


async def test_caller_without_rights_sees_no_pod_names(
    watch: RegretWatch, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(app_for(watch, SeesNone()))

    answer = await get(client, REGRET.path)

    assert {(one["pod"], one["uid"]) for one in answer["placements"]} == {("another pod", None)}
    assert (await get(client, REGRET.path, namespace="team"))["total"] == 0


def test_metrics_count_each_placement(watch: RegretWatch) -> None:
    registry = CollectorRegistry()
    metrics = RegretMetrics(registry, lambda: watch)
    watch.left_out = 4

    for one in OUTCOMES:
        metrics.note(one)

    value: Callable[..., float | None] = registry.get_sample_value
    assert value("idlegpu_placement_activity_count", {"gpus": "got"}) == 3
    assert value("idlegpu_placement_activity_sum", {"gpus": "got"}) == pytest.approx(1.5)
    assert value("idlegpu_placement_activity_count", {"gpus": "choice"}) == 2
    assert value("idlegpu_placement_activity_sum", {"gpus": "choice"}) == pytest.approx(0.3)
    assert value("idlegpu_placement_activity_sum", {"gpus": "best"}) == pytest.approx(0.15)
    of_best = {"against": "best", "followed": "no"}
    assert value("idlegpu_placement_regret_count", of_best) == 2
    assert value("idlegpu_placement_regret_bucket", {**of_best, "le": "0.2"}) == 0
    assert value("idlegpu_placement_regret_bucket", {**of_best, "le": "0.5"}) == 1
    assert value("idlegpu_placement_regret_count", {**of_best, "followed": "yes"}) == 1
    against = {"against": "choice", "followed": "no"}
    assert value("idlegpu_placement_regret_bucket", {**against, "le": "0.2"}) == 0
    assert value("idlegpu_placement_regret_bucket", {**against, "le": "0.5"}) == 1
    assert value("idlegpu_regret_left_out_pods_total") == 4
    assert value("idlegpu_regret_watched_pods") == 0


def buckets(registry: CollectorRegistry, name: str) -> set[float]:
    """Return the finite upper bounds of a histogram's buckets."""
    return {
        float(sample.labels["le"])
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == f"{name}_bucket" and sample.labels["le"] != "+Inf"
    }


def test_metrics_have_every_series_before_the_first_placement(watch: RegretWatch) -> None:
    registry = CollectorRegistry()
    RegretMetrics(registry, lambda: watch)

    series = {
        tuple(sorted(sample.labels.items()))
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.endswith("_count")
    }

    assert series == {
        *((("gpus", gpus),) for gpus in ("got", "choice", "best")),
        *(
            (("against", against), ("followed", followed))
            for against in ("choice", "best")
            for followed in ("yes", "no")
        ),
    }


def test_a_bucket_ends_at_the_limit_of_idleness(watch: RegretWatch) -> None:
    registry = CollectorRegistry()
    RegretMetrics(registry, lambda: watch)

    activity = buckets(registry, "idlegpu_placement_activity")

    assert Policy().thresholds.utilization in activity
    assert max(activity) == 1.0
    assert len(activity) == 9


def test_less_activity_than_the_choice_is_counted_as_finely_as_more(watch: RegretWatch) -> None:
    registry = CollectorRegistry()
    RegretMetrics(registry, lambda: watch)

    regret = buckets(registry, "idlegpu_placement_regret")

    less = {-bound for bound in regret if bound < 0}
    assert less == {bound for bound in regret if 0 < bound < 1}
    assert max(regret) == 1.0
    assert len(less) == 5


def call(watch: RegretWatch, *arguments: str) -> Result:
    with serving(app_for(watch)) as url:
        return runner(url)("regret", *arguments)


def test_the_command_line_shows_them(watch: RegretWatch) -> None:
    shown = call(watch)

    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[1][:5] == ["all", "2", "30%", "15%", "5%"]
    assert ["team/first", "node-1", "node-2", "node-3", "50%~", "20%", "5%", "+30%", "no"] in lines
    assert ["team/third", "node-1", "node-2", "node-3", "90%~", "?", "5%", "?", "no"] in lines


def test_command_line_reports_that_no_placement_was_compared(watch: RegretWatch) -> None:
    watch.outcomes.clear()

    assert "no placement was compared yet" in call(watch).stdout


def numbered(number: int) -> PlacementOutcome:
    return outcome(f"p-{number}", got=0.5, choice=0.2, followed=True)


async def test_others_have_a_turn_between_any_few_of_very_many_placements() -> None:
    turns = count()

    async with meanwhile(lambda: next(turns)):
        newest = await _newest(map(numbered, range(MANY)))

    assert {one.pod.name for one in newest} == {f"p-{number}" for number in range(MANY)}
    assert next(turns) >= MANY / _PIECE_OUTCOMES


async def test_pods_may_be_judged_while_very_many_are_listed(aiohttp_client: MakeClient) -> None:
    world = World()
    watch = RegretWatch(world.fleet, lambda: world.now, pods=MANY, after_seconds=3600.0)
    numbers = count()
    watch.outcomes.extend(numbered(next(numbers)) for _ in range(MANY))
    table = RegretTable(lambda: watch, Replicas(answers_peers=True))
    app = web.Application()
    app.add_routes([*table.routes(), *table.peer_routes()])
    client = await aiohttp_client(app)

    async with meanwhile(lambda: watch.outcomes.append(numbered(next(numbers)))):
        answer = await get(client, REGRET.path)
        reported = await get(client, _PEERS_PATH)

    assert answer["total"] == MANY
    assert len(reported["outcomes"]) == MANY


def test_readers_are_listed_which_nodes_the_best_is_the_best(watch: RegretWatch) -> None:
    registry = CollectorRegistry()
    RegretMetrics(registry, lambda: watch)
    reported = {metric.name: metric.documentation for metric in registry.collect()}

    for text in (
        command.help or "",
        reported["idlegpu_placement_activity"],
        reported["idlegpu_placement_regret"],
        Path("docs/trusting.md").read_text(),
        Path("docs/api-routes.md").read_text(),
    ):
        assert f"the {MOST_NODES} best of the decision" in " ".join(text.split())


def secret() -> PlacementOutcome:
    pod = PodRef(uid="uid-secret", namespace="hush", name="secret")
    return _with(outcome("secret", got=0.4, choice=0.4, followed=True), pod=pod)


def _with(one: PlacementOutcome, **rest: Any) -> PlacementOutcome:
    values = {name: getattr(one, name) for name in PlacementOutcome.__dataclass_fields__}
    return PlacementOutcome(**{**values, **rest})


def replica(
    name: str,
    *outcomes: PlacementOutcome,
    far: OtherReplicas | None = None,
    viewer: Viewer = SEES_ALL,
    answers_peers: bool = True,
) -> web.Application:
    """Return a replica with these outcomes, and with a pod that it left out."""
    world = World()
    watch = RegretWatch(world.fleet, lambda: world.now, pods=100, after_seconds=3600.0)
    watch.outcomes.extend(outcomes)
    watch.left_out = 1
    table = RegretTable(
        lambda: watch, Replicas(name=name, others=far or NoReplicas(), answers_peers=answers_peers)
    )

    app = web.Application(middlewares=[serve_to(viewer)])
    app.add_routes([*table.routes(), *table.peer_routes()])
    return app


THEIRS = _with(outcome("theirs", got=0.1, choice=0.0, followed=True), seconds=3700.0)


@pytest.fixture
async def other(aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(replica("far", THEIRS, secret()))


@pytest.fixture
def far(other: Client) -> OtherReplicas:
    return OtherReplicas({FAR: other})


async def test_placements_of_all_replicas_are_compared(
    far: OtherReplicas, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(replica("near", OURS, far=far))

    answer = await get(client, REGRET.path)

    pods = [one["pod"] for one in answer["placements"]]
    assert pods[0] == "team/theirs"  # was judged last
    assert set(pods[1:]) == {"team/ours", "hush/secret"}
    assert answer["all"]["placements"] == 3
    assert answer["all"]["got_ratio"] == pytest.approx((0.5 + 0.1 + 0.4) / 3)
    assert (answer["left_out"], answer["watched"]) == (2, 0)
    assert answer["unreachable"] == []
    assert (await get(client, REGRET.path, namespace="team"))["total"] == 2


async def test_pod_decided_by_two_replicas_counts_once_by_the_later(
    far: OtherReplicas, aiohttp_client: MakeClient
) -> None:
    for seconds, choice in ((-1, THEIRS.choice), (1, "elsewhere")):
        own = _with(THEIRS, choice="elsewhere", decided_at=THEIRS.decided_at + seconds)
        client = await aiohttp_client(replica("near", own, far=far))

        placements = (await get(client, REGRET.path))["placements"]

        (theirs,) = [one for one in placements if one["pod"] == "team/theirs"]
        assert theirs["choice"] == choice


async def test_another_replicas_pods_are_hidden_without_rights(
    far: OtherReplicas, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(replica("near", OURS, far=far, viewer=LearnsTeam()))

    text = await (await client.get(REGRET.path)).text()

    assert "team/theirs" in text
    assert "secret" not in text
    assert "hush" not in text


@pytest.mark.parametrize(
    "garbage",
    [None, b"", b"[]", b'{"version":2,"replica":"far","watched":0,"left_out":0,"outcomes":[]}'],
)
async def test_replicas_that_do_not_answer_are_named(
    aiohttp_client: MakeClient, garbage: bytes | None
) -> None:
    far = OtherReplicas({FAR: None}, garbage=garbage)
    client = await aiohttp_client(replica("near", OURS, far=far))

    answer = await get(client, REGRET.path)

    assert [one["pod"] for one in answer["placements"]] == ["team/ours"]
    assert answer["unreachable"] == [FAR]


async def test_our_own_address_adds_nothing_twice(aiohttp_client: MakeClient) -> None:
    far = OtherReplicas()
    client = await aiohttp_client(replica("near", OURS, far=far))
    far.clients = {NEAR: client}

    assert (await get(client, REGRET.path))["left_out"] == 1


async def test_without_tls_replicas_get_no_answer(aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(replica("near", OURS, answers_peers=False))

    assert "without TLS" in (await get(client, _PEERS_PATH, 403))["error"]
