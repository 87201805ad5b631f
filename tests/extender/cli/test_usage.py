"""GPU-hours of all pods in a period, as text and as JSON."""

import asyncio
import json

from msgspec import convert

from extender.answers.holding import SumsAnswer
from extender.cli.formatting import idle_of, since
from extender.insight.holder_sums import Sums
from extender.insight.usage import _SWEEP_SECONDS
from testkit.cli_serving import Run, build_fleet, runner, serving


def test_usage_of_a_period_is_listed_with_its_sum() -> None:
    fleet = build_fleet()
    fleet.now += _SWEEP_SECONDS
    asyncio.run(fleet.why.usage.sweep())
    with serving(fleet.build_app()) as url:
        run = runner(url)
        shown = run("costs", "--since", "1d")
        as_json = json.loads(run("costs", "--since", "1d", "-n", "team", "-o", "json").stdout)
        nothing = run("costs", "--since", "1d", "-n", "empty")

    rows = [line.split() for line in shown.stdout.splitlines()]
    header = "NAMESPACE OWNER KIND MODEL GPU-HOURS IDLE HOURS COST COST IDLE"
    assert rows[0] == header.split()
    assert ["team", "Job", "H100", "80GB", "HBM3"] in [row[:5] for row in rows]
    began = since(as_json["since"])
    assert rows[-1][:-4] == ["in", "all", "since", *began.split()]
    hours = sum(group["gpu_hours"] for group in as_json["usage"])
    assert as_json["sums"]["gpu_hours"] == hours > 0
    assert nothing.stdout.startswith(f"no GPU-hours are recorded since {began}; ")


def test_options_without_effect_are_refused_with_a_period(run: Run) -> None:
    result = run("costs", "--since", "1d", "--by", "pod", "--idle-for", "1h")

    assert "leave out --by, --idle-for" in " ".join(result.stderr.split())
    assert result.exit_code == 2


def test_idle_mig_instances_have_a_column_of_their_own() -> None:
    only_instances = convert(Sums(instances=3, instances_idle=1).view(), SumsAnswer)
    sums = Sums(gpus=2, gpus_idle=2, instances=3, instances_idle=1)
    both = convert(sums.view(), SumsAnswer)

    assert idle_of(only_instances, has_mig=True) == ["-", "1/3"]
    assert idle_of(both, has_mig=True) == ["2/2", "1/3"]
    assert idle_of(both, has_mig=False) == ["2/2"]
