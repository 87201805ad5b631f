from collections.abc import Iterable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from agent.exporter.dcgm_names import DcgmCollector
from agent.exporter.metrics import AgentCollector
from agent.gpu.backend import Call, Code, Extra, ProcessList, ProcessUse, XidEvent
from agent.options import Options
from agent.report.contract import Foreign, Problem, Process, Tenant
from agent.sampler import Sampler
from agent.tenants.attribution import DeviceTenants, DeviceUsage
from extender.core.devices.readings import Signal
from extender.sources.prometheus.dcgm import DEFAULT_METRICS, convert
from testkit.agent.scripted import GIB, IDLE_GPM, ScriptedBackend, ScriptedCard, migs

DASHBOARD_12239 = (
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
)
"""Metrics in the queries of Grafana's dashboard 12239 (NVIDIA DCGM Exporter Dashboard). Each query
filters by `{instance=~"$instance", gpu=~"$gpu"}`; Prometheus adds the label `instance`."""

ALERTED = (
    "DCGM_FI_DEV_FB_FREE",
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
)
"""Further metrics that public alert rules commonly use."""

NVLINK_ERRORS = (
    Extra.NVLINK_CRC_FLITS,
    Extra.NVLINK_CRC_DATA,
    Extra.NVLINK_REPLAYS,
    Extra.NVLINK_RECOVERIES,
)


class Holders:
    """A source of tenants with the answers of the test."""

    def __init__(self, *tenants: tuple[Tenant, ...] | None) -> None:
        self._tenants = tenants
        self.foreign: Foreign | None = None
        self.holders_problem: Problem | None = None
        self.processes_problem: Problem | None = None

    def attribute(self, usages: tuple[DeviceUsage, ...]) -> tuple[DeviceTenants, ...]:
        return tuple(
            DeviceTenants(allocated_to=held, used_by=use.processes, foreign=self.foreign)
            for use, held in zip(usages, self._tenants, strict=True)
        )


async def sampled(*cards: ScriptedCard, holders: Holders | None = None, passes: int = 1) -> Sampler:
    sampler = Sampler(ScriptedBackend(*cards), Options(node="gpu-7"), holders, clock=lambda: NOW)
    for _ in range(passes):
        await sampler.sample()
    sampler.close()
    return sampler


def scrape(sampler: Sampler, *, dcgm: bool = False, after: float = 0.0) -> dict[str, Metric]:
    def clock() -> float:
        return NOW + after

    registry = CollectorRegistry()
    if dcgm:
        registry.register(DcgmCollector(sampler.latest, clock))
    else:
        registry.register(AgentCollector(sampler, clock))
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def busy_card(uuid: str = "GPU-0") -> ScriptedCard:
    card = ScriptedCard(uuid, gpm={**IDLE_GPM, Signal.GRAPHICS_ACTIVE: 0.6})
    card.set(Call.MEMORY, MEMORY_USED=20.0 * GIB)
    card.processes[ProcessList.COMPUTE] = (ProcessUse(pid=7, memory_bytes=20 * GIB),)
    return card


NOW = 1_800_000_000.0
TRAIN = Tenant(namespace="ml", pod="train-0", container="main")


async def test_signals_are_exported_in_base_units_with_their_tenant() -> None:
    found = scrape(await sampled(busy_card(), holders=Holders((TRAIN,))))

    used = found["idlegpu_agent_memory_used_bytes"]
    labels = ("uuid", "gpu", "namespace", "pod", "container")
    assert values(used, *labels) == {("GPU-0", "0", "ml", "train-0", "main"): 20.0 * GIB}
    assert values(found["idlegpu_agent_graphics_active_ratio"], "uuid") == {("GPU-0",): 0.6}
    assert values(found["idlegpu_agent_power_watts"], "uuid") == {("GPU-0",): 80.0}
    assert values(found["idlegpu_agent_sm_clock_hertz"], "uuid") == {("GPU-0",): 1.98e9}
    assert values(found["idlegpu_agent_energy_joules"], "uuid") == {("GPU-0",): 1000.0}
    assert found["idlegpu_agent_energy_joules"].type == "counter"


