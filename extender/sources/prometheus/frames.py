"""How the extender and its worker process talk: frames of a JSON header and a block of numbers.

The header is small or comes in small parts; the numbers are taken as they lie in the frame. So
an answer about forty thousand devices costs the extender's loop no parsing.
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
        header: what is said, as JSON can say it.
        body: numbers; what they are is said in the header.
    """

    header: Mapping[str, Any]
    body: bytes = b""


def encode(frame: Frame) -> tuple[bytes, bytes]:
    """Write a frame, as the part before the body and the body itself."""
    header = orjson.dumps(frame.header)
    return _PREFIX.pack(len(header), len(frame.body)) + header, frame.body


def sizes(prefix: bytes) -> tuple[int, int]:
    """Read how many bytes of header and of body follow."""
    header, body = _PREFIX.unpack(prefix)
    return header, body


def decode_header(data: bytes) -> Mapping[str, Any]:
    """Read a header.

    Raises:
        ValueError: it is not one.
    """
    header = decode_with(orjson.loads, data)
    if not isinstance(header, dict):
        raise ValueError(  # noqa: TRY004 - one exception for all that is no frame
            f"cannot read a frame: its header is {type(header).__name__}: not ours"
        )
    return header


def write(stream: BinaryIO, frame: Frame) -> None:
    """Write a frame to a pipe."""
    stream.writelines(encode(frame))
    stream.flush()


def read(stream: BinaryIO) -> Frame | None:
    """Read the next frame from a pipe, or None where the other side has gone."""
    prefix = stream.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        return None
    header_bytes, body_bytes = sizes(prefix)
    header, body = stream.read(header_bytes), stream.read(body_bytes)
    if len(header) < header_bytes or len(body) < body_bytes:
        return None
    return Frame(header=decode_header(header), body=body)
