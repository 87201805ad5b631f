"""A Prometheus that knows the GPUs of the benchmark and answers what the extender asks of it.

`python -m bench.scheduler_prometheus --nodes 5000 --port 9090`, a process of its own, so that its
work is nobody else's. Every node is scraped every 10 s, each at a time of its own; every 10 s the
values have moved, to one of two sets. What it has written once it writes again: a Prometheus runs
on a machine of its own, and must take little of this one. It is a function of the time, has no
past, and does not compress. The tests use the real Prometheus.
"""

import argparse
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson
from aiohttp import web

from bench.scheduler_names import (
    GPUS,
    HELD,
    MEMORY_MIB,
    MODEL,
    TENANTS,
    gpu_uuid,
    node_name,
    tenant_name,
)
from extender.sources.prometheus.promql import MODEL_LABEL

SCRAPE_SECONDS: Final = 10.0
FOREIGN_EVERY: Final = 50
"""On one node of so many a process outside Kubernetes uses all GPUs that no pod holds."""

SETS: Final = 2
"""Sets of values that take turns."""

Values = npt.NDArray[np.float64]

METRICS: Final = (
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_MEM_COPY_UTIL",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_FB_FREE",
    "DCGM_FI_DEV_FB_RESERVED",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_MEMORY_TEMP",
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_ACTIVE",
)
"""Of dcgm-exporter's default metrics those that the extender reads."""

_OF_METRIC: Final = re.compile(r"^(?:max|min) by \(UUID, uuid, GPU_I_ID\) \((\w+)\{.*\}\)$")


