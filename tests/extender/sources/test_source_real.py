"""Series of dcgm-exporter in a real Prometheus, and the readings from them."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest

from extender.core.devices.readings import DeviceKey, Signal
from extender.settings.sources import Prometheus
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.protocol import PrometheusError
from extender.sources.prometheus.worker import _collect_past
from testkit.collecting import EXPORTER, CollectorState
from testkit.controlplane.process import ServerProcess
from testkit.controlplane.scraping import Job, Pages, prometheus_process
from testkit.controlplane.waiting import wait_for
from testkit.prometheus.fake import SAMPLES

pytestmark = pytest.mark.prometheus

TARGET: Final = {key: value for key, value in EXPORTER.items() if key != "job"}
ODD_TARGET: Final = {**TARGET, "pod": "surprise-0", "container": "main", "service": "gpus"}
H100: Final = "GPU-3f1c2a10-7a41-4c0e-9d53-5e0b8c110000"
T4: Final = "GPU-e3b0c442-98fc-1c14-9afb-f4c8996fb924"
SETUPS: Final = ("service-monitor", "honor-labels", "odd-names", "plain")

NEW_NAMES: Final = """
DCGM_FI_DEV_GPU_UTIL_RATIO{gpu="0",UUID="GPU-new",hostname="gpu-2"} 0.7
DCGM_FI_DEV_FB_USED_BYTES{gpu="0",UUID="GPU-new",hostname="gpu-2"} 2147483648
DCGM_FI_DEV_FB_CAPACITY_BYTES{gpu="0",UUID="GPU-new",hostname="gpu-2"} 85899345920
my_power{gpu="0",UUID="GPU-new",hostname="gpu-2"} 250000
"""
BLANKS: Final = """
DCGM_FI_DEV_GPU_UTIL{UUID="GPU-b",Hostname="gpu-1"} 2147483632
DCGM_FI_DEV_FB_USED{UUID="GPU-b",Hostname="gpu-1"} 9223372036854775794
DCGM_FI_DEV_FB_FREE{UUID="GPU-b",Hostname="gpu-1"} NaN
DCGM_FI_DEV_GPU_TEMP{UUID="GPU-b",Hostname="gpu-1"} -1
DCGM_FI_DEV_POWER_USAGE{UUID="GPU-b",Hostname="gpu-1"} +Inf
DCGM_FI_DEV_XID_ERRORS{UUID="GPU-b",Hostname="gpu-1"} 0
"""
ONE: Final = 'DCGM_FI_DEV_GPU_UTIL{{UUID="{uuid}"{labels}}} 10\n'

JOBS: Final = {
    "service-monitor": Job(page="h100", labels=TARGET),
    "honor-labels": Job(page="h100", labels=TARGET, honor_labels=True),
    "plain": Job(page="h100"),
    "odd-names": Job(page="h100", labels=ODD_TARGET, honor_labels=True),
    "replica-a": Job(page="h100", labels={"replica": "a"}),
    "replica-b": Job(page="h100", labels={"replica": "b"}),
    "mig": Job(page="a100"),
    "time-sliced": Job(page="t4", labels=TARGET),
    "time-sliced-plain": Job(page="t4"),
    "unsplit": Job(page="t4-unsplit"),
    "new-names": Job(page="new-names"),
    "blanks": Job(page="blanks"),
    "gap": Job(page="gap"),
    "Hostname": Job(page="Hostname"),
    "hostname": Job(page="hostname"),
    "exported_hostname": Job(page="hostname", labels={"hostname": "prometheus-0"}),
    "pod-name": Job(page="pod-name"),
    "localhost": Job(page="localhost", labels={"instance": "10.244.3.17:9400"}),
    "node": Job(page="localhost", labels={"node": "gpu-1"}),
    "ghost": Job(page="localhost", labels={"node": "ghost", "instance": "10.9.9.9:9400"}),
}


def unsplit(text: str) -> str:
    """Return a scrape as exporters before 4.8.2 write it: each pod's series has the whole value."""
    used = "DCGM_FI_DEV_FB_USED{"
    of_pods = [line for line in text.splitlines() if not line.startswith(used) or "vgpu=" in line]
    return "\n".join(
        f"{line.rsplit(' ', 1)[0]} 10812" if line.startswith(used) else line for line in of_pods
    )


def pages() -> dict[str, str]:
    return {
        "h100": (SAMPLES / "h100_8x_partial_4.5.x.prom").read_text(),
        "a100": (SAMPLES / "a100_mig_4.5.x.prom").read_text(),
        "t4": (SAMPLES / "t4_timesliced_4.8.3.prom").read_text(),
        "t4-unsplit": unsplit((SAMPLES / "t4_timesliced_4.8.3.prom").read_text()),
        "new-names": NEW_NAMES,
        "blanks": BLANKS,
        "gap": ONE.format(uuid="GPU-g", labels=',Hostname="gpu-1"'),
        "Hostname": ONE.format(uuid="GPU-n", labels=',Hostname="gpu-1"'),
        "hostname": ONE.format(uuid="GPU-n", labels=',hostname="gpu-1"'),
        "pod-name": ONE.format(uuid="GPU-n", labels=',Hostname="gpu-metrics-x7z"'),
        "localhost": ONE.format(uuid="GPU-n", labels=',Hostname="localhost"'),
    }


