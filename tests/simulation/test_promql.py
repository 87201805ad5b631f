"""The subset of PromQL: what is understood, what it answers, what is refused."""

import pytest

from extender.sources.prometheus import promql as product
from extender.sources.prometheus.dcgm import DEFAULT_METRICS, build_table
from simulation.promql import EvaluationError, PromqlError, evaluate, parse
from simulation.samples import SampleStore, Series, parse_scrape, with_target_labels

NOW = 1_800_000_000.0

SCRAPE = """\
# TYPE util gauge
util{gpu="0",UUID="GPU-0",Hostname="a",pod="x"} 40
util{gpu="0",UUID="GPU-0",Hostname="a",pod="y"} 30
util{gpu="1",UUID="GPU-1",Hostname="a"} 7.5
temp{gpu="0",UUID="GPU-0",Hostname="a",pod="x"} 61
temp{gpu="2",UUID="GPU-2",Hostname="b"} 30
up{job="dcgm",pod="exporter"} 1
"""


@pytest.fixture
def store() -> SampleStore:
    built = SampleStore()
    built.ingest("target", NOW, parse_scrape(SCRAPE))
    return built


def answer(store: SampleStore, query: str, at: float = NOW) -> list[tuple[dict[str, str], float]]:
    return [(dict(item.labels), item.value) for item in evaluate(parse(query), store, at)]


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("util", [40, 30, 7.5]),
        ("util{}", [40, 30, 7.5]),
        ('util{pod="x"}', [40]),
        ("util > 30", [40]),
        ("max by (gpu) (util > 7) ", [40, 7.5]),
        ('util{pod!="x", gpu="0",}', [30]),
        ('util{pod=""}', [7.5]),
        ('util{pod!=""}', [40, 30]),
        ('util{pod=~"x|y"}', [40, 30]),
        ('util{Hostname=~"a.+"}', []),
        ('util{pod!~"x.*"}', [30, 7.5]),
        ('{__name__=~"util|temp",gpu="0"}', [40, 30, 61]),
        ("nothing", []),
        ("(util)", [40, 30, 7.5]),
    ],
)
def test_selectors_choose_series_by_name_and_labels(
    store: SampleStore, query: str, values: list[float]
) -> None:
    assert [value for _, value in answer(store, query)] == values


def test_a_count_is_compared_with_what_it_was(store: SampleStore) -> None:
    store.ingest("target", NOW + 600.0, parse_scrape(SCRAPE.replace("} 40", "} 42")))

    grown = "max by (UUID) (util) - max by (UUID) (util offset 10m) > 0"
    assert answer(store, grown, NOW + 600.0) == [({"UUID": "GPU-0"}, 2.0)]
    assert answer(store, "util - util", NOW) == [
        ({"gpu": "0", "UUID": "GPU-0", "Hostname": "a", "pod": "x"}, 0.0),
        ({"gpu": "0", "UUID": "GPU-0", "Hostname": "a", "pod": "y"}, 0.0),
        ({"gpu": "1", "UUID": "GPU-1", "Hostname": "a"}, 0.0),
    ]
    assert answer(store, "util - temp offset 10m", NOW) == []


@pytest.mark.parametrize(
    ("operator", "values"),
    [
        ("max", [40, 7.5]),
        ("min", [30, 7.5]),
        ("sum", [70, 7.5]),
        ("avg", [35, 7.5]),
        ("count", [2, 1]),
        ("group", [1, 1]),
    ],
)
def test_aggregations_fold_series_of_equal_labels(
    store: SampleStore, operator: str, values: list[float]
) -> None:
    expected = [({"UUID": f"GPU-{index}"}, value) for index, value in enumerate(values)]

    assert answer(store, f"{operator} by (UUID, absent) (util)") == expected
    assert answer(store, f"{operator}(util) by (UUID)") == expected


def test_an_aggregation_without_labels_gives_one_element(store: SampleStore) -> None:
    assert answer(store, "max(util)") == [({}, 40)]


def test_an_aggregation_may_keep_the_name(store: SampleStore) -> None:
    names = answer(store, 'group by (__name__) ({__name__=~"util|temp|gone"})')

    assert names == [({"__name__": "util"}, 1), ({"__name__": "temp"}, 1)]


def test_timestamp_is_the_time_of_the_sample_and_drops_the_name(store: SampleStore) -> None:
    assert answer(store, 'timestamp(util{gpu="1"})', NOW + 100) == [
        ({"gpu": "1", "UUID": "GPU-1", "Hostname": "a"}, NOW)
    ]


def test_timestamp_of_several_metrics_is_refused_as_by_the_real_one(store: SampleStore) -> None:
    with pytest.raises(EvaluationError, match="same labelset"):
        answer(store, 'timestamp({__name__=~"util|temp"})')


def test_or_adds_what_the_left_lacks_for_any_metric(store: SampleStore) -> None:
    assert [value for _, value in answer(store, "util or temp")] == [40, 30, 7.5, 30]


def test_and_keeps_what_matches_on_the_labels(store: SampleStore) -> None:
    assert [value for _, value in answer(store, "temp and on (UUID) (util)")] == [61]
    assert answer(store, "temp and on (UUID) (nothing)") == []


