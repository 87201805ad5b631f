"""Checks that the exporter has the fields of the decision for every GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from extender.cli.doctor.checks.fields import _FIELDS, _XIDS
from extender.cli.doctor.fact_collector import parse_exposition
from extender.cli.doctor.facts import Facts, Sample
from extender.core.devices.readings import Signal
from extender.sources.prometheus.dcgm import DEFAULT_METRICS
from tests.extender.cli.doctor.things import NOW, device, evidence, found, node, sample, severities

UTIL, ENGINE = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
USED, FREE = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"
TENSOR, DRAM = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE"
DATA: Final = Path(__file__).parents[4] / "data" / "dcgm"


def scraped(*names: str, **labels: str) -> Facts:
    reported: tuple[Sample, ...] = tuple(
        sample(name, 0.0, UUID="GPU-0", Hostname="node-1", **labels) for name in names
    )
    return Facts(at=NOW, exporter=reported, nodes=(node(),))


@pytest.mark.parametrize("name", range(3))
def test_every_field_that_decides_is_well(name: int) -> None:
    every = [known[min(name, len(known) - 1)] for known in _FIELDS.values()]

    assert found("IG101", scraped(*every)) == []


@pytest.mark.parametrize("file", ["a100_mig_4.5.x", "h100_8x_partial_4.5.x", "t4_timesliced_4.8.3"])
def test_the_defaults_of_an_exporter_are_well(file: str) -> None:
    text = (DATA / f"{file}.prom").read_text(encoding="utf-8")

    assert found("IG101", Facts(at=NOW, exporter=tuple(parse_exposition(text)))) == []


@pytest.mark.parametrize("field", [TENSOR, DRAM])
def test_a_profiling_field_that_is_off_is_a_warning(field: str) -> None:
    facts = scraped(UTIL, ENGINE, USED, FREE, *{TENSOR, DRAM} - {field})

    assert severities("IG101", facts) == ["warning"]
    assert f'"{field}, gauge, ' in found("IG101", facts)[0].remedy


def test_node_without_a_metric_is_reported_although_another_has_it() -> None:
    every = {field: known[0] for field, known in _FIELDS.items()}
    well = [sample(name, 0.0, UUID="GPU-1", Hostname="node-1") for name in every.values()]
    blind = [
        sample(name, 0.0, UUID="GPU-2", Hostname="node-2")
        for name in every.values()
        if name not in {UTIL, ENGINE}
    ]

    facts = Facts(at=NOW, exporter=(*well, *blind))

    assert severities("IG101", facts) == ["error"]
    assert f"not exported: GPU utilization ({UTIL} or" in evidence("IG101", facts)
    assert "1 GPUs of node-2" in evidence("IG101", facts)
    assert "node-1" not in evidence("IG101", facts)


def test_devices_without_their_exporters_metrics_are_checked() -> None:
    scrape = scraped(UTIL, ENGINE, USED, FREE, TENSOR, DRAM).exporter
    blind = device(0, node="node-2", utilization_ratio=None)

    facts = Facts(at=NOW, exporter=scrape, devices=(device(0), blind))

    assert severities("IG101", facts) == ["error"]
    assert evidence("IG101", facts) == "no activity: node-2::0"
    assert found("IG101", replace(facts, devices=(device(0),))) == []


def test_metric_missing_in_exporter_and_extender_is_reported_once() -> None:
    facts = scraped(USED, FREE, TENSOR, DRAM)
    blind = (device(0, utilization_ratio=None),)

    assert severities("IG101", replace(facts, devices=blind)) == ["error"]


def counting(*names: str) -> Facts:
    lines = "\n".join(f"{name}, gauge, what it is" for name in names)
    item = {
        "metadata": {"name": "counters", "namespace": "gpu-operator"},
        "data": {"metrics": f"# Format\n{lines}\n", "other": "a: b"},
    }
    return replace(scraped(UTIL, ENGINE, USED, FREE, TENSOR, DRAM), config_maps=(item,))


def test_counters_without_errors_of_gpus_are_a_warning() -> None:
    facts = counting(UTIL, ENGINE)

    assert severities("IG101", facts) == ["warning"]
    assert "ConfigMap gpu-operator/counters metrics: 2 counters" in evidence("IG101", facts)
    assert '"DCGM_FI_DEV_XID_ERRORS, gauge, ' in found("IG101", facts)[0].remedy


@pytest.mark.parametrize("name", ["DCGM_FI_DEV_XID_ERRORS", "DCGM_EXP_XID_ERRORS_COUNT"])
def test_counters_with_them_are_well(name: str) -> None:
    assert found("IG101", counting(UTIL, name)) == []


def test_profiling_fields_that_are_off_are_a_warning() -> None:
    facts = scraped(UTIL, USED, FREE)

    assert severities("IG101", facts) == ["warning"]
    assert ENGINE in evidence("IG101", facts)
    assert f'"{ENGINE}, gauge, ' in found("IG101", facts)[0].remedy


def test_no_activity_or_no_memory_is_an_error() -> None:
    assert severities("IG101", scraped(USED, FREE)) == ["error"]
    assert severities("IG101", scraped(UTIL, ENGINE)) == ["error"]


def test_an_exporter_that_shows_no_gpu_at_all_is_an_error() -> None:
    facts = Facts(at=NOW, exporter=(sample("DCGM_FI_DRIVER_VERSION"),))

    assert severities("IG101", facts) == ["error"]


def test_instances_have_no_other_activity_than_the_engines() -> None:
    facts = scraped(UTIL, USED, FREE, GPU_I_ID="7")

    assert severities("IG101", facts) == ["error"]
    assert "MIG instances" in evidence("IG101", facts)
    assert "MIG instances" not in evidence("IG101", scraped(UTIL, USED, FREE))
    assert f"exported: {FREE}, {USED}, {UTIL}" in evidence("IG101", facts)


def test_devices_without_activity_are_reported() -> None:
    facts = Facts(at=NOW, devices=(device(0, utilization_ratio=None), device(1)))

    assert severities("IG101", facts) == ["error"]
    assert "no activity: node-1::0" in evidence("IG101", facts)
    assert severities("IG101", Facts(at=NOW, devices=(device(0, memory_used_ratio=None),)))


def test_devices_that_nothing_shows_are_another_matter() -> None:
    dark = device(0, uuid="", utilization_ratio=None, memory_used_ratio=None, freshness="missing")
    old = device(1, utilization_ratio=None, freshness="stale")

    assert found("IG101", Facts(at=NOW, devices=(dark, old, device(2)))) == []


def test_the_fields_are_those_that_the_extender_reads() -> None:
    signals = {
        "GPU utilization": Signal.GPU_UTILIZATION,
        "graphics engine activity": Signal.GRAPHICS_ACTIVE,
        "memory used": Signal.MEMORY_USED,
        "memory free": Signal.MEMORY_FREE,
        "tensor core activity": Signal.TENSOR_ACTIVE,
        "memory interface activity": Signal.DRAM_ACTIVE,
        "SM activity": Signal.SM_ACTIVE,
    }
    for field, names in _FIELDS.items():
        read = {metric.name for metric in DEFAULT_METRICS if metric.signal is signals[field]}
        assert set(names) == read
    assert set(_XIDS) == {m.name for m in DEFAULT_METRICS if m.signal is Signal.XID}


def test_evidence_says_where_a_field_is_missing() -> None:
    assert evidence("IG101", scraped(UTIL, ENGINE, USED, FREE, TENSOR)).splitlines()[0] == (
        f"not exported: memory interface activity ({DRAM} or DCGM_FI_PROF_DRAM_UTIL_RATIO or "
        "dcgm_fi_prof_dram_active)"
    )
    nowhere = Facts(at=NOW, exporter=(sample(UTIL, 0.0, uuid="GPU-0"), sample(USED, UUID="GPU-1")))
    assert "activity (" in evidence("IG101", nowhere)
    assert ": 1 GPUs of ?" in evidence("IG101", nowhere)
    foreign = Facts(at=NOW, exporter=(sample("up"),))
    assert evidence("IG101", foreign).endswith("exported: no field of DCGM")


@pytest.mark.parametrize(
    ("names", "labels", "missing"),
    [
        ((ENGINE, USED, FREE, TENSOR, DRAM), {}, "GPU utilization"),
        ((ENGINE, FREE, TENSOR, DRAM), {"GPU_I_ID": "7"}, "memory used"),
    ],
    ids=["a whole card without it", "an instance without its memory"],
)
def test_only_instances_need_no_utilization_and_nothing_else(
    names: tuple[str, ...], labels: dict[str, str], missing: str
) -> None:
    assert f"not exported: {missing} (" in evidence("IG101", scraped(*names, **labels))


def test_one_card_without_activity_is_an_error_whatever_the_others_lack() -> None:
    instance = scraped(UTIL, USED, FREE, TENSOR, DRAM, GPU_I_ID="7").exporter or ()
    whole = [
        sample(name, 0.0, UUID="GPU-1", Hostname="node-1")
        for name in (UTIL, ENGINE, USED, FREE, TENSOR)
    ]
    facts = Facts(at=NOW, exporter=(*instance, *whole))

    assert severities("IG101", facts) == ["error"]
    assert "there are MIG instances" in evidence("IG101", facts)


def test_the_remedy_names_the_fields_of_the_missing_readings() -> None:
    activity = device(0, utilization_ratio=None, gpu_instance_id="7")
    memory = device(memory_used_ratio=None) | {"index": None}
    one, other = found("IG101", Facts(at=NOW, devices=(activity, memory)))

    assert one.evidence == ("no activity: node-1::0/7",)
    assert one.remedy.startswith(f"have dcgm-exporter export {UTIL}, {ENGINE}: ")
    assert other.evidence == ("no memory: node-1::?",)
    assert other.remedy.startswith(f"have dcgm-exporter export {USED}, {FREE}: ")


def test_only_files_with_counters_are_named() -> None:
    assert evidence("IG101", counting(UTIL, ENGINE)) == (
        "ConfigMap gpu-operator/counters metrics: 2 counters, not DCGM_FI_DEV_XID_ERRORS or "
        "DCGM_FI_DEV_XID_ERROR or DCGM_EXP_XID_ERRORS_COUNT"
    )
