"""Write the generated parts of the reference pages, and the chart's values.yaml.

    python -m tests.reference

A generated part stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. `tests/test_docs.py`
compares each with the code.
"""

import ast
import asyncio
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from prometheus_client import Metric
from prometheus_client.registry import CollectorRegistry

from agent import config as agent_config
from agent.exporter import metrics
from agent.options import Options
from agent.sampler import Sampler
from extender.api.status_routes import export_ports
from extender.app import Extender
from extender.cli.commands.doctor import CHECKS
from extender.cli.doctor.findings import Check
from extender.core.policy import Health, HealthSign
from extender.kube.client import KubeClient
from extender.settings.config import Settings, all_settings
from extender.settings.reload import _LIVE, _LIVE_PARTS
from extender.settings.section import Section
from extender.settings.service import DecisionLog
from extender.settings.sources import Agents
from extender.settings.spec import render_table
from testkit.agent.scripted import ScriptedBackend, ScriptedCard
from tests.files import ROOT
from tests.reference_api import render_answers, render_routes

PROGRAMS: Final = {
    "python -m extender": "extender/__main__.py",
    "python -m agent": "agent/__main__.py",
    "idlegpu": "extender/cli/transports.py",
}
"""Module with the documented exit statuses of each program."""

CHECK_GROUPS: Final = {
    "IG0": "kube-scheduler and others",
    "IG1": "Telemetry",
    "IG2": "Nodes",
    "IG3": "Pods",
    "IG4": "The extender's own",
}
"""Heading of each hundred of the doctor's codes."""

VALUES: Final = ROOT / "charts" / "idlegpu" / "values.yaml"


def main() -> int:
    """Write every generated part; return the exit status."""
    for path, names in PAGES.items():
        page = ROOT / path
        text = page.read_text(encoding="utf-8")
        for name in names:
            text = replace_part(text, name, PARTS[name]())
        page.write_text(text, encoding="utf-8")
    VALUES.write_text(render_values(), encoding="utf-8")
    return 0


def part_of(text: str, name: str) -> str:
    """Return the generated part of a page.

    Raises:
        ValueError: the page has no such part.
    """
    found = re.search(_pattern(name), text, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no part {name}")
    return found[2]


def replace_part(text: str, name: str, part: str) -> str:
    """Return a page with another generated part.

    Raises:
        ValueError: the page has no such part.
    """
    part_of(text, name)
    return re.sub(_pattern(name), lambda found: found[1] + part + found[3], text, flags=re.DOTALL)


def _pattern(name: str) -> str:
    return rf"(<!-- {name}:begin -->\n)(.*?)(<!-- {name}:end -->)"


def extender() -> Extender:
    """Build an extender that is not started, with all its sources; nothing asks the API server."""
    settings = Settings(agents=Agents(listen="127.0.0.1:9401"), decision_log=DecisionLog(path="-"))
    made = Extender(settings, KubeClient.__new__(KubeClient))
    made.build_app()
    export_ports(made.metrics, [])
    return made


def api_routes() -> set[str]:
    """Return the routes for clients, such as `GET /v1/nodes`, not those of replicas and page."""

    async def collect() -> set[str]:
        app = Extender(Settings(), KubeClient.__new__(KubeClient)).build_app()
        return {
            f"{route.method} {route.resource.canonical}"
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }

    internal = ("/v1/peers/", "/v1/page/", "/page", "/filter", "/prioritize", "/preempt")
    found = asyncio.run(collect())
    return {one for one in found if not one.partition(" ")[2].startswith(internal)} - {"GET /"}


def render_extender_metrics() -> str:
    """Render the table of the extender's metrics."""

    async def collect() -> CollectorRegistry:
        return extender().metrics.registry

    return _render_metrics(asyncio.run(collect()))


def render_agent_metrics() -> str:
    """Render the table of the agent's own metrics; a GPU need not report all of them."""
    sampler = Sampler(ScriptedBackend(ScriptedCard("GPU-0")), Options(node="node"))
    asyncio.run(sampler.sample())
    sampler.close()
    registry = CollectorRegistry()
    report = sampler.latest.report
    assert report is not None
    registry.register(metrics.AgentCollector(sampler, lambda: report.at))
    signals = {metrics.PREFIX + name: text for name, text in metrics._HELP.items()}
    return _render_metrics(registry, signals)


def _render_metrics(registry: CollectorRegistry, more: Mapping[str, str] | None = None) -> str:
    rows: dict[str, str] = {}
    for family in registry.collect():
        labels = _labels_of(family, registry)
        shown = ", ".join(f"`{label}`" for label in labels)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows[name] = f"| `{name}` | {family.type} | {shown} | {_cell(family.documentation)} |"
    for name, text in (more or {}).items():
        kind = "counter" if name.endswith("_total") else "gauge"
        rows[name] = f"| `{name}` | {kind} | as `idlegpu_agent_device_idle` | {_cell(text)} |"
    header = "| metric | type | labels | meaning |\n|---|---|---|---|"
    return "\n".join([header, *(rows[name] for name in sorted(rows))]) + "\n"


def _labels_of(family: Metric, registry: CollectorRegistry) -> tuple[str, ...]:
    own: Any = getattr(family, "_labelnames", None)
    if own is None:  # it belongs to no collector, so the metric itself has the labels
        own = getattr(registry._names_to_collectors[family.name], "_labelnames", ())
    return tuple(own)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def render_exit_statuses() -> str:
    """Render the table of exit statuses of every program."""
    rows = ["| program | status | meaning |\n|---|---|---|"]
    for program, module in PROGRAMS.items():
        if program == "idlegpu":
            rows.append("| `idlegpu` | 0 | Success. |")
        tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
        rows += [f"| `{program}` | {value} | {text} |" for value, text in _documented(tree)]
    return "\n".join(rows) + "\n"


def _documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield value and docstring of the exit statuses of a module, in order."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for body in bodies:
        for statement, following in pairwise(body):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=int(value))),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if name.startswith("EXIT_"):
                    yield value, " ".join(text.split())
                case (
                    ast.Assign(targets=[ast.Name()], value=ast.Constant(value=int(value))),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    yield value, " ".join(text.split())
                case _:
                    pass


def render_checks() -> str:
    """Render the tables of the doctor's checks, one for each hundred of the codes."""
    parts = []
    for hundred, title in CHECK_GROUPS.items():
        rows = [_check_row(check) for check in CHECKS if check.code.startswith(hundred)]
        header = "| code | what should hold | finds | remedy |\n|---|---|---|---|"
        parts.append("\n".join([f"## {title}\n", header, *rows]) + "\n")
    return "\n".join(parts)


def _check_row(check: Check) -> str:
    text, _, remedy = inspect.cleandoc(check.find.__doc__ or "").partition("\n\nRemedy: ")
    cells = [check.code, check.title, " ".join(text.removeprefix("Find ").split()), remedy]
    shown = (" ".join(cell.split()) for cell in cells)
    row = " | ".join(_cell(cell[:1].upper() + cell[1:]) for cell in shown)
    linked = re.sub(r"docs/([a-z/-]+[.]md(?:#[a-z-]+)?)", r"[\1](\1)", row)
    return f"| {linked} |"


def render_restart() -> str:
    """Render the list of the settings that need a restart."""
    names = []
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        section = kind if isinstance(kind, type) and issubclass(kind, Section) else None
        if name in _LIVE:
            continue
        if section is not None and name in _LIVE_PARTS:
            parts = [part for part in section.model_fields if part not in _LIVE_PARTS[name]]
            names += [f"{name}.{part}" for part in parts]
        else:
            names.append(name if section is None else f"{name}.*")
    text = ", ".join(f"`{name}`" for name in names)
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False) + "\n"


