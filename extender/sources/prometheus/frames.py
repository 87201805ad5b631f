"""Encode the messages between the extender and its worker process: a JSON header and numbers.

Headers are small, and the numbers are used as they are in the frame. So an answer about forty
thousand devices needs no parsing on the extender's event loop.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import orjson

from extender.runtime.decoding import decode_with

_PREFIX: Final = struct.Struct(">QQ")
PREFIX_BYTES: Final = _PREFIX.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message.

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
