"""Query the last hour of a few devices when a user looks at them."""

import asyncio
import base64
import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import numpy as np
import orjson

from extender.core.devices.readings import DeviceKey, Signal
from extender.core.untyped import items_of, mapping_of, objects_of
from extender.runtime.decoding import decode_with
from extender.sources.prometheus import promql
from extender.sources.prometheus.dcgm import Metric, convert
from extender.sources.prometheus.dcgm_devices import device_key, number
from extender.sources.prometheus.protocol import table_of

if TYPE_CHECKING:
    from extender.settings.sources import Prometheus

logger = logging.getLogger(__name__)

_STEP_SECONDS: Final = 60.0
_STEPS: Final = 61
_MAX_DEVICES: Final = 64
"""Limit for the devices in one query: some servers refuse longer queries."""
_MAX_ANSWER_BYTES: Final = 4 << 20
_CHUNK_BYTES: Final = 1 << 16
_SIGNALS: Final = (Signal.GRAPHICS_ACTIVE, Signal.GPU_UTILIZATION, Signal.MEMORY_USED)

_PLAIN: Final = re.compile(r"[A-Za-z0-9-]+")
"""UUIDs without special characters of regular expressions; all UUIDs of cards match."""


_Values = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlottedHour:
    """The last hour of some devices.

    Attributes:
        times: time of each step, seconds since the epoch, the oldest first.
        activity: ratios by device; None if unknown.
        memory_bytes: memory in use by device; None if unknown.
        error: why there are no values, "" after a successful query.
    """

    times: tuple[float, ...] = ()
    activity: Mapping[DeviceKey, _Values] = field(default_factory=dict)
    memory_bytes: Mapping[DeviceKey, _Values] = field(default_factory=dict)
    error: str = ""