def render_values() -> str:
    """Render the chart's values.yaml from the descriptions and defaults in its schema."""
    schema = json.loads(VALUES.with_name("values.schema.json").read_text(encoding="utf-8"))
    header = "# Written by `python -m tests.reference` from values.schema.json.\n"
    return header + "".join(_values(schema, schema["$defs"], ""))


def _values(schema: Mapping[str, Any], shared: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of each property that has a default, or properties with one."""
    for name, own in schema["properties"].items():
        value = {**shared.get(own.get("$ref", "").removeprefix("#/$defs/"), {}), **own}
        if "default" not in value and "properties" not in value:
            continue
        text = value.get("description", "")
        lines = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
        start = "" if indent else "\n"
        yield start + "".join(f"{indent}# {line}\n" for line in lines) + f"{indent}{name}:"
        if "default" in value:
            yield f" {json.dumps(value['default'])}\n"
        else:
            yield "\n"
            yield from _values(value, shared, f"{indent}  ")


def render_signs() -> str:
    """Render a Markdown table with one row for each health sign."""
    health = Health()
    rows = (f"| `{sign}` | `{getattr(health, sign)}` | {sign.description} |" for sign in HealthSign)
    header = "| sign | default action | applies if |\n|---|---|---|"
    return "\n".join([header, *rows]) + "\n"


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "restart": render_restart,
    "settings": lambda: render_table(all_settings().values()),
    "signs": render_signs,
    "agent-settings": lambda: render_table(agent_config.all_settings().values()),
    "metrics": render_extender_metrics,
    "agent-metrics": render_agent_metrics,
    "exit-statuses": render_exit_statuses,
    "checks": render_checks,
    "routes": render_routes,
    "answers": render_answers,
}
"""Function that renders each generated part, by name."""

PAGES: Final = {
    "docs/settings.md": ("restart", "settings", "signs", "agent-settings"),
    "docs/metrics.md": ("metrics", "agent-metrics"),
    "docs/command-line.md": ("exit-statuses",),
    "docs/doctor.md": ("checks",),
    "docs/api-routes.md": ("routes", "answers"),
}
"""Generated parts of each page."""

if __name__ == "__main__":
    sys.exit(main())
