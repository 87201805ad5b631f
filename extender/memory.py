"""Keeps a process small: what the C library can do about memory."""

import contextlib
import ctypes
import functools
import mmap
from typing import Final

_LARGE_BYTES: Final = 1 << 20
_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3


def give_back() -> None:
    """Return free memory to the system; nothing happens where the C library cannot."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def forget(buffer: memoryview) -> None:
    """Return a buffer's memory to the system, until it is written to again.

    Of what it held, whole pages are zeros from now on; pages that it shares with others stay as
    they are. Nothing happens where the C library cannot.

    Args:
        buffer: may be written to, and is not empty.
    """
    libc = _libc()
    if libc is None:
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (start + buffer.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def prefer_small() -> None:
    """Have large blocks of memory returned as soon as they are free, and threads share a pool.

    For a process that handles a few large blocks at a time: each costs the system some work.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc: others have no such functions, nor the need."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim, libc.mallopt  # noqa: B018 - raises where it is not there
        return libc
    return None