def test_last_over_time_covers_its_whole_window(store: SampleStore) -> None:
    query = 'last_over_time(util{gpu="1"}[2m])'

    assert [value for _, value in answer(store, query, NOW + 119)] == [7.5]
    assert answer(store, query, NOW + 120) == []


def test_max_over_time_returns_the_highest_value_of_its_window(store: SampleStore) -> None:
    store.ingest("target", NOW + 60, parse_scrape(SCRAPE.replace(" 61", " 50")))

    longer = answer(store, 'max_over_time(temp{gpu="0"}[2m])', NOW + 90)
    shorter = answer(store, 'max_over_time(temp{gpu="0"}[1m])', NOW + 90)

    assert [value for _, value in longer] == [61]
    assert [value for _, value in shorter] == [50]
    assert "__name__" not in longer[0][0]
    assert answer(store, 'max_over_time(temp{gpu="0"}[1m])', NOW + 120) == []


@pytest.mark.parametrize(
    ("at", "count"),
    [(NOW - 1, 0), (NOW, 3), (NOW + 299, 3), (NOW + 300, 0)],
    ids=["before", "at-once", "within-lookback", "beyond-lookback"],
)
def test_a_sample_answers_for_five_minutes(store: SampleStore, at: float, count: int) -> None:
    assert len(answer(store, "util", at)) == count


def test_a_series_that_the_next_scrape_lacks_ends_at_once(store: SampleStore) -> None:
    store.ingest("target", NOW + 10, parse_scrape('util{gpu="1",UUID="GPU-1",Hostname="a"} 8'))

    assert [value for _, value in answer(store, "util", NOW + 10)] == [8]
    assert [value for _, value in answer(store, "util", NOW + 9)] == [40, 30, 7.5]


def test_a_target_ends_no_series_of_another(store: SampleStore) -> None:
    store.ingest("other", NOW + 10, [])

    assert len(answer(store, "util", NOW + 10)) == 3


@pytest.mark.parametrize(
    "query",
    [
        "irate(util[5m])",
        "util * 2",
        "max by (UUID (util)",
        "max by (UUID) util",
        'util{pod="x"',
        "util{pod=x}",
        "util offset",
        "rate(util[5m] offset 5m)",
        "timestamp(util[2m])",
        "last_over_time(util)",
        "util util",
        "{}",
        "",
        "$",
    ],
)
def test_what_is_not_understood_is_refused(query: str) -> None:
    with pytest.raises(PromqlError):
        parse(query)


def test_the_refusal_says_where() -> None:
    with pytest.raises(PromqlError, match="does not understand 'bool 5m' here"):
        parse("util bool 5m")


@pytest.mark.parametrize(
    "query",
    [
        *(product.metric_query(metric, 'cluster="a"') for metric in build_table()),
        product.devices_query(["util", "temp"], ["Hostname", "instance"], ""),
        product.relabeled_pods_query(["util"], ""),
        product.plain_pods_query(["util", "temp"], 'cluster="a"'),
        product.legacy_pods_query(["util"], ""),
        product.exporter_pods_query(["util", "temp"], ""),
        product.names_query([metric.name for metric in DEFAULT_METRICS], ""),
    ],
)
def test_every_query_of_the_extender_is_understood(store: SampleStore, query: str) -> None:
    answer(store, query)


def test_a_range_of_samples_is_no_answer(store: SampleStore) -> None:
    with pytest.raises(EvaluationError):
        answer(store, "util[5m]")


def test_old_samples_are_dropped() -> None:
    series = Series({})
    for second in range(30_000):
        series.append(float(second), 0.0)

    assert len(series.times) <= 10_001
    assert series.times[-1] == 29_999


def test_a_sample_that_is_not_newer_is_dropped() -> None:
    series = Series({})
    series.append(10.0, 1.0)
    series.append(10.0, 2.0)

    assert series.at(10.0) == (10.0, 1.0)


def test_a_broken_scrape_counts_as_none() -> None:
    with pytest.raises(ValueError, match="is no sample"):
        list(parse_scrape("util{} 1\n<html>"))


def test_labels_of_the_target_rename_those_of_the_exposition() -> None:
    labels = with_target_labels({"pod": "worker", "gpu": "0"}, {"pod": "exporter", "job": "dcgm"})

    assert labels == {"exported_pod": "worker", "gpu": "0", "pod": "exporter", "job": "dcgm"}


def test_a_rate_is_what_a_counter_has_grown_by_in_the_window() -> None:
    store = SampleStore()
    for at, value in ((-90, 100), (-50, 4), (-20, 6), (-10, 1), (0, 5)):
        store.ingest("target", NOW + at, [({"__name__": "errors", "UUID": "GPU-0"}, value)])

    # 2 more, then begun anew with 1, then 4 more.
    assert answer(store, "rate(errors[70s])") == [({"UUID": "GPU-0"}, 7 / 70)]
    assert answer(store, "rate(errors[70s]) > 0.2") == []
    assert answer(store, "rate(errors[5s])") == []