async def test_a_shared_device_has_a_series_for_each_tenant() -> None:
    shared = (
        Tenant(namespace="a", pod="p", replicas=("0", "2")),
        Tenant(namespace="b", pod="q", replicas=("1",)),
    )

    found = scrape(await sampled(busy_card(), holders=Holders(shared)))

    assert values(found["idlegpu_agent_power_watts"], "pod") == {("",): 80.0}
    tenants = values(found["idlegpu_agent_device_tenant"], "namespace", "pod", "replica")
    assert set(tenants) == {("a", "p", "0"), ("a", "p", "2"), ("b", "q", "1")}


async def test_process_memory_is_summed_by_place() -> None:
    holders = Holders((TRAIN,))
    holders.foreign = Foreign(memory_bytes=5 * GIB, pids=(7,))
    found = scrape(await sampled(busy_card(), holders=holders))

    process = values(found["idlegpu_agent_process_memory_bytes"], "uuid", "place")
    assert process == {("GPU-0", "unknown"): 20.0 * GIB}
    assert values(found["idlegpu_agent_foreign_memory_bytes"], "uuid") == {("GPU-0",): 5.0 * GIB}


async def test_unknown_values_have_no_sample() -> None:
    card = busy_card()
    card.values[Call.RATES] = {}
    backend = ScriptedBackend(card)
    backend.faults[Call.POWER, "GPU-0"] = Code.Unknown
    sampler = Sampler(backend, Options(node="gpu-7"))
    await sampler.sample()
    sampler.close()

    found = scrape(sampler)

    assert "idlegpu_agent_power_watts" not in found
    assert values(found["idlegpu_agent_foreign_memory_bytes"]) == {}
    failures = values(found["idlegpu_agent_call_failures"], "call", "error")
    assert failures == {("power", "Unknown"): 1.0}


async def test_a_hung_card_has_no_stale_samples() -> None:
    """Stale samples of an idle card would look current."""
    now = 1_800_000_000.0
    backend = ScriptedBackend(busy_card("GPU-0"), busy_card("GPU-1"))
    options = Options(node="gpu-7", call_seconds=0.1)
    sampler = Sampler(backend, options, Holders((TRAIN,), (TRAIN,)), clock=lambda: now)
    await sampler.sample()
    backend.hangs.add((Call.POWER, "GPU-1"))
    now += options.stale_seconds + 1
    sampler.xids.add(XidEvent(uuid="GPU-1", gpu_instance_id=None, xid=43), now)
    await sampler.sample()
    backend.released.set()
    sampler.close()

    found = scrape(sampler, after=now - NOW)
    named = scrape(sampler, dcgm=True, after=now - NOW)

    for name in ("memory_used_bytes", "graphics_active_ratio", "process_memory_bytes"):
        assert values(found[f"idlegpu_agent_{name}"], "uuid").keys() == {("GPU-0",)}
    ages = values(found["idlegpu_agent_device_age_seconds"], "uuid")
    assert ages == pytest.approx({("GPU-0",): 0.0, ("GPU-1",): options.stale_seconds + 1})
    problems = values(found["idlegpu_agent_device_problem"], "uuid", "problem")
    assert problems == {("GPU-1", "Hung"): 1.0}
    for name in ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE"):
        assert values(named[name], "UUID").keys() == {("GPU-0",)}
    assert values(named["DCGM_FI_DEV_XID_ERRORS"], "UUID") == {("GPU-1",): 43.0}


async def test_without_new_passes_samples_disappear_when_stale() -> None:
    sampler = await sampled(busy_card(), holders=Holders((TRAIN,)))
    stale = Options().stale_seconds

    shortly, later = scrape(sampler, after=stale / 2), scrape(sampler, after=stale + 1)

    assert values(shortly["idlegpu_agent_power_watts"], "uuid") == {("GPU-0",): 80.0}
    assert "idlegpu_agent_power_watts" not in later
    assert not values(later["idlegpu_agent_device_idle"])
    assert not values(later["idlegpu_agent_foreign_memory_bytes"])
    assert "DCGM_FI_DEV_GPU_UTIL" not in scrape(sampler, dcgm=True, after=stale + 1)