@dataclass(frozen=True, kw_only=True)
class Scraped:
    """A running Prometheus and the pages that it scrapes."""

    process: ServerProcess
    pages: Pages
    url: str

    async def fetch(self, job: str, **values: object) -> CollectorState:
        """Query until the job's series are there."""
        state = CollectorState(self.url, **{"selector": f'job=~"{job}"', **values})

        async def has_answer() -> bool:
            # The second round knows the names; a late scrape hides all series until the next.
            await state.round(time.time())
            found = await state.round(time.time())
            if not state.rows:
                return bool(found.unmatched_series)
            columns = list(found.columns.values())
            return bool((~np.isnan(columns)).any(axis=0).all())

        await wait_for(has_answer, f"series of {job}")
        return state


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    served = Pages()
    served.text.update(pages())
    folder = tmp_path_factory.mktemp("prometheus")
    process = prometheus_process(folder, served.address, JOBS)
    asyncio.run(process.start())
    yield Scraped(process=process, pages=served, url=process.ready_url.removesuffix("/-/ready"))
    asyncio.run(process.stop())
    served.close()


@pytest.fixture
async def client(scraped: Scraped) -> AsyncIterator[PrometheusClient]:
    client = PrometheusClient(Prometheus(url=scraped.url))
    yield client
    client.close()


@pytest.mark.parametrize("setup", SETUPS)
async def test_each_way_to_scrape_gives_the_same_state(scraped: Scraped, setup: str) -> None:
    state = await scraped.fetch(setup)

    assert state.found.failed == {}
    assert [row.node for row in state.rows] == ["gpu-h100-01"] * 8
    assert {row.card_index for row in state.rows} == set(range(8))
    assert {row.model for row in state.rows} == {"NVIDIA H100 80GB HBM3"}
    assert {row.driver_version for row in state.rows} == {"580.95.05"}
    assert state.value(Signal.GPU_UTILIZATION, H100) == pytest.approx(1.0)
    assert state.value(Signal.MEMORY_USED, H100) == 71344 << 20
    assert state.held() == {
        **{str(index): ("team-llm/llama-ft-worker-0",) for index in range(4)},
        "4": ("serving/vllm-70b-6d5f9c7b8d-x2k4p",),
        "5": ("serving/triton-asr-0",),
    }


async def test_setups_agree_in_every_value(scraped: Scraped) -> None:
    def values(state: CollectorState) -> dict[tuple[Signal, DeviceKey], float]:
        return {
            (signal, row.key): float(value)
            for signal, column in state.found.columns.items()
            for row, value in zip(state.rows, column, strict=True)
            if not np.isnan(value)
        }

    async def all_values() -> list[dict[tuple[Signal, DeviceKey], float]] | None:
        found = [values(await scraped.fetch(setup)) for setup in SETUPS]
        # A late scrape hides series until the next, some of them within a round.
        return found if min(map(len, found)) >= 8 * 14 else None

    first, *others = await wait_for(all_values, "every setup has values of 14 signals")

    assert all(other == first for other in others)


async def test_replicas_of_prometheus_collapse(scraped: Scraped) -> None:
    state = await scraped.fetch("replica-.*")

    assert len(state.rows) == 8
    assert state.value(Signal.POWER, H100) < 1000


async def test_age_counts_from_the_scrape_minus_the_collection_interval(scraped: Scraped) -> None:
    state = await scraped.fetch("plain")

    age_seconds = time.time() - state.found.measured_at
    assert (age_seconds >= 30).all()
    assert (age_seconds < 60).all()


async def test_partitioned_and_whole_cards_may_be_mixed(scraped: Scraped) -> None:
    state = await scraped.fetch("mig")

    card = "GPU-5f0d9a3e-11c2-46b7-8a0e-2b8e6d1c7f01"
    assert sorted(row.gpu_instance_id for row in state.rows) == ["", "1", "10", "5", "9"]
    assert np.isnan(state.value(Signal.GPU_UTILIZATION, card, "1"))
    assert state.value(Signal.GRAPHICS_ACTIVE, card, "1") == pytest.approx(0.402311)
    assert state.tenants[DeviceKey((card, "5"))] == ("ds/nb-alice-0",)


async def test_time_sliced_card_has_its_own_value_and_all_its_pods(scraped: Scraped) -> None:
    state = await scraped.fetch("time-sliced")

    assert [row.node for row in state.rows] == ["ip-10-0-31-7.ec2.internal"]
    assert state.value(Signal.GPU_UTILIZATION, T4) == pytest.approx(0.71)
    assert state.value(Signal.MEMORY_USED, T4) == 10812 << 20
    assert state.held() == {"4": ("dev/whisper-5d8b7c9d4-lq8zn", "dev/yolo-0", "ds/nb-bob-0")}


