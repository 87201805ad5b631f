import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import scheduler
from bench.scheduler_cluster import Bindings, gpu_node
from bench.scheduler_names import GPUS, HELD, gpu_uuid, node_name, tenant_name
from bench.scheduler_prometheus import METRICS, SCRAPE_SECONDS, Gpus
from bench.scheduler_report import Pair, Run, bounds, rows
from bench.scheduler_run import Change, check_asked, parse_metrics
from extender.core.devices.readings import DeviceKey
from extender.settings.config import Prometheus
from extender.sources.prometheus import promql
from extender.sources.prometheus.dcgm import DEFAULT_METRICS
from extender.sources.prometheus.dcgm_devices import device_key, parse_devices
from extender.sources.prometheus.node_identity import NodeIdentity

NOW = 1_800_000_000.0
NODES = 60


def values_of(rows: Iterable[Mapping[str, Any]]) -> dict[DeviceKey | None, float]:
    """Return the value of each device."""
    return {device_key(row["metric"]): float(row["value"][1]) for row in rows}


def pair(shortlist: int, without: float, asked: float, **known: float) -> Pair:
    return Pair(
        without=Run(shortlist=None, pods_per_second=without, scheduling_seconds=0.016),
        asked=Run(shortlist=shortlist, pods_per_second=asked, **known),
    )


# --- the report -----------------------------------------------------------------------------------


def test_the_ratio_is_that_of_each_pair_not_of_the_medians() -> None:
    (row,) = rows([pair(1, 10.0, 10.0), pair(1, 40.0, 20.0), pair(1, 20.0, 30.0)])

    assert (row["pods/s without"], row["pods/s with"]) == ("20.0", "20.0")
    assert (row["ratio: median"], row["least"], row["most"]) == ("1.000", "0.500", "1.500")
    assert row["of each pair"] == "1.00, 0.50, 1.50"


def test_shortlists_that_took_turns_have_a_row_each() -> None:
    pairs = [pair(1, 20.0, 22.0), pair(0, 20.0, 10.0), pair(1, 20.0, 24.0), pair(0, 20.0, 12.0)]

    found = [(row["shortlist"], row["ratio: median"]) for row in rows(pairs)]

    assert found == [(1, "1.150"), ("0 (all)", "0.550")]


def test_what_no_run_knows_is_a_dash() -> None:
    known = {"scheduling_seconds": 0.0125, "filter_seconds": 0.002, "extender_cpu_seconds": 0.003}
    (row,) = rows([pair(1, 20.0, 22.0, **known)])

    took = ["16.00", "12.50", "-", "2.00", "-", "-", "-", "-", "3.00", "-"]
    assert list(row.values())[-10:] == took


def test_the_trivial_handler_is_compared_with_the_same_run() -> None:
    trivial = Run(shortlist=1, pods_per_second=15.0, scheduling_seconds=0.014)
    found = [replace(pair(1, 20.0, 12.0), trivial=trivial), pair(1, 10.0, 10.0)]

    (row,) = rows(found)

    assert row["ratio of the trivial handler"] == "0.750"
    assert row["with the trivial handler, ms"] == "14.00"


@pytest.mark.parametrize(
    ("shortlist", "rate", "is_met"),
    [(100, 19.1, True), (100, 18.9, False), (1, 20.1, True), (1, 19.9, False)],
)
def test_the_default_may_cost_a_twentieth_and_one_node_nothing(
    shortlist: int, rate: float, *, is_met: bool
) -> None:
    (bound,) = bounds([pair(shortlist, 20.0, rate), pair(10, 20.0, 1.0), pair(0, 20.0, 1.0)])

    assert bound.is_met is is_met


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        pytest.param((19.1, 19.5, 22.0), "met", id="all-within"),
        pytest.param((18.0, 19.5, 22.0), "undecided", id="on-both-sides"),
        pytest.param((10.0, 11.0, 18.9), "MISSED", id="none-within"),
    ],
)
def test_where_pairs_spread_over_a_bound_nothing_is_decided(
    rates: tuple[float, ...], verdict: str
) -> None:
    (bound,) = bounds([pair(100, 20.0, rate) for rate in rates])

    assert bound.verdict == verdict
    assert verdict in str(bound)


# --- what is read ---------------------------------------------------------------------------------


def change(text: str, before: str = "") -> Change:
    return Change(before=parse_metrics(before), after=parse_metrics(text))


def test_a_mean_is_that_of_the_run_alone() -> None:
    found = change('took_sum{verb="a"} 7\ntook_count{verb="a"} 5\n', 'took_sum{verb="a"} 1\n')

    assert found.mean("took", verb="a") == pytest.approx(6 / 5)
    assert found.mean("took", verb="b") is None


