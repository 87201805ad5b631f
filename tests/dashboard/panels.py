"""Queries and panels of Grafana's dashboard.

Every replica of the extender counts the whole cluster, so a query takes the maximum over replicas
before it sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Json = dict[str, Any]
SOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}

HERE: Final = 'cluster=~"$cluster"'
MODEL: Final = f'{HERE}, model=~"$model"'
HELD: Final = f'{MODEL}, namespace=~"$namespace"'
NODE: Final = f'{HERE}, node=~"$node"'
RATE: Final = "[$__rate_interval]"

GREEN: Final = "green"
WARN: Final = ((None, GREEN), (1, "orange"))
"""Orange from 1 on."""
BAD: Final = ((None, GREEN), (1, "red"))
SLOW: Final = ((None, GREEN), (0.5, "orange"), (1, "red"))
"""Red from kube-scheduler's usual timeout on, in seconds."""
LONG: Final = ((None, GREEN), (900, "orange"), (3600, "red"))
NONE_LEFT: Final = ((None, "red"), (1, GREEN))
IS_UP: Final = ((None, "red"), (1, GREEN))
PLAIN: Final = ((None, "blue"),)
LEGEND: Final[Json] = {
    "showLegend": True,
    "displayMode": "list",
    "placement": "bottom",
    "calcs": [],
}
REDUCE: Final[Json] = {"calcs": ["lastNotNull"], "fields": "", "values": False}

Steps = Sequence[tuple[float | None, str]]


def once(metric: str, by: str, where: str = HERE, *, labels: str = "") -> str:
    """Return a query for a metric's sum over clusters, each replica's count taken once.

    Args:
        metric: name of the metric, or an expression with WHERE for its selector.
        by: labels of the result.
        where: selector.
        labels: further labels of the metric.
    """
    selected = metric.replace("WHERE", where) if "WHERE" in metric else f"{metric}{{{where}}}"
    every = ", ".join(filter(None, ("cluster", by, labels)))
    grouping = f"by ({by}) " if by else ""
    return f"sum {grouping}(max by ({every}) ({selected}))"


def hours(use: str, by: str, span: str = "$__range") -> str:
    """Return a query for the GPU-hours of one use."""
    where = f'{HELD}, use="{use}"'
    labels = ", ".join(sorted({"namespace", "owner_kind", "model"} - {by}))
    return once(f"increase(idlegpu_gpu_hours_total{{WHERE}}[{span}])", by, where, labels=labels)


def rate(metric: str, by: str, *, over: str = "rate", where: str = HERE) -> str:
    """Return a query for the sum over replicas of a counter's rate."""
    return f"sum by ({by}) ({over}({metric}{{{where}}}{RATE}))"


def quantile(share: float, metric: str, by: str) -> str:
    """Return a query for a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', f'{by}, le'.lstrip(', '))})"


def mean(metric: str, by: str, where: str) -> str:
    """Return a query for the mean of a histogram's values; 0 without values."""
    total, count = (
        rate(f"{metric}_{part}", by, over="increase", where=where) for part in ("sum", "count")
    )
    return f"{total} / clamp_min({count}, 0.001)"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of the dashboard.

    Attributes:
        kind: Grafana's panel type.
        title: title.
        text: description in its tooltip.
        queries: queries by legend, or by name of the column.
        width: width in Grafana's grid of 24 columns.
        height: height in rows of Grafana's grid.
        unit: Grafana's unit.
        steps: thresholds with colors, the first without a value.
        options: options of the panel type.
        custom: options of the panel type's fields.
        rest: further properties.
        is_table: whether queries are instant queries that fill a table.
    """

    kind: str
    title: str
    text: str
    queries: Mapping[str, str]
    width: int = 8
    height: int = 8
    unit: str = "none"
    steps: Steps = PLAIN
    options: Json = field(default_factory=dict)
    custom: Json = field(default_factory=dict)
    rest: Json = field(default_factory=dict)
    is_table: bool = False

    def json(self, number: int, x: int, y: int) -> Json:
        """Return the panel as Grafana's JSON.

        Args:
            number: ID of the panel.
            x: column of the grid.
            y: row of the grid.
        """
        overrides = self.rest.get("overrides", [])
        rest = {key: value for key, value in self.rest.items() if key != "overrides"}
        return {
            "type": self.kind,
            "id": number,
            "title": self.title,
            "description": self.text,
            "datasource": SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {
                "defaults": {
                    "unit": self.unit,
                    "min": 0,
                    "color": {"mode": self._color()},
                    "thresholds": thresholds(self.steps),
                    "custom": self.custom,
                },
                "overrides": overrides,
            },
            "options": self.options,
            "targets": [
                self._target(chr(ord("A") + at), name, expr)
                for at, (name, expr) in enumerate(self.queries.items())
            ],
            **rest,
        }

    def _color(self) -> str:
        """Return the color mode: by series in graphs, by value in other panels."""
        return "palette-classic" if self.kind == "timeseries" else "thresholds"

    def _target(self, ref: str, name: str, expr: str) -> Json:
        kind: Json = {"instant": True, "format": "table"} if self.is_table else {}
        if self.kind == "heatmap":
            kind = {"format": "heatmap"}
        return {
            "refId": ref,
            "datasource": SOURCE,
            "expr": expr,
            **({} if self.is_table else {"legendFormat": name}),
            **kind,
        }


def thresholds(steps: Steps) -> Json:
    """Return thresholds as Grafana's JSON."""
    return {
        "mode": "absolute",
        "steps": [{"value": value, "color": color} for value, color in steps],
    }


