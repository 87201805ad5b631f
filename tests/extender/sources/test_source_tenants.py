"""Pods that hold each device, for any meaning of Prometheus's labels."""

import time

import pytest

from extender.core.devices.readings import DeviceKey, Signal
from extender.sources.prometheus.dcgm_devices import without_exporters
from testkit.collecting import EXPORTER, NODES, NOW, PLAIN, CollectorState
from testkit.prometheus.fake import FakePrometheus, Series, read_sample, series, util


def _up(target: dict[str, str]) -> Series:
    return Series(labels={"__name__": "up", **target}, value="1")


@pytest.mark.parametrize("has_up", [True, False])
@pytest.mark.parametrize(
    ("target", "honor_labels"),
    [
        pytest.param(EXPORTER, False, id="service-monitor"),
        pytest.param(EXPORTER, True, id="honor-labels"),
        pytest.param(PLAIN, False, id="plain"),
    ],
)
async def test_every_scrape_configuration_gives_the_same_tenants(
    fake: FakePrometheus, target: dict[str, str], honor_labels: bool, has_up: bool
) -> None:
    fake.series = read_sample("h100_8x_partial_4.5.x.prom", target, honor_labels=honor_labels)
    if has_up:
        fake.series.append(_up(target))
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert len(state.rows) == 8
    assert state.held() == {
        **{str(index): ("team-llm/llama-ft-worker-0",) for index in range(4)},
        "4": ("serving/vllm-70b-6d5f9c7b8d-x2k4p",),
        "5": ("serving/triton-asr-0",),
    }


@pytest.mark.parametrize("name", ["gpu-metrics-x7z", "surprising-name-0"])
async def test_an_exporter_with_any_name_is_not_a_tenant(fake: FakePrometheus, name: str) -> None:
    target = {**EXPORTER, "pod": name, "container": "exporter", "service": "gpus", "job": "gpus"}
    fake.series = [*read_sample("h100_8x_partial_4.5.x.prom", target, honor_labels=True)]
    if name not in NODES.exporter_pods:
        fake.series.append(_up(target))
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert sorted(state.held()) == ["0", "1", "2", "3", "4", "5"]


def test_a_pod_with_the_name_of_another_namespaces_exporter_is_a_tenant() -> None:
    rows = [{"metric": {"UUID": "GPU-1", "namespace": "team", "pod": "train-0"}}]

    assert without_exporters(rows, frozenset(), {"train-0", "tenant/train-0"}) == rows
    assert without_exporters(rows, frozenset(), {"team/train-0"}) == []


@pytest.mark.parametrize("other", [{}, {"pod": "metrics-7tk2x"}, {"container": "main"}])
async def test_exporters_with_the_usual_name_are_not_in_the_answer(
    fake: FakePrometheus, other: dict[str, str]
) -> None:
    target = EXPORTER | other
    fake.series = read_sample("h100_8x_partial_4.5.x.prom", target, honor_labels=False)

    await CollectorState(fake.url).round(NOW)

    (plain,) = (request for request in fake.queries if 'exported_pod=""' in request)
    assert fake.evaluate(plain, fake.clock()) == []


async def test_pods_of_an_old_exporter_are_found(fake: FakePrometheus) -> None:
    fake.series = [
        series(
            "dcgm_gpu_utilization", 5, uuid="GPU-1", node="gpu-1", pod_name="a", pod_namespace="ns"
        )
    ]
    state = CollectorState(fake.url)

    await state.round(NOW)

    assert state.held() == {"1": ("ns/a",)}


async def test_without_workloads_tenants_are_unknown(fake: FakePrometheus) -> None:
    fake.series = [util(0)]

    assert (await CollectorState(fake.url).round(NOW)).tenants is None


async def test_after_a_workload_was_seen_no_pods_means_all_idle(fake: FakePrometheus) -> None:
    fake.series = [util(0, pod="a", namespace="ns")]
    state = CollectorState(fake.url)
    await state.round(NOW)
    assert state.held() == {"1": ("ns/a",)}
    fake.series = [util(0)]

    found = await state.round(NOW)

    assert found.tenants == {DeviceKey(("GPU-1", "")): ()}
    assert (await state.round(NOW)).tenants == {}
    assert (await state.round(NOW + 4000)).tenants is None


async def test_tenants_are_unknown_in_a_round_in_which_their_query_fails(
    fake: FakePrometheus,
) -> None:
    fake.series = [util(0, pod="a", namespace="ns")]
    fake.failing = {"exported_pod!="}

    found = await CollectorState(fake.url).round(NOW)

    assert found.tenants is None
    assert "tenants" in found.failed


async def test_a_scrape_during_a_round_never_shows_load_without_its_pod(
    fake: FakePrometheus,
) -> None:
    def scraped(value: int, pod: str) -> list[Series]:
        metrics = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE")
        new = [series(metric, value, UUID="GPU-2", Hostname="gpu-1", pod=pod) for metric in metrics]
        return [util(0, pod="old"), *new]

    before, after = scraped(0, pod=""), scraped(90, pod="new")
    fake.series = before
    state = CollectorState(fake.url)
    await state.round(NOW)
    states: set[tuple[bool, bool]] = set()

    for moment in range(len(fake.queries)):
        fake.series, fake.queries = before, []

        def scrape(moment: int = moment) -> None:
            if len(fake.queries) > moment:
                fake.series = after

        fake.before_answer = scrape
        await state.round(NOW)
        signals = (Signal.GPU_UTILIZATION, Signal.MEMORY_USED, Signal.POWER)
        states.add((any(state.value(signal, "GPU-2") for signal in signals), "2" in state.held()))

    # A pod without load yet is fine: it is starting.
    assert states == {(False, False), (False, True), (True, True)}


async def test_tenants_are_newer_than_the_load_and_not_newer_than_their_query(
    fake: FakePrometheus,
) -> None:
    fake.series = [util(0, pod="a", namespace="ns")]
    arrived: list[float] = []
    fake.before_answer = lambda: arrived.append(time.monotonic())

    began = time.monotonic()
    found = await CollectorState(fake.url).round(NOW)

    def arrival(text: str) -> float:
        return arrived[next(n for n, query in enumerate(fake.queries) if text in query)]

    after = found.tenants_at - NOW
    rounding = 1e-6  # precision of a float for seconds since the epoch
    assert arrival("(DCGM_FI_DEV_GPU_UTIL{})") - arrived[0] <= after + rounding
    assert after - rounding <= arrival("exported_pod") - began


async def test_a_hanging_metric_does_not_cost_the_tenants(
    fake: FakePrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.sources.prometheus.collector.ROUND_TIMEOUTS", 1)
    hanging = "DCGM_FI_DEV_POWER_USAGE"
    fake.series = [util(0, pod="a", namespace="ns"), series(hanging, 70, UUID="GPU-1")]
    fake.hanging = {f"({hanging}"}

    found = await CollectorState(fake.url, timeout_seconds=5).round(NOW)

    assert set(found.failed) == {hanging}
    assert found.tenants == {DeviceKey(("GPU-1", "")): ("ns/a",)}
