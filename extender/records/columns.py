"""Columns of a pool as JSON, exactly: one number for all, few as they are, many compressed."""

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from extender.core.snapshot import (
    BYTES_PER_SLOT,
    FLAGS,
    NO_LIMIT,
    PER_NODE,
    PER_SLOT,
    Batch,
    Telemetry,
)

Column = npt.NDArray[Any]

VERSION: Final = 1
"""Of all lines. Grows where an older reader would misread them."""

FEW: Final = 64
"""Values up to so many are written as they are."""

FAST: Final = 1
"""zlib's level: the fleet is written again and again, and soon thrown away."""

TELEMETRY: Final = tuple(column.name for column in fields(Telemetry))
OF_SLOTS: Final = ("present", *PER_SLOT, *TELEMETRY)
"""Columns with a value for each device slot; all others have one for each node."""
COLUMNS: Final = (*OF_SLOTS, "suspicion", *PER_NODE, *FLAGS)
LATER: Final[Mapping[str, object]] = {
    "is_out": False,
    "loading": 0,
    "presumed": 0.0,
    "others_bytes": 0.0,
    "foreign_bytes": 0.0,
    "guessed_bytes": 0.0,
    "just_freed": 0,
    "is_presumed": False,
    "zone_id": 0,
    "free_millicores": NO_LIMIT,
    "free_bytes": NO_LIMIT,
}
"""Columns that older lines lack, and what decisions went by then."""
FORMER: Final[Mapping[str, str]] = {"declared_bytes": "assumed_bytes"}
"""Columns that older lines have by another name: of what pods declared, only what was not in use
yet counted then."""

PEAK_OF: Final = ("utilization", "latest")
"""The higher of these was what said idle or busy before `peak` was written."""


class RecordError(ValueError):
    """A line of a log cannot be read; the message says what is wrong with it."""


def write_columns(batch: Batch, rest: Callable[[], None] = lambda: None) -> dict[str, object]:
    """Return a batch as columns for orjson; `slots` are left out: they number what is present.

    Args:
        batch: the batch.
        rest: is called after each column that takes long.
    """
    columns: dict[str, object] = {}
    for name in COLUMNS:
        columns[name] = written = _write(_column_of(batch, name))
        if isinstance(written, orjson.Fragment):
            rest()
    return columns


def read_columns(written: Mapping[str, object], nodes: int, width: int) -> dict[str, Column]:
    """Return the columns again.

    Args:
        written: by name.
        nodes: rows.
        width: device slots of each.

    Raises:
        RecordError: a column is missing, or is none of that size.
    """
    blank = {"present": np.bool_, "suspicion": np.float64} | dict.fromkeys(FLAGS, np.bool_)
    kinds = blank | {name: getattr(Telemetry.missing(0), name).dtype.type for name in TELEMETRY}
    columns: dict[str, Column] = {}
    for name in COLUMNS:
        kind = kinds.get(name, np.float64 if name in BYTES_PER_SLOT else np.intp)
        shape = (nodes, width) if name in OF_SLOTS else (nodes,)
        try:
            if name == "peak" and name not in written:
                column = np.maximum(*(columns[other] for other in PEAK_OF))
            else:
                column = _read(_written(written, name), shape, kind)
        except (KeyError, ValueError, TypeError, zlib.error, binascii.Error) as error:
            raise RecordError(f"column {name!r} cannot be read: {error!r}") from error
        columns[name] = np.asfortranarray(column)
    return columns


def _written(written: Mapping[str, object], name: str) -> object:
    """Return what a line says of a column, by whatever name.

    Raises:
        KeyError: it says nothing.
    """
    for known in (name, FORMER.get(name, name)):
        if known in written:
            return written[known]
    return LATER[name]


def _column_of(batch: Batch, name: str) -> Column:
    column: Column = getattr(batch.telemetry if name in TELEMETRY else batch, name)
    return column


def _write(column: Column) -> object:
    """Return one column, row by row."""
    flat = np.ascontiguousarray(column).reshape(-1)
    if not flat.size:
        return []
    if (flat == flat[0]).all():
        return flat[0].item()
    if flat.size <= FEW:
        return flat.tolist()
    small = _small(flat)
    raw = small.astype(small.dtype.newbyteorder("<")).tobytes()
    packed = base64.b64encode(zlib.compress(raw, FAST))
    # As it is: nothing in it has to be escaped, or looked at once more.
    return orjson.Fragment(b'{"type":"%b","zlib":"%b"}' % (small.dtype.str[1:].encode(), packed))


def _small(flat: Column) -> Column:
    """Return whole numbers as small as they fit; what has fractions stays exact."""
    if flat.dtype.kind == "i":
        for kind in (np.int8, np.int16, np.int32):
            limits = np.iinfo(kind)
            if limits.min <= int(flat.min()) and int(flat.max()) <= limits.max:
                return flat.astype(kind)
    return flat


def _read(written: object, shape: tuple[int, ...], kind: type[np.generic]) -> Column:
    """Return one column.

    Raises:
        ValueError: it is none of that shape.
    """
    if isinstance(written, Mapping):
        raw = zlib.decompress(base64.b64decode(written["zlib"], validate=True))
        return np.frombuffer(raw, np.dtype("<" + str(written["type"]))).astype(kind).reshape(shape)
    if isinstance(written, list):
        return np.array(written, dtype=kind).reshape(shape)
    if not isinstance(written, int | float):
        raise ValueError(f"{written!r} is no column")  # noqa: TRY004 - of a document
    return np.full(shape, written, dtype=kind)
