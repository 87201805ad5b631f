"""Simulated Prometheus with answers of realistic size and structure.

Each row is a precomputed beginning and one of a few thousand endings, so that an answer of
megabytes takes milliseconds. Only the extender's queries are supported; any other query is an
error, so that a new query is noticed.
"""

import asyncio
import contextlib
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from aiohttp import web

from bench.backend_fleet import BenchDevice, FleetSpec
from extender.sources.prometheus.promql import MODEL_LABEL, SHARE_LABEL

Codes = npt.NDArray[np.intp]

LEVELS: Final = 1001
"""Number of load levels: 0 to 1000."""
PAST_STEPS_MAX: Final = 200
GZIP_LEVEL: Final = 1
_HEAD: Final = b'{"status":"success","data":{"resultType":"%b","result":['
_END: Final = b"]}}"
_METRIC: Final = re.compile(
    r"(?:max|min) by \(UUID, uuid, GPU_I_ID\) "
    r"\((?:max_over_time\()?(\w+)\{\}(?:\[\w+\]\))?( > 0)?\)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMetric:
    """Metric of the simulated exporter.

    Attributes:
        text: returns the value for a load (0 to 1) and a device's memory (MiB).
        has_instances: whether MIG instances have it.
        noise: variation from reading to reading, in load levels (0 to 1000).
    """

    text: Callable[[float, int], str]
    has_instances: bool = True
    noise: int = 20


def _constant(text: str) -> BenchMetric:
    return BenchMetric(text=lambda _load, _mib: text, noise=0)


def _ratio(factor: float) -> BenchMetric:
    return BenchMetric(text=lambda load, _: f"{factor * load:.6f}" if load else "0")


METRICS: Final = {
    "DCGM_FI_DEV_GPU_UTIL": BenchMetric(
        text=lambda load, _: str(round(100 * load)), has_instances=False
    ),
    "DCGM_FI_DEV_MEM_COPY_UTIL": BenchMetric(
        text=lambda load, _: str(round(50 * load)), has_instances=False
    ),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": _ratio(1.0),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": _ratio(0.45),
    "DCGM_FI_PROF_DRAM_ACTIVE": _ratio(0.5),
    "DCGM_FI_PROF_SM_ACTIVE": _ratio(0.9),
    "DCGM_FI_DEV_FB_USED": BenchMetric(
        text=lambda load, mib: str(round(0.8 * load * mib)), noise=2
    ),
    "DCGM_FI_DEV_FB_FREE": BenchMetric(
        text=lambda load, mib: str(mib - round(0.8 * load * mib)), noise=2
    ),
    "DCGM_FI_DEV_FB_RESERVED": _constant("600"),
    "DCGM_FI_DEV_FB_TOTAL": BenchMetric(text=lambda _, mib: str(mib), noise=0),
    "DCGM_FI_DEV_POWER_USAGE": BenchMetric(text=lambda load, _: f"{60 + 340 * load:.6f}"),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": _constant("400.000000"),
    "DCGM_FI_DEV_GPU_TEMP": BenchMetric(text=lambda load, _: str(round(30 + 45 * load))),
    "DCGM_FI_DEV_MEMORY_TEMP": BenchMetric(text=lambda load, _: str(round(38 + 45 * load))),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": _constant("0"),
    "DCGM_FI_DEV_XID_ERRORS": _constant("0"),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": _constant("0"),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": _constant("0"),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": _constant("0"),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": _constant("0"),
}
"""Metrics of dcgm-exporter's default list, and those that docs/install.md adds."""


class Fleet(Protocol):
    """Protocol of the devices of a cluster and the load of their pods; see `bench.backend_fleet`.

    Attributes:
        nodes: name and address of each node.
        tenants: namespace and name of the pods of each device.
    """

    spec: FleetSpec
    devices: list[BenchDevice]
    load: Codes
    nodes: Any
    tenants: Any

    def refresh(self) -> Iterable[int]:
        """Update the readings from the current pods; return the devices that changed."""


class Prometheus:
    """Prometheus API over a fleet's state at the last `refresh`.

    Attributes:
        queries: number of answered queries.
        sent_bytes: total size of the answers before compression.

    Args:
        fleet: the cluster.
        scrape_seconds: scrape interval; each exporter has its own offset.
    """

    def __init__(self, fleet: Fleet, *, scrape_seconds: float) -> None:
        self.queries = 0
        self.sent_bytes = 0
        self._fleet = fleet
        self._scrape_seconds = scrape_seconds
        self._noise = np.random.default_rng(fleet.spec.seed)
        devices = fleet.devices
        sizes = sorted({device.memory_mib for device in devices})
        self._sizes = sizes
        size_of = {size: row for row, size in enumerate(sizes)}
        self._size_rows = np.array([size_of[device.memory_mib] for device in devices])
        self._node_of = np.array([device.node for device in devices])
        self._phases = np.random.default_rng(1).uniform(0, scrape_seconds, len(fleet.nodes))
        self._cards = np.flatnonzero([not device.profile for device in devices])
        self._rows = [self._labels(row) + b'},"value":[' for row in range(len(devices))]
        self._card_rows = [self._rows[row] for row in self._cards]
        self._info_rows = [self._info(row) for row in range(len(devices))]
        self._tables: dict[str, list[bytes]] = {}
        self._codes: dict[str, list[int]] = {}
        self._pod_rows: list[list[bytes]] = [[] for _ in devices]
        self.refresh()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes below /prometheus."""
        base = "/prometheus/api/v1"
        return [
            web.get(f"{base}/label/__name__/values", self._names),
            web.get(f"{base}/query", self._query),
            web.post(f"{base}/query", self._query),
            web.get(f"{base}/query_range", self._query_range),
            web.post(f"{base}/query_range", self._query_range),
        ]

    def refresh(self) -> None:
        """Update all values from the current load of the pods."""
        for row in self._fleet.refresh():
            head = self._labels(row)
            self._pod_rows[row] = [
                b'%b,"exported_namespace":"%b","exported_pod":"%b"},"value":['
                % (head, pod.namespace.encode(), pod.name.encode())
                for pod in self._fleet.tenants[row]
            ]
        self._codes.clear()

    # --- rows -------------------------------------------------------------------------------------

    def _labels(self, row: int) -> bytes:
        """Return the labels at the beginning of each row of a device, without the closing brace."""
        device = self._fleet.devices[row]
        if not device.profile:
            return b'{"metric":{"UUID":"%b"' % device.uuid.encode()
        return b'{"metric":{"GPU_I_ID":"%b","UUID":"%b"' % (
            device.gpu_instance_id.encode(),
            device.uuid.encode(),
        )

    def _info(self, row: int) -> bytes:
        device = self._fleet.devices[row]
        node = self._fleet.nodes[device.node]
        profile = b'"GPU_I_PROFILE":"%b",' % device.profile.encode() if device.profile else b""
        return (
            b'%b,"DCGM_FI_DRIVER_VERSION":"580.95.05",%b"Hostname":"%b","gpu":"%d",'
            b'"instance":"%b:9400","modelName":"%b"},"value":['
        ) % (
            self._labels(row),
            profile,
            node.name.encode(),
            device.index,
            node.address.encode(),
            device.model.name.encode(),
        )

    def _vector(self, name: str, now: float, *, is_above_zero: bool = False) -> bytes:
        """Answer an instant query for one metric; with `is_above_zero` only for devices above 0."""
        metric = METRICS[name]
        if name not in self._tables:
            self._tables[name] = [
                metric.text(level / (LEVELS - 1), mib).encode()
                for mib in self._sizes
                for level in range(LEVELS)
            ]
        if name not in self._codes:
            self._codes[name] = self._levels(metric).tolist()
        head = b'%.3f,"' % now
        ends = [head + text + b'"]}' for text in self._tables[name]]
        rows, codes = self._rows if metric.has_instances else self._card_rows, self._codes[name]
        if is_above_zero:
            above = [float(text) > 0 for text in self._tables[name]]
            kept = [above[code] for code in codes]
            rows, codes = list(compress(rows, kept)), list(compress(codes, kept))
        return _joined(rows, map(ends.__getitem__, codes))

    def _levels(self, metric: BenchMetric) -> Codes:
        load = self._fleet.load
        if metric.noise:
            noise = self._noise.integers(-metric.noise, metric.noise + 1, len(load))
            # A device without pods has load 0.
            load = np.where(load > 0, np.clip(load + noise, 1, LEVELS - 1), 0)
        codes: Codes = self._size_rows * LEVELS + load
        return codes if metric.has_instances else codes[self._cards]

    def _sightings(self, now: float, *, is_full: bool) -> bytes:
        """Answer the time of each device's last scrape; with `is_full` also its node and model."""
        ages = (now - self._phases) % self._scrape_seconds
        head = b'%.3f,"' % now
        ends = [head + b"%.3f" % at + b'"]}' for at in (now - ages).tolist()]
        rows = self._info_rows if is_full else self._rows
        return _joined(rows, map(ends.__getitem__, self._node_of.tolist()))

    def _workloads(self, now: float) -> bytes:
        return _all_one(list(chain.from_iterable(self._pod_rows)), now)

    # --- answers ----------------------------------------------------------------------------------

    async def _names(self, request: web.Request) -> web.StreamResponse:
        names = ",".join(f'"{name}"' for name in sorted([*METRICS, "up"]))
        return await self._send(request, f'{{"status":"success","data":[{names}]}}'.encode())

    async def _query(self, request: web.Request) -> web.StreamResponse:
        text = await _text(request)
        now = time.time()
        if "timestamp(" in text:
            body = self._sightings(now, is_full=MODEL_LABEL in text)
        elif "exported_pod!=" in text:
            body = self._workloads(now)
        elif 'exported_pod=""' in text and '!~".*dcgm-exporter.*"' in text:
            # the extender's query for idle devices, whose `pod` label is their exporter's
            body = _all_one([], now)
        elif f"{SHARE_LABEL}!=" in text:
            body = _all_one([], now)  # this exporter does not split a device's memory by pod
        elif " offset " in text:
            body = _all_one([], now)  # no memory rows are remapped here
        elif (match := _METRIC.fullmatch(text)) and match[1] in METRICS:
            body = self._vector(match[1], now, is_above_zero=bool(match[2]))
        else:
            return _refused(text)
        return await self._send(request, body)

    async def _query_range(self, request: web.Request) -> web.StreamResponse:
        """Answer a range query: each device had its current load all the time."""
        text = await _text(request)
        match = _METRIC.fullmatch(text)
        if match is None or match[1] not in METRICS:
            return _refused(text)
        metric = METRICS[match[1]]
        start, end, step = (float(request.query[name]) for name in ("start", "end", "step"))
        times = np.arange(start, end + step / 2, step)[:PAST_STEPS_MAX].tolist()
        pairs = [b'[%.3f,"' % at for at in times]
        pasts: dict[int, bytes] = {}
        codes = self._levels(metric).tolist()
        for code in set(codes):
            size, level = divmod(code, LEVELS)
            value = metric.text(level / (LEVELS - 1), self._sizes[size]).encode()
            pasts[code] = b",".join(pair + value + b'"]' for pair in pairs) + b"]}"
        rows = self._rows if metric.has_instances else self._card_rows
        heads = [row.replace(b'"value":[', b'"values":[') for row in rows]
        body = _joined(heads, map(pasts.__getitem__, codes), kind=b"matrix")
        return await self._send(request, body)

    async def _send(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Send an answer, compressed if the client accepts it, as the real Prometheus does."""
        self.queries += 1
        self.sent_bytes += len(body)
        headers = {"Content-Type": "application/json"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body = await asyncio.get_running_loop().run_in_executor(_PACKERS, _packed, body)
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)


def _yield_to_all() -> None:
    """Give this process the lowest CPU priority: a real Prometheus runs on another machine."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not permitted
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


_PACKERS: Final = ThreadPoolExecutor(2, "packer", initializer=_yield_to_all)


def _packed(body: bytes) -> bytes:
    packer = zlib.compressobj(GZIP_LEVEL, wbits=31)
    return packer.compress(body) + packer.flush()


def _joined(heads: Sequence[bytes], ends: Iterator[bytes], *, kind: bytes = b"vector") -> bytes:
    """Join beginnings and endings of rows into an answer."""
    rows = b",".join(map(bytes.__add__, heads, ends))
    return b"".join((_HEAD % kind, rows, _END))


def _all_one(heads: Sequence[bytes], now: float) -> bytes:
    """Join rows that all have the value 1."""
    if not heads:
        return _HEAD % b"vector" + _END
    end = b'%.3f,"1"]}' % now
    return b"".join((_HEAD % b"vector", (end + b",").join(heads), end, _END))


async def _text(request: web.Request) -> str:
    form = await request.post() if request.method == "POST" else {}
    return str(form.get("query", request.query.get("query", "")))


def _refused(text: str) -> web.Response:
    body = {"status": "error", "errorType": "bad_data", "error": f"no benchmark sends {text!r}"}
    return web.json_response(body, status=400)
