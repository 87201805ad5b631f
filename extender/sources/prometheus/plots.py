"""The last hour of a few devices, asked of Prometheus when somebody looks at them."""

import asyncio
import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from extender.sources.prometheus.common import table_of
from extender.sources.prometheus.dcgm import Metric, convert
from extender.sources.prometheus.dcgm_devices import device_key, number

if TYPE_CHECKING:
    from extender.settings.config import Prometheus

logger = logging.getLogger(__name__)

STEP_SECONDS: Final = 60.0
STEPS: Final = 61
MOST_DEVICES: Final = 64
"""So many of a node's devices are plotted: a longer query would be refused somewhere."""
MOST_BYTES: Final = 4 << 20
CHUNK_BYTES: Final = 1 << 16
SIGNALS: Final = (Signal.GRAPHICS_ACTIVE, Signal.GPU_UTILIZATION, Signal.MEMORY_USED)

_PLAIN: Final = re.compile(r"[A-Za-z0-9-]+")
"""UUIDs that mean themselves in a regular expression; no card has another."""


Values = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedHour:
    """The last hour of some devices.

    Attributes:
        times: of each step, seconds since the epoch, the oldest first.
        activity: ratios of each device; None where nothing is known.
        memory_bytes: in use, likewise.
        error: why there is nothing, "" where there was an answer.
    """

    times: tuple[float, ...] = ()
    activity: Mapping[DeviceKey, Values] = field(default_factory=dict)
    memory_bytes: Mapping[DeviceKey, Values] = field(default_factory=dict)
    error: str = ""


class PrometheusPlots:
    """Asks for a node at a time.

    Args:
        settings: of Prometheus, as they are now.
        clock: seconds since the epoch.
    """

    def __init__(self, settings: Callable[[], "Prometheus"], clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._turn = asyncio.Lock()

    @property
    def is_there(self) -> bool:
        """Whether there is a Prometheus to ask."""
        return bool(self._settings().url)

    async def hour(self, devices: Sequence[DeviceKey]) -> PlottedHour:
        """Return the last hour of some devices, or why it cannot be had."""
        return await self.past(devices, seconds=STEP_SECONDS * (STEPS - 1), steps=STEPS)

    async def past(
        self, devices: Sequence[DeviceKey], *, seconds: float, steps: int
    ) -> PlottedHour:
        """Return likewise what they were like for so long, at so many times."""
        settings = self._settings()
        cards = sorted({uuid for uuid, _ in devices[:MOST_DEVICES] if _PLAIN.fullmatch(uuid)})
        times = np.linspace(-seconds, 0.0, steps) + self._clock()
        found: dict[Signal, dict[DeviceKey, Values]] = {signal: {} for signal in SIGNALS}
        if cards:
            # One page's plots at a time: whoever opens many nodes waits, and not Prometheus.
            try:
                async with self._turn, asyncio.timeout(settings.timeout_seconds):
                    await _ask_all(settings, cards, times.tolist(), found)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                # TimeoutError is an OSError, what is no JSON a ValueError.
                cause = str(error) or "no complete answer in time"
                logger.info("no plots from Prometheus", extra={"cause": cause})
                return PlottedHour(error=f"Prometheus does not tell: {cause}")
        preferred, other = found[Signal.GRAPHICS_ACTIVE], found[Signal.GPU_UTILIZATION]
        return PlottedHour(
            times=tuple(times.tolist()),
            activity={
                key: _filled(preferred.get(key), other.get(key)) for key in other | preferred
            },
            memory_bytes=found[Signal.MEMORY_USED],
        )


def _filled(preferred: Values | None, other: Values | None) -> Values:
    """Return the values of a metric, and where it has none, for it is new, those of another."""
    if preferred is None or other is None:
        return preferred or other or []
    return [second if one is None else one for one, second in zip(preferred, other, strict=True)]


async def _ask_all(
    settings: "Prometheus",
    cards: Sequence[str],
    times: Sequence[float],
    found: Mapping[Signal, dict[DeviceKey, Values]],
) -> None:
    """Ask for every metric that may tell one of the signals, one after the other."""
    metrics = [metric for metric in table_of(settings) if metric.signal in found]
    async with await _session(settings) as session:
        for metric in metrics:
            rows = await _ask(session, settings, metric, cards, times)
            _take(rows, metric, times, found[metric.signal])


async def _session(settings: "Prometheus") -> aiohttp.ClientSession:
    """Return a session with the settings' credentials; files are read anew each time."""
    context = await asyncio.to_thread(_context, settings)
    headers = dict(settings.headers)
    auth = None
    if settings.bearer_token_file is not None:
        headers["Authorization"] = (
            f"Bearer {await asyncio.to_thread(_secret, settings.bearer_token_file)}"
        )
    elif settings.username:
        path = settings.password_file
        password = "" if path is None else await asyncio.to_thread(_secret, path)
        auth = aiohttp.BasicAuth(settings.username, password)
    connector = aiohttp.TCPConnector(ssl=True if context is None else context)
    return aiohttp.ClientSession(connector=connector, headers=headers, auth=auth)


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


async def _ask(
    session: aiohttp.ClientSession,
    settings: "Prometheus",
    metric: Metric,
    cards: Sequence[str],
    times: Sequence[float],
) -> list[Mapping[str, object]]:
    """Return the rows of one metric.

    Raises:
        ValueError: the answer is not Prometheus's.
    """
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
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            body += chunk
            if len(body) > MOST_BYTES:
                raise ValueError(f"the answer is larger than {MOST_BYTES} bytes")
        if response.status != HTTPStatus.OK:
            raise ValueError(f"HTTP {response.status}")
    document = mapping_of(decode_with(orjson.loads, body))
    return list(objects_of(mapping_of(document.get("data")).get("result")))


def _step_of(times: Sequence[float]) -> float:
    """Return the seconds between two times."""
    return (times[-1] - times[0]) / (len(times) - 1)


def _take(
    rows: Sequence[Mapping[str, object]],
    metric: Metric,
    times: Sequence[float],
    found: dict[DeviceKey, Values],
) -> None:
    """Take over the rows of one metric; where there is a value already, the higher one counts."""
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
        told = convert(values, metric.unit, metric.signal)
        if key in found:
            before = np.array([np.nan if one is None else one for one in found[key]])
            told = np.fmax(told, before)
        found[key] = [None if np.isnan(one) else one for one in told.tolist()]
