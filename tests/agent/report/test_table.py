import io
from typing import Literal

import msgspec
import pytest
from rich.console import Console

from agent.report.contract import Device, Foreign, Place, Problem, Process, Report, Tenant, Verdict
from agent.report.table import print_report

GIB = 1 << 30


def printed(
    report: Report, width: int = 200, color_system: Literal["standard"] | None = None
) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, color_system=color_system))
    return out.getvalue()


def report(*devices: Device, **signals: tuple[float | None, ...]) -> Report:
    return Report(
        node="gpu-7",
        at=1_800_000_000.0,
        driver_version="580.95.05",
        devices=devices,
        signals=signals,
    )


def test_a_row_shows_the_known_values_of_a_device() -> None:
    device = Device(
        uuid="GPU-1",
        index=3,
        model="NVIDIA H200",
        activity_source="gpm",
        age_seconds=0.0,
        allocated_to=(Tenant(namespace="ml", pod="train-0"),),
        used_by=(
            Process(
                pid=403,
                name="python",
                memory_bytes=60 * GIB,
                place=Place.POD,
                namespace="ml",
                pod="train-0",
            ),
        ),
        verdict=Verdict(is_idle=False, reason="busy 45% (gpm), idle is below 30%"),
    )

    text = printed(
        report(
            device,
            graphics_active_ratio=(0.45,),
            tensor_active_ratio=(0.31,),
            dram_active_ratio=(0.27,),
            memory_used_bytes=(60.0 * GIB,),
            memory_total_bytes=(140.0 * GIB,),
            power_watts=(512.3,),
            power_limit_watts=(700.0,),
            temperature_celsius=(61.0,),
        )
    )

    for expected in (
        "gpu-7, driver 580.95.05, 2027-01-15 08:00:00 UTC",
        "power W",
        "°C",
        "held by",
        "used by",
        "H200",
        "45% graphics",
        "31% tensor",
        "27% memory",
        "60.0 / 140.0",
        "512 / 700",
        "61",
        "ml/train-0: python 403, 60.0 GiB",
        "not idle: busy 45% (gpm), idle is below 30%",
    ):
        assert expected in text


def test_table_shows_unknown_values_as_a_question_mark() -> None:
    free = Device(uuid="GPU-1", index=0, allocated_to=(), used_by=())
    unknown = Device(uuid="GPU-2", index=1)

    text = printed(report(free, unknown))

    assert "no pod" in text
    assert "no process" in text
    row = next(line for line in text.splitlines() if line.startswith("│ 1 "))
    assert row.count("?") >= 7


def test_ill_health_foreign_use_and_old_values_are_shown() -> None:
    device = Device(
        uuid="GPU-1",
        index=0,
        age_seconds=42.0,
        foreign=Foreign(memory_bytes=5 * GIB),
        verdict=Verdict(is_idle=True, reason="busy 0%", action="exclude", cause="XID 79"),
    )

    text = printed(report(device))
    in_color = printed(report(device), color_system="standard")

    for line, color in (
        ("exclude: XID 79", "31"),
        ("foreign use: 5.0 GiB", "35"),
        ("values are 42 s old", "33"),
    ):
        assert line in text
        assert f"\x1b[{color}m{line}" in in_color


def test_the_cause_of_stress_is_shown() -> None:
    verdict = Verdict(
        is_idle=True, reason="busy 0%", stress_ratio=1.0, stress_cause="hardware thermal slowdown"
    )

    text = printed(report(Device(uuid="GPU-1", index=0, verdict=verdict)))

    assert "lower score: hardware thermal slowdown" in text


def test_problems_are_below_the_table() -> None:
    lost = Device(
        uuid="GPU-1",
        index=0,
        verdict=Verdict(is_idle=None, reason="cannot read GPU 0: it is lost"),
        problem=Problem(code="GpuIsLost", text="cannot read GPU 0: it is lost"),
    )

    text = printed(report(lost))

    assert text.splitlines()[-1].strip() == "cannot read GPU 0: it is lost"


def test_what_is_not_known_of_pods_and_processes_is_below_the_table() -> None:
    blind = msgspec.structs.replace(
        report(Device(uuid="GPU-1", index=0)),
        tenants_problem=Problem(code="NoKubelet", text="the kubelet does not answer"),
        processes_problem=Problem(code="OtherNamespace", text="hostPID is off"),
    )

    lines = [line.strip() for line in printed(blind).splitlines()]

    assert lines[-2:] == ["the kubelet does not answer", "hostPID is off"]


def test_an_instance_is_shown_by_card_instance_and_profile() -> None:
    device = Device(uuid="GPU-1", index=2, gpu_instance_id="5", mig_profile="1g.10gb")

    assert "2:5 1g.10gb" in printed(report(device))


def test_a_card_with_mig_and_no_instances_is_shown_as_such() -> None:
    device = Device(uuid="GPU-1", index=2, mig_profile="none")

    assert "2 MIG, no instance" in printed(report(device))


def test_a_narrow_terminal_still_shows_every_device() -> None:
    devices = [Device(uuid=f"GPU-{number}", index=number) for number in range(8)]

    lines = printed(report(*devices), width=80).splitlines()

    assert all(any(line.startswith(f"│ {number} ") for line in lines) for number in range(8))
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("[/x]", "[/x] 7"),
        ("[red]a", "[red]a 7"),
        ("\x1b[31m\x9b2J", "\ufffd[31m\ufffd2J 7"),
        ("a\u202eb", "a\ufffdb 7"),
    ],
    ids=range(4),
)
def test_names_of_processes_and_pods_are_printed_literally(name: str, shown: str) -> None:
    process = Process(pid=7, name=name)
    holder = Tenant(namespace="[/x]", pod="a\x9bb")

    text = printed(report(Device(uuid="GPU-1", used_by=(process,), allocated_to=(holder,))))

    assert shown in text
    assert "[/x]/a\\x9bb" in text
