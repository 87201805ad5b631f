"""Return free memory to the system through glibc."""

import contextlib
import ctypes
import functools
import mmap
from typing import Final

_LARGE_BYTES: Final = 1 << 20
_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3


def give_back() -> None:
    """Return free memory to the system, if the C library is glibc."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def forget(buffer: memoryview) -> None:
    """Return the whole pages of a buffer to the system until it is written again.

    These pages read as zeros from then on. Pages shared with other data are unchanged. Does nothing
    unless the C library is glibc.

    Args:
        buffer: writable and not empty.
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
    """Configure malloc to return large blocks when freed, and to use one arena for all threads.

    Use it in a process that handles a few large blocks at a time: each costs some system calls.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc: other libraries lack these functions."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim, libc.mallopt  # noqa: B018 - raises AttributeError if missing
        return libc
    return None
