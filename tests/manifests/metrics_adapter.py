"""Stand-in for prometheus-adapter: the external metrics API, with only the example's rule.

An APIService registers it at the API server, as for the real adapter, so that the autoscaler's
controller finds it at the usual path.
"""

import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import aiohttp
import yaml
from aiohttp import web

from testkit.certificates import issue
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ControlPlane

GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = f"{GROUP}/v1beta1"
SERVICE: Final = "metrics-adapter"
NAMESPACE: Final = "default"
DEADLINE_SECONDS: Final = 30.0


def query_of(rule: Object, labels: str) -> str:
    """Return the adapter's PromQL query for a rule, with label matchers."""
    (series,) = re.findall(r'__name__="(\w+)"', rule["seriesQuery"])
    query: str = rule["metricsQuery"]
    return query.replace("<<.Series>>", series).replace("<<.LabelMatchers>>", labels)


def registration(port: int) -> list[Object]:
    """Return the objects that register a port of this machine at the API server."""
    metadata = {"name": SERVICE, "namespace": NAMESPACE}
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec},
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1beta1.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": "v1beta1",
                "service": {"name": SERVICE, "namespace": NAMESPACE, "port": port},
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        },
    ]


def application(rules: list[Object], prometheus_url: str) -> web.Application:
    """Build the application that answers like the adapter.

    Args:
        rules: `externalRules` of its configuration.
        prometheus_url: URL of its Prometheus.
    """
    known = {rule["name"]["as"]: rule for rule in rules}

    async def discover(_: web.Request) -> web.Response:
        resources = [
            {
                "name": name,
                "singularName": "",
                "namespaced": True,
                "kind": "ExternalMetricValueList",
                "verbs": ["get"],
            }
            for name in known
        ]
        return web.json_response(
            {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": VERSION,
                "resources": resources,
            }
        )

    async def answer_metric(request: web.Request) -> web.Response:
        name = request.match_info["metric"]
        if name not in known:
            raise web.HTTPNotFound
        wanted = filter(None, request.query.get("labelSelector", "").split(","))
        labels = ",".join('{}="{}"'.format(*one.split("=", 1)) for one in wanted)
        query = {"query": query_of(known[name], labels)}
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.get(f"{prometheus_url}/api/v1/query", params=query) as response,
        ):
            found = (await response.json())["data"]["result"]
        items = [
            {
                "metricName": name,
                "metricLabels": one["metric"],
                "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "value": one["value"][1],
            }
            for one in found
        ]
        return web.json_response(
            {
                "kind": "ExternalMetricValueList",
                "apiVersion": VERSION,
                "metadata": {},
                "items": items,
            }
        )

    app = web.Application()
    app.router.add_get(f"/apis/{VERSION}", discover)
    app.router.add_get(f"/apis/{VERSION}/namespaces/{{namespace}}/{{metric}}", answer_metric)
    return app


@asynccontextmanager
async def external_metrics(
    plane: ControlPlane, folder: Path, rules: list[Object], prometheus_url: str
) -> AsyncIterator[None]:
    """Serve external metrics through the API server while the context is open."""
    issue(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "extender" / "tls.crt", folder / "extender" / "tls.key")
    runner = web.AppRunner(application(rules, prometheus_url))
    await runner.setup()
    file = folder / "registration.yaml"
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        file.write_text(yaml.safe_dump_all(registration(runner.addresses[0][1])))
        await plane.kubectl("apply", "-f", str(file))
        await plane.kubectl(
            "wait", "--for=condition=Available", f"--timeout={DEADLINE_SECONDS:.0f}s",
            f"apiservice/v1beta1.{GROUP}",
        )  # fmt: skip
        yield
    finally:
        if file.exists():
            await plane.kubectl("delete", "--ignore-not-found", "-f", str(file))
        await runner.cleanup()