def test_a_run_in_which_the_extender_was_not_asked_is_an_error() -> None:
    asked = 'idlegpu_requests_total{outcome="answered",verb="filter"} 299\n'

    with pytest.raises(RuntimeError, match="299 of 300 pods"):
        check_asked(change(asked).answered, 300)

    check_asked(change(asked).answered, 299)


# --- the watch ------------------------------------------------------------------------------------


def event(name: str, node: str = "") -> dict[str, Any]:
    spec = {"nodeName": node} if node else {}
    return {"type": "MODIFIED", "object": {"metadata": {"name": name}, "spec": spec}}


async def test_a_pod_is_bound_when_it_is_first_seen_with_a_node() -> None:
    bindings = Bindings()
    for at, seen in enumerate([event("a"), event("b", "n1"), event("a", "n2"), event("b", "n1")]):
        bindings.take(seen, float(at))

    assert await bindings.times(["a", "b"], deadline_seconds=1) == [1.0, 2.0]


@pytest.mark.looptime
async def test_pods_that_are_not_bound_in_time_are_counted() -> None:
    bindings = Bindings()
    bindings.take(event("a", "n1"), 0.0)

    with pytest.raises(TimeoutError, match="1 of 2 pods are bound after 60 s"):
        await bindings.times(["a", "b"], deadline_seconds=60)


def test_a_watch_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="too old"):
        Bindings().take({"type": "ERROR", "object": {"message": "too old"}}, 0.0)


# --- the stand-in for Prometheus ------------------------------------------------------------------


def ask(query: str, now: float = NOW) -> list[dict[str, Any]]:
    data = json.loads(Gpus(NODES).answer(query, now))["data"]
    assert data["resultType"] == "vector"
    rows: list[dict[str, Any]] = data["result"]
    return rows


def test_the_extender_finds_every_gpu_on_its_node_and_fresh() -> None:
    names = [node_name(number) for number in range(NODES)]
    identity = NodeIdentity(names=frozenset(names))
    query = promql.devices_query(METRICS[:1], Prometheus().node_labels, "")

    found = parse_devices(ask(query), identity, Prometheus().node_labels)

    assert found.unmatched_series == 0
    assert len(found.devices) == NODES * GPUS
    row = found.devices[DeviceKey((gpu_uuid(3, 5), ""))]
    assert (row.node, row.card_index) == (names[3], 5)
    assert all(0 <= NOW - at <= SCRAPE_SECONDS for at in found.scraped.values())


def test_every_metric_that_it_names_has_a_value_of_every_gpu() -> None:
    known = {metric.name: metric for metric in DEFAULT_METRICS}

    for name in METRICS:
        values = values_of(ask(promql.metric_query(known[name], "")))
        assert len(values) == NODES * GPUS
        assert np.isfinite(list(values.values())).all()


def test_values_stay_between_scrapes_and_move_with_them() -> None:
    query = promql.metric_query(
        next(m for m in DEFAULT_METRICS if m.name == "DCGM_FI_PROF_GR_ENGINE_ACTIVE"), ""
    )

    def moved(seconds: float) -> float:
        before, after = (values_of(ask(query, NOW + at)) for at in (0.0, seconds))
        return sum(before[key] != after[key] for key in before) / len(before)

    assert moved(0.001) < 0.01
    assert moved(SCRAPE_SECONDS) > 0.9


def test_the_tenants_of_the_api_server_hold_the_first_gpus() -> None:
    rows = ask(promql.relabeled_pods_query(METRICS[:1], ""))

    held = {device_key(row["metric"]): row["metric"]["exported_pod"] for row in rows}
    expected = {
        (gpu_uuid(node, gpu), ""): tenant_name(node) for node in range(NODES) for gpu in range(HELD)
    }
    assert held == expected


def test_an_unknown_query_has_an_empty_answer() -> None:
    assert ask("max by (UUID, uuid, GPU_I_ID) (DCGM_FI_DEV_NO_SUCH{})") == []
    assert ask(promql.plain_pods_query(METRICS[:1], "")) == []


def test_nodes_are_as_many_gpus_as_telemetry_shows() -> None:
    assert gpu_node(0)["status"]["allocatable"]["nvidia.com/gpu"] == str(GPUS)


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["--pairs", "0"], ["--pods", "1"], ["--nodes", "-1"], ["--shortlists", "ten"]],
    ids=" ".join,
)
def test_numbers_that_make_no_run_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scheduler.parser().parse_args(arguments)

    assert "must be" in capsys.readouterr().err
