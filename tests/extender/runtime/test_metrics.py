"""Metrics of an extender without any request yet."""

from typing import Final, NoReturn

import pytest_asyncio
from prometheus_client.metrics import MetricWrapperBase

from extender.app import Extender
from extender.kube.client import KubeClient
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


async def test_metrics_have_each_verb_with_each_outcome(fresh: Extender) -> None:
    (family,) = fresh.metrics.requests.collect()

    seen = {(sample.labels["verb"], sample.labels["outcome"]) for sample in family.samples}

    assert seen == {(verb, outcome) for verb in _VERBS for outcome in RequestOutcome}


async def test_faults_have_a_series_wherever_they_may_happen(fresh: Extender) -> None:
    (family,) = fresh.metrics.faults.collect()

    assert {sample.labels["verb"] for sample in family.samples} == set(_FAULTY)
