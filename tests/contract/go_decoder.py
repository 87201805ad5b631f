"""Go's decoding of kube-scheduler's requests, by the program `extenderargs` of testkit."""

import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple

from testkit.controlplane.leash import leashed

ARGS: Final = b"a"
PREEMPTION_ARGS: Final = b"p"
_HEAD: Final = struct.Struct(">cI")


class Rewritten(NamedTuple):
    """Request as Go writes it after decoding it, or the reason why Go cannot decode it."""

    body: bytes = b""
    error: str = ""


class GoDecoder:
    """Client of the running Go program."""

    def __init__(self, to_program: IO[bytes], from_program: IO[bytes]) -> None:
        self._to = to_program
        self._from = from_program

    def rewrite(self, kind: bytes, body: bytes) -> Rewritten:
        """Let Go decode a request and encode it again.

        Args:
            kind: `ARGS` or `PREEMPTION_ARGS`.
            body: the request.
        """
        self._to.write(_HEAD.pack(kind, len(body)) + body)
        self._to.flush()
        outcome, length = _HEAD.unpack(self._from.read(_HEAD.size))
        answer = self._from.read(length)
        if outcome == b"e":
            return Rewritten(error=answer.decode(errors="replace"))
        return Rewritten(body=answer)


@contextmanager
def running_decoder(program: Path) -> Iterator[GoDecoder]:
    """Run the program while the context is open."""
    with subprocess.Popen(
        leashed([str(program)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        yield GoDecoder(process.stdin, process.stdout)
        process.stdin.close()