@pytest.mark.parametrize("setup", ["time-sliced", "time-sliced-plain"])
async def test_memory_by_pod_on_a_time_sliced_card_is_returned(
    scraped: Scraped, setup: str
) -> None:
    state = await scraped.fetch(setup)

    assert {(key[0], pod): held >> 20 for key, pod, held in state.found.shares} == {
        (T4, "dev/whisper-5d8b7c9d4-lq8zn"): 6912,
        (T4, "dev/yolo-0"): 2480,
        (T4, "ds/nb-bob-0"): 1410,
    }


async def test_series_with_the_whole_value_give_no_memory_by_pod(scraped: Scraped) -> None:
    state = await scraped.fetch("unsplit")

    assert state.value(Signal.MEMORY_USED, T4) == 10812 << 20
    assert not state.found.shares
    assert [key[0] for key in state.found.divided] == [T4]  # its ids show that it is shared
    assert state.found.failed == {}


async def test_names_and_units_of_today_and_of_the_user(scraped: Scraped) -> None:
    row = {"signal": "power_watts", "unit": "milliwatts"}

    state = await scraped.fetch("new-names", metrics={"my_power": row})

    assert state.value(Signal.GPU_UTILIZATION, "GPU-new") == pytest.approx(0.7)
    assert state.value(Signal.MEMORY_USED, "GPU-new") == 2 << 30
    assert state.value(Signal.MEMORY_TOTAL, "GPU-new") == 80 << 30
    assert state.value(Signal.POWER, "GPU-new") == 250


async def test_both_generations_answer_one_query(scraped: Scraped) -> None:
    state = await scraped.fetch("plain|new-names")

    assert not np.isnan(state.found.columns[Signal.GPU_UTILIZATION]).any()
    assert not np.isnan(state.found.columns[Signal.MEMORY_USED]).any()


async def test_blanks_are_missing_and_never_zero(scraped: Scraped) -> None:
    state = await scraped.fetch("blanks")

    present = {
        signal for signal, column in state.found.columns.items() if not np.isnan(column).all()
    }
    assert present == {Signal.XID}


@pytest.mark.parametrize(
    "job", ["Hostname", "hostname", "exported_hostname", "pod-name", "localhost", "node"]
)
async def test_node_is_found_by(scraped: Scraped, job: str) -> None:
    state = await scraped.fetch(f"^{job}$")

    assert [row.node for row in state.rows] == ["gpu-1"]
    assert state.found.unmatched_series == 0


async def test_a_removed_node_is_unmatched(scraped: Scraped) -> None:
    state = await scraped.fetch("ghost")

    assert state.rows == []
    assert state.found.unmatched_series == 1
    assert 'node="ghost"' in state.found.unmatched_example


async def test_an_empty_scrape_removes_the_devices_until_the_next(scraped: Scraped) -> None:
    state = await scraped.fetch("gap")

    async def has(count: int) -> bool:
        await state.round(time.time())
        return len(state.rows) == count

    scraped.pages.text["gap"] = ""
    await wait_for(lambda: has(0), "devices gone")
    assert state.found.columns == {}
    scraped.pages.text["gap"] = pages()["gap"]
    await wait_for(lambda: has(1), "devices back")


async def test_past_is_read_by_a_range_query(scraped: Scraped, client: PrometheusClient) -> None:
    await scraped.fetch("plain")
    settings = Prometheus(url=scraped.url, selector='job="plain"')

    past = await asyncio.to_thread(
        _collect_past, client, settings, now=time.time(), window_seconds=600
    )

    assert past.utilization.shape == (8, 11)
    assert not np.isnan(past.utilization[:, -1]).any()
    assert np.isnan(past.utilization[:, 0]).all()
    assert past.xid is not None
    assert sorted(past.xid[:, -1].tolist()) == [0, 0, 0, 0, 0, 0, 31, 94]


async def test_an_invalid_selector_is_a_clear_error(scraped: Scraped) -> None:
    state = CollectorState(scraped.url, selector="job=")

    with pytest.raises(PrometheusError, match=re.escape("check prometheus.selector")):
        await state.round(time.time())


async def test_a_killed_prometheus_is_an_error_until_it_returns(scraped: Scraped) -> None:
    state = await scraped.fetch("plain")
    scraped.process.kill()

    with pytest.raises(PrometheusError, match="is Prometheus running"):
        await state.round(time.time())

    await scraped.process.start()

    async def is_back() -> bool:
        try:
            await state.round(time.time())
        except PrometheusError:
            return False
        return len(state.rows) == 8

    await wait_for(is_back, "readings are back")


async def test_only_rows_of_faults_are_parsed_in_unchanged_answers(
    scraped: Scraped, parsing: list[int]
) -> None:
    state = await scraped.fetch("service-monitor")
    parsing.clear()

    await state.round(time.time())

    assert len(state.rows) == 8
    assert sorted(parsing) == [1, 2]  # two XIDs, and one card with remapped rows
