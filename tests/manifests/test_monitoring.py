"""Alerts and dashboard ask for what extender and agent really export."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.controlplane.objects import Object
from tests.controlplane.process import ServerProcess, free_port
from tests.controlplane.tools import binary
from tests.controlplane.waiting import wait_for
from tests.manifests.exported import (
    AGENT_JOB,
    EXTENDER_JOB,
    agent_registry,
    extender_registry,
    serving,
)
from tests.manifests.shipped import OVERLAYS, built, find

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SCRAPE_SECONDS: Final = 0.25
RATE_INTERVAL: Final = "5s"
OURS: Final = re.compile(r"\bidlegpu_[a-z0-9_]+")


def groups() -> list[Object]:
    rule = find(built(OVERLAYS / "monitoring"), "PrometheusRule", "idlegpu")
    found: list[Object] = rule["spec"]["groups"]
    return found


def alerts() -> list[Object]:
    return [rule for group in groups() for rule in group["rules"]]


def dashboard() -> Object:
    item = find(built(OVERLAYS / "monitoring"), "ConfigMap", "idlegpu-dashboard")
    found: Object = json.loads(item["data"]["idlegpu.json"])
    return found


def panel_queries() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"].replace("$__rate_interval", RATE_INTERVAL)


def always(expression: str) -> str:
    """Return an alert's expression as one that has a result while nothing is wrong, too."""
    inner = re.sub(r"^absent\((.*)\)$", r"\1", expression)
    return re.sub(r"(>|==) (?=[\d.]+$)", r"\1 bool ", inner).replace("[15m]", f"[{RATE_INTERVAL}]")


async def exported_names() -> set[str]:
    names = set()
    for registry in (extender_registry(), await agent_registry()):
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            names |= {sample.name for sample in family.samples}
    return names


async def test_every_metric_that_is_asked_for_is_exported() -> None:
    asked = {name for query in panel_queries() for name in OURS.findall(query)}
    asked |= {name for alert in alerts() for name in OURS.findall(alert["expr"])}

    assert len(asked) > 30
    assert asked - await exported_names() == set()


async def test_every_query_has_a_result_in_a_real_prometheus(tmp_path: Path) -> None:
    queries = {query: query for query in panel_queries()}
    queries |= {alert["alert"]: always(alert["expr"]) for alert in alerts()}
    async with (
        serving(extender_registry()) as extender,
        serving(await agent_registry()) as agent,
        aiohttp.ClientSession() as session,
    ):
        process, url = prometheus(tmp_path, {EXTENDER_JOB: extender, AGENT_JOB: agent})
        await process.start()
        try:
            empty = dict(queries)

            async def all_answered() -> bool:
                for name, query in list(empty.items()):
                    if await ask(session, url, query):
                        del empty[name]
                return not empty

            try:
                await wait_for(all_answered, "every query has a result", deadline_seconds=20)
            except TimeoutError as error:
                raise TimeoutError(f"{error}: not these: {list(empty)}") from error
        finally:
            await process.stop()


def test_promtool_finds_nothing_wrong_with_the_alerts(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": groups()}))

    checked = subprocess.run(  # noqa: S603 - our own command, no shell
        [str(binary("promtool")), "check", "rules", "--lint=all", "--lint-fatal", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"SUCCESS: {len(alerts())} rules found" in checked.stdout


def test_every_alert_says_how_grave_it_is_and_what_is_wrong() -> None:
    names = [alert["alert"] for alert in alerts()]

    assert len(set(names)) == len(names)
    assert {alert["labels"]["severity"] for alert in alerts()} == {"critical", "warning", "info"}
    assert all(alert["annotations"]["summary"] for alert in alerts())


def test_every_panel_asks_the_chosen_source_and_explains_itself() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]

    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    assert all(panel["description"] for panel in panels)
    assert {target["datasource"]["uid"] for panel in panels for target in panel["targets"]} == {
        "${datasource}"
    }


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
    pod_monitor = find(items, "PodMonitor", AGENT_JOB)["spec"]
    pod = find(items, "DaemonSet", AGENT_JOB)["spec"]["template"]
    (agent_endpoint,) = pod_monitor["podMetricsEndpoints"]

    assert service["metadata"]["labels"][service_monitor["jobLabel"]] == EXTENDER_JOB
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert pod["metadata"]["labels"][pod_monitor["jobLabel"]] == AGENT_JOB
    assert pod_monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert agent_endpoint["port"] in {port["name"] for port in container["ports"]}


async def ask(session: aiohttp.ClientSession, url: str, query: str) -> list[Object]:
    async with session.get(f"{url}/api/v1/query", params={"query": query}) as response:
        answer = await response.json()
        assert answer["status"] == "success", (query, answer)
        found: list[Object] = answer["data"]["result"]
        return found


def prometheus(folder: Path, targets: dict[str, str]) -> tuple[ServerProcess, str]:
    """Describe a Prometheus that scrapes as the monitors say: job, node and instance."""
    interval = f"{round(SCRAPE_SECONDS * 1000)}ms"
    jobs = [
        {
            "job_name": job,
            "static_configs": [{"targets": [address], "labels": {"node": "gpu-7"}}],
        }
        for job, address in targets.items()
    ]
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": jobs,
    }
    (folder / "prometheus.config").write_text(json.dumps(config))
    port = free_port()
    process = ServerProcess(
        name="monitoring-prometheus",
        command=[
            str(binary("prometheus")),
            f"--config.file={folder / 'prometheus.config'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        folder=folder,
        ready_url=f"http://127.0.0.1:{port}/-/ready",
    )
    return process, f"http://127.0.0.1:{port}"