async def test_verdicts_are_exported() -> None:
    busy, broken = busy_card(), ScriptedCard("GPU-1")
    broken.set(Call.FIELDS, ECC_DOUBLE_BIT_VOLATILE=2.0)

    found = scrape(await sampled(busy, broken))

    idle = values(found["idlegpu_agent_device_idle"], "uuid")
    assert idle == {("GPU-0",): 0.0, ("GPU-1",): 1.0}
    unhealthy = values(found["idlegpu_agent_device_unhealthy"], "uuid", "action")
    assert unhealthy == {("GPU-1", "exclude"): 1.0}


async def test_metrics_of_the_agent_itself_are_exported() -> None:
    ticks = count()
    sampler = Sampler(
        ScriptedBackend(busy_card()),
        Options(node="gpu-7"),
        clock=lambda: NOW,
        monotonic=lambda: float(next(ticks)),
    )
    for _ in range(3):
        await sampler.sample()
    sampler.close()
    found = scrape(sampler, after=7.0)

    assert values(found["idlegpu_agent_passes"]) == {(): 3.0}
    assert values(found["idlegpu_agent_reads_gpus"], "problem") == {("",): 1.0}
    assert values(found["idlegpu_agent_report_age_seconds"]) == {(): 7.0}
    assert values(found["idlegpu_agent_pass_seconds"]) == {(): sampler.pass_seconds}
    assert 3.0 <= sampler.pass_seconds <= next(ticks)


async def test_without_a_driver_the_problem_is_exported_and_no_device() -> None:
    backend = ScriptedBackend()
    backend.faults["start", ""] = Code.DriverNotLoaded
    sampler = Sampler(backend, Options(node="gpu-7"))
    await sampler.sample()
    sampler.close()

    found = scrape(sampler)

    reads = values(found["idlegpu_agent_reads_gpus"], "problem")
    assert reads == {("DriverNotLoaded",): 0.0}
    assert not values(found["idlegpu_agent_watches_xids"])
    assert not values(found["idlegpu_agent_device_info"])


async def test_before_the_first_pass_only_agent_metrics_are_exported() -> None:
    sampler = Sampler(ScriptedBackend(), Options(node="gpu-7"))

    assert "idlegpu_agent_passes" in scrape(sampler)
    assert scrape(sampler, dcgm=True) == {}


async def test_xids_are_counted_and_the_relevant_one_is_exported() -> None:
    sampler = await sampled(busy_card())
    for xid in (48, 43):
        sampler.xids.add(XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=xid), NOW)
    await sampler.sample()
    sampler.close()

    found = scrape(sampler)

    counted = values(found["idlegpu_agent_xid_errors"], "uuid", "xid")
    assert counted == {("GPU-0", "48"): 1.0, ("GPU-0", "43"): 1.0}
    assert values(found["idlegpu_agent_device_xid"], "uuid") == {("GPU-0",): 48.0}


@pytest.mark.parametrize("name", [*DASHBOARD_12239, *ALERTED])
async def test_every_query_of_the_known_dashboard_and_alerts_has_data(name: str) -> None:
    card = busy_card()
    card.values[Call.FIELDS] = {**card.values[Call.FIELDS], **dict.fromkeys(NVLINK_ERRORS, 0.0)}
    sampler = await sampled(card)
    sampler.xids.add(XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=13), NOW)
    await sampler.sample()
    sampler.close()

    found = scrape(sampler, dcgm=True)

    assert values(found[name], "gpu").keys() == {("0",)}


async def test_every_query_has_data_for_mig_instances() -> None:
    card = busy_card()
    card.instances = migs((1, "3g.40gb"), (5, "1g.10gb"))

    found = scrape(await sampled(card), dcgm=True)

    for name in DASHBOARD_12239:
        is_of_card = name in {"DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"}
        assert values(found[name], "GPU_I_ID", "GPU_I_PROFILE").keys() == (
            {("", "")} if is_of_card else {("1", "3g.40gb"), ("5", "1g.10gb")}
        )


