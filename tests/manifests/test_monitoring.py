"""Files of alerts and dashboard; test_monitored.py runs them against real programs."""

import json
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
import yaml

from testkit.controlplane.monitoring import (
    AGENT_JOB,
    EXTENDER_JOB,
    alerts,
    dashboard,
    groups,
    panels,
)
from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import OVERLAYS, built, find
from testkit.controlplane.tools import binary
from tests.dashboard.__main__ import WIDTH
from tests.dashboard.__main__ import dashboard as described

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

FIRST_EVENTS: Final = {
    "IdlegpuPodsBypassed": (
        'idlegpu_pods_bypassed_total{scheduler="volcano",reason="not-called",TARGET}'
    ),
    "IdlegpuXidErrors": 'idlegpu_agent_xid_errors_total{node="gpu-7",uuid="GPU-0",xid="79",TARGET}',
    "IdlegpuAgentDriverHangs": (
        'idlegpu_agent_hung_calls_total{node="gpu-7",call="nvmlInit",TARGET}'
    ),
}
"""Alerts on counters that appear with their first event, and such a series."""


def promtool(*arguments: str) -> str:
    """Run the real promtool, and return its output."""
    done = subprocess.run(
        [str(binary("promtool")), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rule_file(folder: Path) -> Path:
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": groups()}))
    return path


def test_promtool_finds_nothing_wrong_with_the_alerts(tmp_path: Path) -> None:
    path = rule_file(tmp_path)

    said = promtool("check", "rules", "--lint=all", "--lint-fatal", str(path))

    assert f"SUCCESS: {len(alerts())} rules found" in said


TARGET: Final = 'job="any",instance="10.0.0.7:9400"'


@pytest.mark.parametrize("name", FIRST_EVENTS)
@pytest.mark.parametrize(
    ("up", "count"),
    [
        pytest.param("1x90", 1, id="scraped-before"),
        pytest.param("_x30 1x60", 0, id="scraped-from-then-on"),
    ],
)
def test_the_first_event_of_its_kind_alerts_and_an_old_one_no_longer(
    name: str, up: str, count: int, tmp_path: Path
) -> None:
    (alert,) = [each for each in alerts() if each["alert"] == name]
    # It appears after half an hour with its first event, and stays constant.
    values = "_x30 1x60"
    series = [
        {"series": FIRST_EVENTS[name].replace("TARGET", TARGET), "values": values},
        {"series": f"up{{{TARGET}}}", "values": up},
    ]
    at = {"appeared": "37m", "later": "60m"}

    def alerting(moment: str, alerts: int) -> Object:
        expression = f"count({alert['expr']}) or vector(0)"
        sample = {"labels": "{}", "value": alerts}
        return {"expr": expression, "eval_time": moment, "exp_samples": [sample]}

    case = {
        "rule_files": [str(rule_file(tmp_path))],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    alerting("20m", 0),
                    alerting(at["appeared"], count),
                    alerting(at["later"], 0),
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps(case))

    assert "SUCCESS" in promtool("test", "rules", str(path))


LASTING: Final = {
    "IdlegpuGpusHeldIdle": (
        'idlegpu_held_hour_idle_gpus{namespace="team",owner_kind="Job",model="h100",device="gpu",TARGET}',
        "2+0x400",
    ),
    "IdlegpuPodsRefused": (
        'idlegpu_unplaced_longest_seconds{namespace="team",resource="nvidia.com/gpu",model="any",'
        'size="1",refused_by="idlegpu",TARGET}',
        "0+60x400",
    ),
}
"""Alerts on lasting states, and the values of such a series minute by minute."""


@pytest.mark.parametrize(
    ("name", "quiet", "firing"),
    [("IdlegpuGpusHeldIdle", "179m", "181m"), ("IdlegpuPodsRefused", "65m", "67m")],
)
def test_a_state_that_lasts_fires_once_for_all_replicas(
    name: str, quiet: str, firing: str, tmp_path: Path
) -> None:
    series, values = LASTING[name]
    replicas = [TARGET, TARGET.replace("10.0.0.7", "10.0.0.8")]
    fired = f'count(ALERTS{{alertname="{name}",alertstate="firing",namespace="team"}}) or vector(0)'
    tests = [
        {"expr": fired, "eval_time": moment, "exp_samples": [{"labels": "{}", "value": count}]}
        for moment, count in ((quiet, 0), (firing, 1))
    ]
    case = {
        "rule_files": [str(rule_file(tmp_path))],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series.replace("TARGET", target), "values": values}
                    for target in replicas
                ],
                "promql_expr_test": tests,
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps(case))

    assert "SUCCESS" in promtool("test", "rules", str(path))


def test_every_alert_has_a_severity_and_a_description() -> None:
    names = [alert["alert"] for alert in alerts()]

    assert len(set(names)) == len(names)
    assert {alert["labels"]["severity"] for alert in alerts()} == {"critical", "warning", "info"}
    assert all(alert["annotations"]["summary"] for alert in alerts())


def test_the_dashboard_is_the_described_one_and_follows_grafanas_schema() -> None:
    assert dashboard() == described(), "run: python -m tests.dashboard"
    done = subprocess.run(
        [str(binary("dashboardcheck"))],
        input=json.dumps(dashboard()),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_panel_uses_the_chosen_source_and_has_a_description() -> None:
    every = list(panels())
    targets = [target for panel in every for target in panel["targets"]]

    assert len({panel["id"] for panel in every}) == len(every) > 30
    assert all(panel["description"] for panel in every)
    assert {target["datasource"]["uid"] for target in targets} == {"${datasource}"}
    assert [target["expr"] for target in targets if "$cluster" not in target["expr"]] == []


def test_the_open_rows_stay_readable_with_many_nodes() -> None:
    opened = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in opened for target in panel["targets"]]

    by_node = [query for query in queries if re.search(r"\b(node|gpu|uuid|pod)\b[,)]", query)]
    assert [query for query in by_node if not query.startswith("topk(20, ")] == []
    assert {panel["type"] for panel in opened} >= {"stat", "table", "state-timeline", "heatmap"}


def test_panels_do_not_overlap() -> None:
    taken = [
        (x, y)
        for panel in panels()
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < WIDTH


def test_jobs_are_named_as_alerts_expect_and_each_pod_is_scraped_once() -> None:
    items = built(OVERLAYS / "monitoring")
    service_monitor = find(items, "ServiceMonitor", EXTENDER_JOB)["spec"]
    wanted = service_monitor["selector"]["matchLabels"].items()
    (service,) = [
        item
        for item in items
        if item["kind"] == "Service" and wanted <= item["metadata"]["labels"].items()
    ]
    (endpoint,) = service_monitor["endpoints"]
    dropped = {"action": "labeldrop", "regex": "namespace"}
    pod_monitor = find(items, "PodMonitor", AGENT_JOB)["spec"]
    pod = find(items, "DaemonSet", AGENT_JOB)["spec"]["template"]
    (agent_endpoint,) = pod_monitor["podMetricsEndpoints"]

    assert service["metadata"]["labels"][service_monitor["jobLabel"]] == EXTENDER_JOB
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert dropped in endpoint["relabelings"]  # otherwise `namespace` would be the extender's own
    assert pod["metadata"]["labels"][pod_monitor["jobLabel"]] == AGENT_JOB
    assert pod_monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert agent_endpoint["port"] in {port["name"] for port in container["ports"]}
