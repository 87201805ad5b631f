"""Define messages, errors and metrics that the extender shares with its Prometheus worker process.

A message is a JSON header and numbers. Headers are small, and the numbers are used as they are in
the frame. So an answer about forty thousand devices needs no parsing on the extender's event loop.

It is a module of its own because the libraries that query Prometheus take 15 MiB, which the
extender's process saves.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import orjson

from extender.core.devices.readings import Signal
from extender.runtime.decoding import MalformedError, decode_with
from extender.sources.prometheus.dcgm import Metric, MetricUnit, build_table

if TYPE_CHECKING:
    from extender.settings.sources import Prometheus

_Rows = TypeVar("_Rows")
_T = TypeVar("_T")

PATH_SETTINGS: Final = ("bearer_token_file", "password_file", "ca_file", "cert_file", "key_file")
"""Names of the settings that are paths."""

ROUND_TIMEOUTS: Final = 4
"""Limit for a round, in limits of one query: a round has some ten queries, four of them at the same
time, and most take far less than their limit."""

_PREFIX: Final = struct.Struct(">QQ")
PREFIX_BYTES: Final = _PREFIX.size


class PrometheusError(Exception):
    """Prometheus gave no usable answer; the message says what failed, why, and what to do."""


def reduce_rows(reduce: Callable[[_Rows], _T], rows: _Rows) -> _T:
    """Reduce the rows of an answer, which may contain any JSON.

    Raises:
        PrometheusError: the rows are not those of a Prometheus answer.
    """
    try:
        return decode_with(reduce, rows)
    except MalformedError as error:
        raise PrometheusError(
            f"cannot read the answer of Prometheus: {type(error.__cause__).__name__} {error}: is "
            "prometheus.url a Prometheus?"
        ) from error


def table_of(settings: "Prometheus") -> tuple[Metric, ...]:
    """Build the table of metrics, including the user's rows."""
    return build_table(
        (
            name,
            None
            if row is None
            else Metric(name=name, signal=Signal(row.signal), unit=MetricUnit(row.unit)),
        )
        for name, row in settings.metrics.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A message: a JSON header, and numbers.

    Attributes:
        header: JSON object.
        body: numbers, described by the header.
    """

    header: Mapping[str, Any]
    body: bytes = b""


def encode(frame: Frame) -> tuple[bytes, bytes]:
    """Encode a frame; return the bytes before the body, and the body."""
    header = orjson.dumps(frame.header)
    return _PREFIX.pack(len(header), len(frame.body)) + header, frame.body


def sizes(prefix: bytes) -> tuple[int, int]:
    """Return the number of bytes of the header and of the body."""
    header, body = _PREFIX.unpack(prefix)
    return header, body


def decode_header(data: bytes) -> Mapping[str, Any]:
    """Parse a header.

    Raises:
        ValueError: it is not a header.
    """
    header = decode_with(orjson.loads, data)
    if not isinstance(header, dict):
        raise ValueError(  # noqa: TRY004 - one exception for every invalid frame
            f"cannot read a frame: its header is not a JSON object but {type(header).__name__}"
        )
    return header


def write(stream: BinaryIO, frame: Frame) -> None:
    """Write a frame to a pipe."""
    stream.writelines(encode(frame))
    stream.flush()


def read(stream: BinaryIO) -> Frame | None:
    """Read the next frame from a pipe; return None at the end of the pipe."""
    prefix = stream.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        return None
    header_bytes, body_bytes = sizes(prefix)
    header, body = stream.read(header_bytes), stream.read(body_bytes)
    if len(header) < header_bytes or len(body) < body_bytes:
        return None
    return Frame(header=decode_header(header), body=body)