class PrometheusPlots:
    """Query the past of some devices.

    Args:
        settings: returns the current settings of Prometheus.
        clock: seconds since the epoch.
    """

    def __init__(self, settings: Callable[[], "Prometheus"], clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = asyncio.Lock()

    @property
    def is_configured(self) -> bool:
        """Whether a Prometheus is configured."""
        return bool(self._settings().url)

    async def hour(self, devices: Sequence[DeviceKey]) -> _PlottedHour:
        """Return the last hour of some devices, or an error."""
        return await self.past(devices, seconds=_STEP_SECONDS * (_STEPS - 1), steps=_STEPS)

    async def past(
        self, devices: Sequence[DeviceKey], *, seconds: float, steps: int
    ) -> _PlottedHour:
        """Return the last `seconds` of some devices in `steps` steps, or an error."""
        settings = self._settings()
        cards = sorted({uuid for uuid, _ in devices[:_MAX_DEVICES] if _PLAIN.fullmatch(uuid)})
        times = np.linspace(-seconds, 0.0, steps) + self._clock()
        by_device: dict[Signal, dict[DeviceKey, _Values]] = {signal: {} for signal in _SIGNALS}
        if cards:
            # One query at a time: a user who opens many nodes must not overload Prometheus.
            try:
                async with self._lock, asyncio.timeout(settings.timeout_seconds):
                    await _query_all(settings, cards, times.tolist(), by_device)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                # TimeoutError is an OSError, and invalid JSON raises a ValueError.
                cause = str(error) or "no complete answer in time"
                logger.info("no plots from Prometheus", extra={"cause": cause})
                return _PlottedHour(error=f"cannot query Prometheus: {cause}")
        preferred, other = by_device[Signal.GRAPHICS_ACTIVE], by_device[Signal.GPU_UTILIZATION]
        return _PlottedHour(
            times=tuple(times.tolist()),
            activity={
                key: _fill_gaps(preferred.get(key), other.get(key)) for key in other | preferred
            },
            memory_bytes=by_device[Signal.MEMORY_USED],
        )


def _fill_gaps(preferred: _Values | None, other: _Values | None) -> _Values:
    """Return the values of a metric, with gaps filled from another: the metric may be new."""
    if preferred is None or other is None:
        return preferred or other or []
    return [second if one is None else one for one, second in zip(preferred, other, strict=True)]


async def _query_all(
    settings: "Prometheus",
    cards: Sequence[str],
    times: Sequence[float],
    by_device: Mapping[Signal, dict[DeviceKey, _Values]],
) -> None:
    """Query each metric of the signals, one after the other.

    Raises:
        ValueError: an answer is not an answer of Prometheus.
    """
    metrics = [metric for metric in table_of(settings) if metric.signal in by_device]
    async with await _session(settings) as session:
        for metric in metrics:
            rows = await _query(session, settings, metric, cards, times)
            merge = partial(
                _merge_rows, metric=metric, times=times, by_device=by_device[metric.signal]
            )
            decode_with(merge, rows)


async def _session(settings: "Prometheus") -> aiohttp.ClientSession:
    """Return a session with the settings' credentials, read from their files each time."""
    context = await asyncio.to_thread(_context, settings)
    headers = dict(settings.headers)
    if settings.bearer_token_file is not None:
        headers["Authorization"] = (
            f"Bearer {await asyncio.to_thread(_secret, settings.bearer_token_file)}"
        )
    elif settings.username:
        path = settings.password_file
        password = "" if path is None else await asyncio.to_thread(_secret, path)
        credentials = f"{settings.username}:{password}".encode("latin1")  # as for other queries
        headers["Authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
    connector = aiohttp.TCPConnector(ssl=True if context is None else context)
    return aiohttp.ClientSession(connector=connector, headers=headers)


def _secret(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()


def _context(settings: "Prometheus") -> ssl.SSLContext | None:
    if not settings.url.startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.cert_file is not None:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    return context


async def _query(
    session: aiohttp.ClientSession,
    settings: "Prometheus",
    metric: Metric,
    cards: Sequence[str],
    times: Sequence[float],
) -> list[Mapping[str, object]]:
    """Return the rows of one metric."""
    label = promql.UUID_LABELS[metric.name.islower()]
    chosen = f'{label}=~"{"|".join(cards)}"'
    selector = ",".join(filter(None, (promql.bare_selector(settings.selector), chosen)))
    async with session.post(
        f"{settings.url.rstrip('/')}/api/v1/query_range",
        data={
            "query": promql.metric_query(metric, selector),
            "start": f"{times[0]:.3f}",
            "end": f"{times[-1]:.3f}",
            "step": f"{_step_of(times):.3f}",
        },
        allow_redirects=False,
    ) as response:
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise ValueError(f"the answer is larger than {_MAX_ANSWER_BYTES} bytes")
        if response.status != HTTPStatus.OK:
            raise ValueError(f"HTTP {response.status}")
    document = mapping_of(decode_with(orjson.loads, body))
    return list(objects_of(mapping_of(document.get("data")).get("result")))


def _step_of(times: Sequence[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1)


def _merge_rows(
    rows: Sequence[Mapping[str, object]],
    metric: Metric,
    times: Sequence[float],
    by_device: dict[DeviceKey, _Values],
) -> None:
    """Merge the rows of one metric; of two values the higher one counts."""
    for row in rows:
        labels = {name: str(value) for name, value in mapping_of(row.get("metric")).items()}
        key = device_key(labels)
        if key is None:
            continue
        values = np.full(len(times), np.nan)
        for sample in items_of(row.get("values")):
            pair = items_of(sample)
            if len(pair) == 2:  # noqa: PLR2004 - time and value
                at = round((number(pair[0]) - times[0]) / _step_of(times))
                if 0 <= at < len(times):
                    values[at] = number(pair[1])
        converted = convert(values, metric.unit, metric.signal)
        if key in by_device:
            before = np.array([np.nan if one is None else one for one in by_device[key]])
            converted = np.fmax(converted, before)
        by_device[key] = [None if np.isnan(one) else one for one in converted.tolist()]