async def test_card_values_appear_once_for_all_instances() -> None:
    card = busy_card()
    card.instances = migs((1, "3g.40gb"), (5, "1g.10gb"))
    sampler = await sampled(card, ScriptedCard("GPU-1"), holders=Holders((TRAIN,), (), ()))
    own, dcgm = scrape(sampler), scrape(sampler, dcgm=True)

    for name, value in (("power_watts", 80.0), ("temperature_celsius", 40.0)):
        assert values(own[f"idlegpu_agent_{name}"], "uuid", "gpu_instance_id", "pod") == {
            ("GPU-0", "", ""): value,
            ("GPU-1", "", ""): value,
        }
    assert values(own["idlegpu_agent_energy_joules"], "uuid") == {
        ("GPU-0",): 1000.0,
        ("GPU-1",): 1000.0,
    }
    assert sum(values(dcgm["DCGM_FI_DEV_POWER_USAGE"], "UUID", "GPU_I_ID").values()) == 160.0
    assert values(own["idlegpu_agent_memory_used_bytes"], "uuid", "gpu_instance_id").keys() == {
        ("GPU-0", "1"),
        ("GPU-0", "5"),
        ("GPU-1", ""),
    }
    # An alert on an unhealthy card must name its holder.
    failures = dcgm["DCGM_FI_DEV_ROW_REMAP_FAILURE"]
    assert values(failures, "UUID", "GPU_I_ID").keys() == {
        ("GPU-0", "1"),
        ("GPU-0", "5"),
        ("GPU-1", ""),
    }


async def test_a_card_with_mig_and_no_instances_exports_temperature_and_xids() -> None:
    sampler = await sampled(ScriptedCard("GPU-0", instances=()))
    sampler.xids.add(XidEvent(uuid="GPU-0", gpu_instance_id=None, xid=79), NOW)
    report = await sampler.sample()
    found = scrape(sampler)

    temperature = found["idlegpu_agent_temperature_celsius"]
    assert values(temperature, "uuid", "gpu_instance_id") == {("GPU-0", ""): 40.0}
    assert values(found["idlegpu_agent_device_xid"], "uuid") == {("GPU-0",): 79.0}
    assert "idlegpu_agent_memory_used_bytes" not in found
    (verdict,) = (one.verdict for one in report.devices)
    assert verdict is not None
    assert (verdict.is_idle, verdict.action) == (None, "exclude-node")


async def test_dcgm_names_use_dcgm_units() -> None:
    found = scrape(await sampled(busy_card(), holders=Holders((TRAIN,))), dcgm=True)

    def value(name: str) -> float:
        (one,) = values(found[name]).values()
        return one

    assert value("DCGM_FI_DEV_GPU_UTIL") == pytest.approx(60.0)
    assert value("DCGM_FI_DEV_FB_USED") == 20 * 1024
    assert value("DCGM_FI_DEV_POWER_USAGE") == 80.0
    assert value("DCGM_FI_DEV_SM_CLOCK") == pytest.approx(1980)
    assert value("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION") == 1_000_000.0
    assert value("DCGM_FI_PROF_GR_ENGINE_ACTIVE") == 0.6
    (sample,) = found["DCGM_FI_DEV_GPU_UTIL"].samples
    expected = {
        "gpu": "0",
        "UUID": "GPU-0",
        "device": "nvidia0",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": "gpu-7",
        "namespace": "ml",
        "pod": "train-0",
        "container": "main",
    }
    assert expected.items() <= sample.labels.items()


async def test_without_gpm_utilization_is_exported_under_dcgms_name() -> None:
    card = ScriptedCard("GPU-0", gpm=None)
    card.set(Call.RATES, GPU_UTILIZATION=0.4)

    found = scrape(await sampled(card), dcgm=True)

    assert values(found["DCGM_FI_DEV_GPU_UTIL"], "gpu") == {("0",): 40.0}
    assert "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" not in found, "no source for this value"


