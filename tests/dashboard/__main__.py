"""Write Grafana's dashboard: `python -m tests.dashboard`."""

import json
import sys
from collections.abc import Iterable
from typing import Any, Final

from tests.dashboard.panels import HERE, SOURCE, Json
from tests.dashboard.rows import ROWS
from tests.files import ROOT

PATH: Final = ROOT / "manifests/components/grafana-dashboard/dashboard.json"
WIDTH: Final = 24

VARIABLES: Final = {
    "cluster": "label_values(idlegpu_nodes, cluster)",
    "namespace": f"label_values(idlegpu_gpu_hours_total{{{HERE}}}, namespace)",
    "node": f"label_values(idlegpu_agent_passes_total{{{HERE}}}, node)",
    "model": f"label_values(idlegpu_pool_gpus{{{HERE}}}, model)",
}
"""Query for the values of each variable; `All` also matches series without the label."""


def variable(name: str, query: str) -> Json:
    """Build a variable of the dashboard."""
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def panels() -> Iterable[Json]:
    """Yield rows and panels with their positions, from left to right and top to bottom."""
    number, y = 0, 0
    for title, members in ROWS.items():
        is_collapsed = title == list(ROWS)[-1]
        number += 1
        row: Json = {
            "type": "row",
            "id": number,
            "title": title,
            "collapsed": is_collapsed,
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
            "panels": [],
        }
        placed: list[Json] = []
        x, y, height = 0, y + 1, 0
        for panel in members:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            number += 1
            placed.append(panel.json(number, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
        if is_collapsed:
            row["panels"], placed = placed, []
        yield from (row, *placed)


def dashboard() -> Json:
    """Build the dashboard as Grafana's JSON."""
    source = {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }
    return {
        "title": "idlegpu",
        "uid": "idlegpu",
        "tags": ["gpu", "kubernetes", "scheduling"],
        "editable": True,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": [source, *(variable(*one) for one in VARIABLES.items())]},
        "annotations": {"list": []},
        "panels": list(panels()),
    }


def text() -> str:
    """Return the content of the dashboard's file, with a line for each panel and variable."""
    found = dashboard()
    parts = [f" {json.dumps(key)}: {_value(key, value)}" for key, value in found.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _value(key: str, value: Any) -> str:
    if key == "panels":
        return "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ]"
    return json.dumps(value)


def main() -> int:
    """Write the dashboard; return the exit status."""
    PATH.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
