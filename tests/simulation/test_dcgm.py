"""Exposition of the simulated exporter: the same labels, in the same order, as example scrapes."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from simulation.dcgm import EXTRA_FIELDS, render
from simulation.devices import DeviceView, Load, PodRef, TenantView
from simulation.models import A100_40GB, H100, MIB, T4, GpuModel
from simulation.nodes import EXPORTER_4_5, EXPORTER_4_8, ExporterBuild, NodeSpec
from tests.simulation.builders import fleet, pod, spec

SAMPLES = Path(__file__).parents[1] / "data" / "dcgm"

SAMPLE_LINE = re.compile(r"(?P<name>\w+)\{(?P<labels>.*)\} (?P<value>\S+)")


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def tenant(namespace: str, name: str, container: str, replica: int = 0) -> TenantView:
    ref = PodRef(namespace=namespace, name=name, container=container)
    return TenantView(pod=ref, replica=replica, load=Load())


def device(
    model: GpuModel,
    index: int,
    uuid: str,
    bus: str,
    tenants: Iterable[TenantView] = (),
    **rest: Any,
) -> DeviceView:
    values: dict[str, Any] = {
        "memory_mib": model.memory_mib,
        "reserved_mib": model.reserved_mib,
        "utilization": 0.0,
        "memory_used_bytes": 0,
    }
    return DeviceView(
        model=model,
        index=index,
        uuid=uuid,
        pci_bus_id=f"00000000:{bus}:00.0",
        tenants=tuple(tenants),
        **(values | rest),
    )


def h100_node() -> str:
    trainer = [tenant("team-llm", "llama-ft-worker-0", "trainer")]
    pods = [trainer] * 4 + [
        [tenant("serving", "vllm-70b-6d5f9c7b8d-x2k4p", "vllm")],
        [tenant("serving", "triton-asr-0", "triton")],
        [],
        [],
    ]
    xids = [0] * 6 + [31, 94]
    buses = ["1A", "3D", "4E", "5E", "9B", "BA", "CB", "DB"]
    return render(
        NodeSpec(name="gpu-h100-01", model=H100, driver_version="580.95.05"),
        [
            device(
                H100,
                index,
                f"GPU-{0x3F1C2A10 + index * 0x01010101:08x}-7a41-4c0e-9d53-5e0b8c11{index:04x}",
                buses[index],
                pods[index],
                xid=xids[index],
            )
            for index in range(8)
        ],
    )


def a100_node() -> str:
    parent = "GPU-5f0d9a3e-11c2-46b7-8a0e-2b8e6d1c7f01"
    instances = [
        ("1", "3g.20gb", [tenant("serving", "bert-6c9f-8xj2l", "infer")]),
        ("5", "2g.10gb", [tenant("ds", "nb-alice-0", "jupyter")]),
        ("9", "1g.5gb", []),
        ("10", "1g.5gb", [tenant("batch", "etl-embed-28fjq", "job")]),
    ]
    whole = device(A100_40GB, 1, "GPU-a2c41b77-93fe-4d0a-b1ce-0f6a1d2e3c02", "0F")
    return render(
        NodeSpec(name="gpu-a100-mig-03", model=A100_40GB, driver_version="570.172.08"),
        [
            *(
                device(A100_40GB, 0, parent, "07", pods, gpu_instance_id=number, profile=profile)
                for number, profile, pods in instances
            ),
            whole,
        ],
    )


def t4_node() -> str:
    pods = [
        tenant("dev", "whisper-5d8b7c9d4-lq8zn", "main", 0),
        tenant("dev", "yolo-0", "main", 1),
        tenant("ds", "nb-bob-0", "nb", 3),
    ]
    card = device(T4, 0, "GPU-e3b0c442-98fc-1c14-9afb-f4c8996fb924", "00", pods, is_shared=True)
    text = render(
        NodeSpec(
            name="ip-10-0-31-7.ec2.internal",
            model=T4,
            driver_version="570.172.08",
            exporter=EXPORTER_4_8,
        ),
        [card],
    )
    return text.replace("00000000:00:00.0", "00000000:00:1E.0")


CASES = pytest.mark.parametrize(
    ("file", "rendered"),
    [
        pytest.param("h100_8x_partial_4.5.x.prom", h100_node(), id="whole-gpus"),
        pytest.param("a100_mig_4.5.x.prom", a100_node(), id="mig"),
        pytest.param("t4_timesliced_4.8.3.prom", t4_node(), id="time-sliced"),
    ],
)


def series(text: str) -> list[tuple[str, str, bool]]:
    """Return name, labels as printed, and whether the value has decimals, line by line."""
    matches = [SAMPLE_LINE.fullmatch(line) for line in text.splitlines() if line[0] != "#"]
    return [(match["name"], match["labels"], "." in match["value"]) for match in matches if match]


@CASES
def test_labels_their_order_and_the_form_of_numbers_are_the_exporters(
    file: str, rendered: str
) -> None:
    assert series(rendered) == series(sample(file))


@CASES
def test_help_and_type_are_the_exporters(file: str, rendered: str) -> None:
    comments = [
        [line for line in text.splitlines() if line.startswith("#")]
        for text in (rendered, sample(file))
    ]

    assert comments[0] == comments[1]


@CASES
def test_the_official_parser_reads_it(file: str, rendered: str) -> None:
    for text in (sample(file), rendered):
        families = list(text_string_to_metric_families(text))

        assert sum(len(family.samples) for family in families) == len(series(text))


def values(text: str, name: str) -> list[float]:
    return [
        float(match["value"])
        for line in text.splitlines()
        if (match := SAMPLE_LINE.fullmatch(line)) and match["name"] == name
    ]


def rendered_node(exporter: ExporterBuild, *, replicas: int = 1) -> str:
    built = fleet(spec(cards=1, replicas=replicas, exporter=exporter))
    for name, utilization in (("a", 0.5), ("b", 0.25))[:replicas]:
        load = Load(utilization=utilization, memory_bytes=1000 * MIB)
        built.place(pod(name), "node-a", "nvidia.com/gpu", load=load)
    return render(built.node("node-a").spec, built.views("node-a"))


def test_units_are_the_exporters() -> None:
    text = rendered_node(EXPORTER_4_5)

    assert values(text, "DCGM_FI_DEV_GPU_UTIL") == [50]
    assert values(text, "DCGM_FI_PROF_GR_ENGINE_ACTIVE") == [0.5]
    assert values(text, "DCGM_FI_DEV_FB_USED") == [1000]
    assert values(text, "DCGM_FI_DEV_FB_FREE") == [H100.memory_mib - H100.reserved_mib - 1000]
    assert values(text, "DCGM_FI_DEV_POWER_USAGE") == [385.0]


def test_processes_of_a_shared_gpu_have_values_besides_the_devices_own() -> None:
    text = rendered_node(EXPORTER_4_8, replicas=2)

    assert values(text, "DCGM_FI_DEV_GPU_UTIL") == [75, 50, 25]
    assert values(text, "DCGM_FI_DEV_FB_USED") == [2000, 1000, 1000]
    assert values(text, "DCGM_FI_PROF_GR_ENGINE_ACTIVE") == [0.75, 0.75]


def test_older_builds_repeat_the_devices_value_for_each_pod() -> None:
    text = rendered_node(ExporterBuild(has_virtual_gpus=True), replicas=2)

    assert values(text, "DCGM_FI_DEV_GPU_UTIL") == [75, 75]
    assert text.count('vgpu="1"') > 0


def test_without_virtual_gpus_a_shared_gpu_names_its_last_pod_alone() -> None:
    text = rendered_node(EXPORTER_4_5, replicas=2)

    assert values(text, "DCGM_FI_DEV_GPU_UTIL") == [75]
    assert 'pod="b"' in text
    assert 'pod="a"' not in text
    assert "vgpu" not in text


def test_an_exporter_without_kubernetes_names_no_pod() -> None:
    assert "pod=" not in rendered_node(ExporterBuild(has_pods=False))


def test_an_xid_shows_on_builds_that_print_none_before() -> None:
    built = fleet(spec(exporter=EXPORTER_4_8))
    node = built.node("node-a")

    before = render(node.spec, built.views("node-a"))
    built.set_xid("node-a", 1, 79)
    after = render(node.spec, built.views("node-a"))

    assert values(before, "DCGM_FI_DEV_XID_ERRORS") == []
    assert values(after, "DCGM_FI_DEV_XID_ERRORS") == [79]
    assert 'err_code="79",err_msg="GPU has fallen off the bus"' in after


def test_fields_that_are_off_by_default_are_printed_on_request() -> None:
    plain = rendered_node(EXPORTER_4_5)
    rich = rendered_node(ExporterBuild(extra_fields=EXTRA_FIELDS))

    for name in EXTRA_FIELDS:
        assert values(plain, name) == []
        assert len(values(rich, name)) == 1


def test_short_field_list_lacks_reserved_memory_and_driver() -> None:
    omitted = frozenset({"DCGM_FI_DEV_FB_RESERVED", "DCGM_FI_DRIVER_VERSION"})

    text = rendered_node(ExporterBuild(omitted_fields=omitted))

    assert "FB_RESERVED" not in text
    assert "DRIVER_VERSION" not in text
    assert values(text, "DCGM_FI_DEV_FB_USED") == [1000]


def test_a_node_without_devices_says_nothing() -> None:
    built = fleet(spec(cards=1))
    built.kill_device("node-a", 0)

    assert render(built.node("node-a").spec, built.views("node-a")) == ""