async def test_on_a_shared_device_utilization_repeats_per_tenant_and_power_does_not() -> None:
    shared = (
        Tenant(namespace="a", pod="p", replicas=("0",)),
        Tenant(namespace="b", pod="q", replicas=("1",)),
    )

    found = scrape(await sampled(busy_card(), holders=Holders(shared)), dcgm=True)

    used = values(found["DCGM_FI_DEV_FB_USED"], "namespace", "pod", "vgpu")
    assert set(used) == {("a", "p", "0"), ("b", "q", "1")}
    assert values(found["DCGM_FI_DEV_POWER_USAGE"], "pod") == {("",): 80.0}


UNREAD = {
    "DCGM_FI_DEV_SM_CLOCK": (Extra.SM_CLOCK, 1e-6),
    "DCGM_FI_DEV_MEM_CLOCK": (Extra.MEMORY_CLOCK, 1e-6),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": (Extra.ENERGY, 1e3),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": (Extra.PCIE_REPLAYS, 1),
    "DCGM_FI_DEV_ENC_UTIL": (Extra.ENCODER_UTILIZATION, 100),
    "DCGM_FI_DEV_DEC_UTIL": (Extra.DECODER_UTILIZATION, 100),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": (Extra.CORRECTABLE_REMAPPED_ROWS, 1),
    "DCGM_FI_PROF_SM_OCCUPANCY": (Extra.SM_OCCUPANCY, 1),
    "DCGM_FI_PROF_PCIE_TX_BYTES": (Extra.PCIE_SENT, 1),
    "DCGM_FI_PROF_PCIE_RX_BYTES": (Extra.PCIE_RECEIVED, 1),
}
"""Metrics that no decision needs, with the measured value and the factor to DCGM's unit."""


async def test_the_extender_parses_every_dcgm_name() -> None:
    sampler = await sampled(busy_card())
    known = {metric.name for metric in DEFAULT_METRICS}

    assert set(names(scrape(sampler, dcgm=True).values())) <= known | set(UNREAD)


@pytest.mark.parametrize("lacks", [(), (Signal.GRAPHICS_ACTIVE, Signal.MEMORY_COPY_UTILIZATION)])
async def test_the_extender_reads_what_the_agent_measured_under_every_dcgm_name(
    lacks: tuple[Signal, ...],
) -> None:
    sampler = await sampled(busy_card())
    report, node = sampler.latest.report, sampler.latest.node_reading
    assert report is not None
    measured: dict[str, float] = {
        name: at / 128 for at, name in enumerate([*Signal, *Extra], start=1)
    }
    expected = measured | {Signal.GPU_UTILIZATION: measured[Signal.GRAPHICS_ACTIVE]}
    for signal in lacks:
        del measured[signal]
    if lacks:  # further values stand for them
        expected = measured | {Signal.MEMORY_COPY_UTILIZATION: measured[Signal.DRAM_ACTIVE]}
    devices = tuple(replace(device, values=measured) for device in node.devices)
    sampler.latest.publish(report, replace(node, devices=devices))

    found = scrape(sampler, dcgm=True)

    for name, (extra, factor) in UNREAD.items():
        assert values(found[name]).popitem()[1] == pytest.approx(measured[extra] * factor), name
    for metric in DEFAULT_METRICS:
        if metric.name in found:
            exported = np.array(list(values(found[metric.name]).values()))
            (read,) = convert(exported, metric.unit, metric.signal)
            if metric.is_counter:  # of which the extender reads the growth
                assert exported in measured.values(), metric.name
            else:
                assert read == pytest.approx(expected[metric.signal]), metric.name


def names(families: Iterable[Metric]) -> list[str]:
    return [family.name for family in families]


async def test_process_memory_has_pod_labels_and_no_pid() -> None:
    """A pid label would create a new series for each process."""
    found = scrape(await sampled(busy_card(), holders=Holders((TRAIN,))))

    for family in found.values():
        for sample in family.samples:
            assert not {"pid", "process", "name"} & sample.labels.keys()
    assert Process(pid=7).place == "unknown"
