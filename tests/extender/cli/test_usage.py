"""GPU-hours of all pods in a period, for people and for programs."""

import asyncio
import json

from extender.insight.usage import SWEEP_SECONDS
from testkit.cli_serving import build_fleet, runner, serving


def test_usage_of_a_period_is_listed_with_its_sum() -> None:
    fleet = build_fleet()
    fleet.now += SWEEP_SECONDS
    asyncio.run(fleet.why.usage.sweep())
    with serving(fleet.build_app()) as url:
        run = runner(url)
        shown = run("costs", "--since", "1d")
        as_json = json.loads(run("costs", "--since", "1d", "-n", "team", "-o", "json").stdout)
        nothing = run("costs", "--since", "1d", "-n", "empty")

    rows = [line.split() for line in shown.stdout.splitlines()]
    header = "NAMESPACE OWNER MODEL GPU-HOURS IDLE HOURS COST COST IDLE"
    assert rows[0] == header.split()
    assert ["team", "Job", "h100"] in [row[:3] for row in rows]
    assert rows[-1][:4] == ["in", "all", "since", as_json["since"]]
    hours = sum(group["gpu_hours"] for group in as_json["usage"])
    assert as_json["sums"]["gpu_hours"] == hours > 0
    assert nothing.stdout.startswith("no pod held GPUs since ")
