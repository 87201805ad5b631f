"""Encode a pool's NumPy columns as JSON without loss, and decode them.

A constant column is encoded as one number, a short column as a list, and any other column as
zlib-compressed bytes.
"""

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from extender.core.nodes.snapshot import (
    BYTES_PER_SLOT,
    FLAGS,
    NO_LIMIT,
    NO_PRICE,
    PER_NODE,
    PER_SLOT,
    Batch,
    Telemetry,
)

Column = npt.NDArray[Any]

VERSION: Final = 1
"""Format version of all lines; it grows when an older reader would misread them."""

_FEW: Final = 64
"""Largest number of values to write as a plain list."""

_FAST: Final = 1
"""zlib level: the fleet is written often and rarely read, so speed matters more than size."""

TELEMETRY: Final = tuple(column.name for column in fields(Telemetry))
_OF_SLOTS: Final = ("present", *PER_SLOT, *TELEMETRY)
"""Columns with one value for each device slot; all others have one value for each node."""
_COLUMNS: Final = (*_OF_SLOTS, "suspicion", *PER_NODE, *FLAGS)
_LATER: Final[Mapping[str, object]] = {
    "is_out": False,
    "loading": 0,
    "presumed": 0.0,
    "others_bytes": 0.0,
    "foreign_bytes": 0.0,
    "guessed_bytes": 0.0,
    "just_freed": 0,
    "is_presumed": False,
    "zone_id": 0,
    "price": NO_PRICE,
    "joined": 0,
    "numa": 0,
    "alignment": 0,
    "free_millicores": NO_LIMIT,
    "free_bytes": NO_LIMIT,
    "free_storage_bytes": NO_LIMIT,
}
"""Columns that older logs lack, with the value that decisions used at that time."""
_FORMER: Final[Mapping[str, str]] = {"declared_bytes": "assumed_bytes"}
"""Former names of columns in older logs. `assumed_bytes` counted declared memory only while it was
not yet in use."""

_PEAK_OF: Final = ("utilization", "latest")
"""Columns whose maximum replaces `peak` in logs that lack it."""


class RecordError(ValueError):
    """A line of a decision log cannot be decoded; the message says why."""


def write_columns(batch: Batch, rest: Callable[[], None] = lambda: None) -> dict[str, object]:
    """Encode a batch as columns for orjson; `slots` is omitted, as it follows from `present`.

    Args:
        batch: the batch.
        rest: callback after each column that was compressed, to yield the processor.
    """
    columns: dict[str, object] = {}
    for name in _COLUMNS:
        columns[name] = encoded = _write(_column_of(batch, name))
        if isinstance(encoded, orjson.Fragment):
            rest()
    return columns


def read_columns(written: Mapping[str, object], nodes: int, width: int) -> dict[str, Column]:
    """Decode the columns of a batch.

    Args:
        written: encoded columns by name.
        nodes: number of rows.
        width: device slots of each row.

    Raises:
        RecordError: a column is missing, malformed or of another size.
    """
    blank = {"present": np.bool_, "suspicion": np.float64} | dict.fromkeys(FLAGS, np.bool_)
    kinds = blank | {name: getattr(Telemetry.missing(0), name).dtype.type for name in TELEMETRY}
    columns: dict[str, Column] = {}
    for name in _COLUMNS:
        kind = kinds.get(name, np.float64 if name in BYTES_PER_SLOT else np.intp)
        shape = (nodes, width) if name in _OF_SLOTS else (nodes,)
        try:
            if name == "peak" and name not in written:
                column = np.maximum(*(columns[other] for other in _PEAK_OF))
            else:
                column = _read(_find(written, name), shape, kind)
        except (KeyError, ValueError, TypeError, zlib.error, binascii.Error) as error:
            raise RecordError(f"column {name!r} cannot be read: {error!r}") from error
        columns[name] = np.asfortranarray(column)
    return columns


def _find(written: Mapping[str, object], name: str) -> object:
    """Return an encoded column under its present or former name, else its default.

    Raises:
        KeyError: the column is missing and has no default.
    """
    for known in (name, _FORMER.get(name, name)):
        if known in written:
            return written[known]
    return _LATER[name]


def _column_of(batch: Batch, name: str) -> Column:
    column: Column = getattr(batch.telemetry if name in TELEMETRY else batch, name)
    return column


def _write(column: Column) -> object:
    """Encode one column, row by row."""
    flat = np.ascontiguousarray(column).reshape(-1)
    if not flat.size:
        return []
    if (flat == flat[0]).all():
        return flat[0].item()
    if flat.size <= _FEW:
        return flat.tolist()
    small = _small(flat)
    raw = small.astype(small.dtype.newbyteorder("<")).tobytes()
    packed = base64.b64encode(zlib.compress(raw, _FAST))
    # A Fragment is copied verbatim: base64 needs no escaping.
    return orjson.Fragment(b'{"type":"%b","zlib":"%b"}' % (small.dtype.str[1:].encode(), packed))


def _small(flat: Column) -> Column:
    """Convert integers to the smallest type that fits; leave floats exact."""
    if flat.dtype.kind == "i":
        for kind in (np.int8, np.int16, np.int32):
            limits = np.iinfo(kind)
            if limits.min <= int(flat.min()) and int(flat.max()) <= limits.max:
                return flat.astype(kind)
    return flat


def _read(written: object, shape: tuple[int, ...], kind: type[np.generic]) -> Column:
    """Decode one column.

    Raises:
        ValueError: the column does not have the given shape.
    """
    if isinstance(written, Mapping):
        raw = zlib.decompress(base64.b64decode(written["zlib"], validate=True))
        return np.frombuffer(raw, np.dtype("<" + str(written["type"]))).astype(kind).reshape(shape)
    if isinstance(written, list):
        return np.array(written, dtype=kind).reshape(shape)
    if not isinstance(written, int | float):
        raise ValueError(f"{written!r} is no column")  # noqa: TRY004 - of a document
    return np.full(shape, written, dtype=kind)
