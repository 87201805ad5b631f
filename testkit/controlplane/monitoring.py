"""Shipped monitoring: alerts, dashboard, and their PromQL queries."""

import json
import re
from collections.abc import Iterator
from typing import Final

from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import OVERLAYS, built, find

EXTENDER_JOB: Final = "idlegpu-extender"
AGENT_JOB: Final = "idlegpu-agent"

OURS: Final = re.compile(r"\bidlegpu_[a-z0-9_]+")

_LIMIT: Final = re.compile(r"(>|==) (?=[\d.]+(?:\)| or|$))")
_INTERVAL: Final = re.compile(r"\$__(?:rate_interval|range)\b")
_VARIABLE: Final = re.compile(r"\$(?:cluster|namespace|node|model)\b")
_SUFFIX: Final = re.compile(r"_(?:bucket|count|sum)$")


def groups() -> list[Object]:
    """Return the groups of alerting rules, as in a rules file of Prometheus."""
    rule = find(built(OVERLAYS / "monitoring"), "PrometheusRule", "idlegpu")
    found: list[Object] = rule["spec"]["groups"]
    return found


def alerts() -> list[Object]:
    """Return the alerting rules."""
    return [rule for group in groups() for rule in group["rules"]]


def dashboard() -> Object:
    """Return the dashboard as Grafana's JSON."""
    item = find(built(OVERLAYS / "monitoring"), "ConfigMap", "idlegpu-dashboard")
    found: Object = json.loads(item["data"]["idlegpu.json"])
    return found


def panels() -> Iterator[Object]:
    """Yield the dashboard's panels, including those in collapsed rows."""
    for panel in dashboard()["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else [panel]


def panel_queries(interval: str) -> Iterator[str]:
    """Yield the panels' queries, with `All` for each variable.

    Args:
        interval: value of Grafana's own variables, such as "1m".
    """
    for panel in panels():
        for target in panel["targets"]:
            expression = _INTERVAL.sub(interval, target["expr"])
            yield _VARIABLE.sub(".*", expression)


def always(expression: str) -> str:
    """Rewrite an alert's expression so that it also has a result while the alert does not fire.

    Example:
        >>> always("sum(increase(a_total[5m]) > 0 or b) > 0.5")
        'sum(increase(a_total[5m]) > bool 0 or b) > bool 0.5'
    """
    return _LIMIT.sub(r"\1 bool ", re.sub(r"^absent\((.*)\)$", r"\1", expression))


def requested_metrics() -> set[str]:
    """Return the names of idlegpu's metrics in all queries; a histogram by its base name."""
    queries = [*panel_queries("1m"), *(alert["expr"] for alert in alerts())]
    return {_SUFFIX.sub("", name) for query in queries for name in OURS.findall(query)}