class Gpus:
    """The GPUs of all nodes, as telemetry shows them at any time.

    Args:
        nodes: how many nodes.
    """

    def __init__(self, nodes: int) -> None:
        generator = np.random.default_rng(7)
        count = nodes * GPUS
        self._node = np.repeat(np.arange(nodes), GPUS)
        index = np.tile(np.arange(GPUS), nodes)
        self._is_held = index < HELD
        self._is_foreign = ~self._is_held & (self._node % FOREIGN_EVERY == FOREIGN_EVERY - 1)
        self._own = generator.random(count)  # what makes one GPU differ from the other
        self._delay_seconds = SCRAPE_SECONDS * generator.random(nodes)[self._node]
        uuids = [gpu_uuid(node, gpu) for node in range(nodes) for gpu in range(GPUS)]
        self._heads = [f'{{"metric":{{"UUID":"{uuid}"}},"value":[' for uuid in uuids]
        self._device_heads = [
            _head(
                {
                    "UUID": uuid,
                    "gpu": str(at % GPUS),
                    "modelName": MODEL,
                    "DCGM_FI_DRIVER_VERSION": "580.95.05",
                    "Hostname": node_name(at // GPUS),
                    "instance": f"{node_name(at // GPUS)}:9400",
                }
            )
            for at, uuid in enumerate(uuids)
        ]
        self._tenant_heads = [
            _head(
                {
                    "UUID": uuid,
                    "exported_namespace": TENANTS,
                    "exported_pod": tenant_name(at // GPUS),
                }
            )
            for at, uuid in enumerate(uuids)
            if at % GPUS < HELD
        ]

    def answer(self, query: str, now: float) -> bytes:
        """Answer an instant query.

        Args:
            query: one of those that the extender asks.
            now: seconds since the epoch.
        """
        if "timestamp(" in query:
            heads = self._device_heads if MODEL_LABEL in query else self._heads
            return _vector(heads, self._scraped_at(now), now, "%.3f")
        if 'exported_pod!=""' in query:
            return self._tenants()
        asked = _OF_METRIC.match(query)
        if asked and asked[1] in METRICS:
            return self._metric(asked[1], int(now // SCRAPE_SECONDS) % SETS)
        return _vector((), np.zeros(0), now, "%d")

    @cache  # noqa: B019 - there is one, as long as the process
    def _tenants(self) -> bytes:
        """Return the pods on the GPUs."""
        return _vector(self._tenant_heads, np.ones(len(self._tenant_heads)), 0.0, "%d")

    @cache  # noqa: B019 - likewise
    def _metric(self, metric: str, number: int) -> bytes:
        """Return a metric of each GPU, out of one of the sets."""
        values = self._values(metric, SCRAPE_SECONDS * (number + 1))
        # The extender takes no time from these: it asks for the times of scrapes.
        return _vector(self._heads, values, 0.0, "%.6f" if "_PROF_" in metric else "%d")

    def _scraped_at(self, now: float) -> Values:
        """Return when each GPU was scraped last."""
        return (
            SCRAPE_SECONDS * np.floor((now - self._delay_seconds) / SCRAPE_SECONDS)
            + self._delay_seconds
        )

    def _values(self, metric: str, now: float) -> Values:
        """Return a metric of each GPU, in the exporter's units."""
        # Between two scrapes a value stays as it is; then it is another, near the old one.
        scrape = np.round(self._scraped_at(now) / SCRAPE_SECONDS)
        noise = np.modf(np.abs(np.sin(scrape * 12.9898 + self._own * 78.233) * 43758.5453))[0]
        in_use = self._is_held | self._is_foreign
        busy = np.where(in_use, 0.55 + 0.3 * self._own + 0.15 * noise, 0.004 * self._own * noise)
        used = np.where(in_use, MEMORY_MIB * (0.3 + 0.5 * self._own), 2 + 8 * self._own)
        known: Mapping[str, Values] = {
            "DCGM_FI_DEV_GPU_UTIL": 100 * busy,
            "DCGM_FI_DEV_MEM_COPY_UTIL": 50 * busy,
            "DCGM_FI_DEV_FB_USED": used,
            "DCGM_FI_DEV_FB_FREE": MEMORY_MIB - 600 - used,
            "DCGM_FI_DEV_FB_RESERVED": np.full(len(used), 600.0),
            "DCGM_FI_DEV_POWER_USAGE": 70 + 560 * busy + 20 * noise,
            "DCGM_FI_DEV_GPU_TEMP": 28 + 45 * busy + 8 * self._own + 2 * noise,
            "DCGM_FI_DEV_MEMORY_TEMP": 34 + 45 * busy + 8 * self._own + 2 * noise,
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE": busy,
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.45 * busy,
            "DCGM_FI_PROF_DRAM_ACTIVE": 0.5 * busy,
        }
        return known.get(metric, np.zeros(len(used)))


def _head(labels: Mapping[str, str]) -> str:
    return f'{{"metric":{orjson.dumps(labels).decode()},"value":['


def _vector(heads: Sequence[str], values: Values, now: float, form: str) -> bytes:
    """Write the answer with one value for each set of labels."""
    texts = [form % value for value in values.tolist()]
    at = f"{now:.3f}"
    rows = ",".join([f'{head}{at},"{text}"]}}' for head, text in zip(heads, texts, strict=True)])
    return f'{{"status":"success","data":{{"resultType":"vector","result":[{rows}]}}}}'.encode()


def build_app(gpus: Gpus) -> web.Application:
    """Build the application of the HTTP API."""

    async def names(_: web.Request) -> web.Response:
        return _json(orjson.dumps({"status": "success", "data": [*METRICS, "up"]}))

    async def query(request: web.Request) -> web.Response:
        form = await request.post() if request.method == "POST" else {}
        text = str(form.get("query") or request.query.get("query", ""))
        return _json(gpus.answer(text, time.time()))

    async def query_range(_: web.Request) -> web.Response:
        return _json(b'{"status":"success","data":{"resultType":"matrix","result":[]}}')

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ready\n")

    app = web.Application()
    app.router.add_get("/api/v1/label/__name__/values", names)
    app.router.add_get("/-/ready", ready)
    for method in ("GET", "POST"):
        app.router.add_route(method, "/api/v1/query", query)
        app.router.add_route(method, "/api/v1/query_range", query_range)
    return app


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler_prometheus")
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    app = build_app(Gpus(arguments.nodes))
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