def stat(title: str, text: str, query: str, steps: Steps = PLAIN, unit: str = "none") -> Panel:
    """Return a panel with one number; its color changes at the steps."""
    options = {
        "reduceOptions": REDUCE,
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
        "orientation": "auto",
    }
    return Panel(
        kind="stat", title=title, text=text, queries={title: query},
        width=4, height=4, unit=unit, steps=steps, options=options,
    )  # fmt: skip


def graph(
    title: str,
    text: str,
    queries: Mapping[str, str],
    *,
    unit: str = "short",
    steps: Steps = PLAIN,
    stacked: bool = False,
    width: int = 8,
) -> Panel:
    """Return a panel with lines over time; steps beyond the first are drawn as lines."""
    custom: Json = {
        "fillOpacity": 25 if stacked else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none"},
        "thresholdsStyle": {"mode": "dashed" if len(steps) > 1 else "off"},
    }
    options = {"legend": LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}}
    return Panel(
        kind="timeseries", title=title, text=text, queries=queries,
        width=width, unit=unit, steps=steps, options=options, custom=custom,
    )  # fmt: skip


def table(
    title: str,
    text: str,
    queries: Mapping[str, str],
    *,
    first: str,
    colors: Mapping[str, tuple[str, Steps]],
    width: int = 12,
) -> Panel:
    """Return a table: a row for each set of labels, a column for each query.

    Args:
        title: title.
        text: description in its tooltip.
        queries: queries by column.
        first: column to sort by, the highest value first.
        colors: unit and thresholds by column.
        width: width in Grafana's grid of 24 columns.
    """
    names = {f"Value #{chr(ord('A') + at)}": name for at, name in enumerate(queries)}
    if len(queries) == 1:
        names = {"Value": next(iter(queries)), **names}
    merge = {"id": "merge", "options": {}}
    rename = {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}}
    overrides = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [
                {"id": "unit", "value": unit},
                {"id": "thresholds", "value": thresholds(steps)},
                {"id": "custom.cellOptions", "value": {"type": "color-text"}},
            ],
        }
        for name, (unit, steps) in colors.items()
    ]
    options = {
        "frameIndex": 0,
        "showHeader": True,
        "cellHeight": "sm",
        "sortBy": [{"displayName": first, "desc": True}],
    }
    return Panel(
        kind="table", title=title, text=text, queries=queries, width=width,
        options=options, is_table=True,
        custom={"align": "auto", "inspect": False, "filterable": True},
        rest={"transformations": [merge, rename], "overrides": overrides},
    )  # fmt: skip


def timeline(
    title: str, text: str, queries: Mapping[str, str], steps: Steps, width: int = 8
) -> Panel:
    """Return a panel with a bar for each series, colored by its value over time."""
    options = {
        "showValue": "never",
        "rowHeight": 0.9,
        "mergeValues": True,
        "legend": LEGEND,
        "tooltip": {"mode": "single", "sort": "none"},
    }
    custom = {"lineWidth": 0, "fillOpacity": 70}
    return Panel(
        kind="state-timeline", title=title, text=text, queries=queries,
        width=width, steps=steps, options=options, custom=custom,
    )  # fmt: skip


def heat(title: str, text: str, metric: str, where: str, unit: str) -> Panel:
    """Return a heat map of a histogram over time."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Oranges",
            "fill": "dark-orange",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "yAxis": {"unit": unit, "axisPlacement": "left"},
        "rowsFrame": {"layout": "auto"},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": False},
        "filterValues": {"le": 1e-9},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "showValue": "never",
    }
    query = rate(f"{metric}_bucket", "le", over="increase", where=where)
    return Panel(kind="heatmap", title=title, text=text, queries={"{{le}}": query}, options=options)
