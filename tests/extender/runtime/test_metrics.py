"""Metrics of an extender without any request yet."""

import math
from itertools import pairwise
from typing import Final, NoReturn

import pytest
import pytest_asyncio
from prometheus_client.metrics import MetricWrapperBase

from extender.app import Extender
from extender.kube.client import KubeClient
from extender.runtime.supervision import FAULTS
from extender.settings.config import Settings
from extender.webhook.handlers import _FAULTY, _VERBS, RequestOutcome

ELSEWHERE: Final = {
    "gpu_cost": "no namespace is known beforehand",
    "gpu_hours": "no namespace is known beforehand",
    "held_gpus": "no namespace is known beforehand",
    "held_hour_idle_gpus": "no namespace is known beforehand",
    "held_idle_gpus": "no namespace is known beforehand",
    "admissions": "the webhook creates them, which is off by default",
    "settings_reloads": "the reloader creates them, which there is where there is a file",
}


@pytest_asyncio.fixture
async def fresh() -> Extender:
    return Extender(Settings(), KubeClient(_no_login))


async def _no_login() -> NoReturn:
    raise AssertionError("no request to the API server is expected here")


async def test_every_series_that_can_be_known_beforehand_starts_at_0(fresh: Extender) -> None:
    labelled = {
        name: metric
        for name, metric in vars(fresh.metrics).items()
        if isinstance(metric, MetricWrapperBase) and metric._labelnames
    }

    without = {
        name for name, metric in labelled.items() if not next(iter(metric.collect())).samples
    }
    values = {
        sample.value
        for metric in labelled.values()
        for family in metric.collect()
        for sample in family.samples
    }

    assert len(labelled) > 8
    assert without == set(ELSEWHERE)
    assert values == {0.0}


async def test_what_pods_hold_is_counted_by_namespace_kind_of_owner_and_model(
    fresh: Extender,
) -> None:
    held_by = ("namespace", "owner_kind", "model")

    for name, reason in ELSEWHERE.items():
        if reason == "no namespace is known beforehand":
            last = "use" if name.startswith("gpu") else "device"
            assert getattr(fresh.metrics, name)._labelnames == (*held_by, last), name


@pytest.mark.parametrize(
    ("name", "least", "most"), [("between_verbs", 0.0005, 5.0), ("feasible", 1.0, 10_000.0)]
)
async def test_buckets_grow_by_at_most_two_and_a_half_times(
    fresh: Extender, name: str, least: float, most: float
) -> None:
    (family,) = getattr(fresh.metrics, name).collect()

    bounds = [float(one.labels["le"]) for one in family.samples if "le" in one.labels]

    *bounds, infinite = [bound for bound in bounds if bound]
    assert (bounds[0], bounds[-1], infinite) == (least, most, math.inf)
    assert all(f"{bound:.3e}"[:5] in {"1.000", "2.000", "5.000"} for bound in bounds)
    # above a second it is only late
    assert all(
        sooner < later <= 2.5 * sooner or (name, sooner) == ("between_verbs", 1.0)
        for sooner, later in pairwise(bounds)
    )


async def test_failures_of_background_tasks_are_exported(fresh: Extender) -> None:
    FAULTS["of this test"] += 2

    name, task = "idlegpu_background_faults_total", {"task": "of this test"}
    assert fresh.metrics.registry.get_sample_value(name, task) == 2.0
    del FAULTS["of this test"]


async def test_metrics_have_each_verb_with_each_outcome(fresh: Extender) -> None:
    (family,) = fresh.metrics.requests.collect()

    seen = {(sample.labels["verb"], sample.labels["outcome"]) for sample in family.samples}

    assert seen == {(verb, outcome) for verb in _VERBS for outcome in RequestOutcome}


async def test_messages_of_replicas_have_a_series_for_each_result_before_the_first(
    fresh: Extender,
) -> None:
    (messages,) = fresh.metrics.peer_messages.collect()
    (peers,) = fresh.metrics.peers.collect()

    assert {(one.labels["direction"], one.labels["outcome"]) for one in messages.samples} == {
        ("sent", "taken"),
        ("sent", "failed"),
        ("received", "taken"),
        ("received", "refused"),
    }
    assert {one.labels["state"] for one in peers.samples} == {"known", "answering"}


async def test_faults_have_a_series_wherever_they_may_happen(fresh: Extender) -> None:
    (family,) = fresh.metrics.faults.collect()

    assert {sample.labels["verb"] for sample in family.samples} == set(_FAULTY)
