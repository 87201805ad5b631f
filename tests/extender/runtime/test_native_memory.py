"""Memory is returned to the system if the C library can."""

import mmap
import platform
from unittest.mock import Mock, call

import pytest

from extender.runtime import native_memory
from extender.runtime.native_memory import give_back, prefer_small


def test_memory_is_given_back_wherever_that_can_be() -> None:
    give_back()


def test_malloc_keeps_no_memory_and_uses_one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Mock()
    monkeypatch.setattr(native_memory, "_libc", lambda: libc)

    prefer_small()
    give_back()

    # M_MMAP_THRESHOLD and M_ARENA_MAX in glibc's malloc.h
    assert libc.mock_calls == [call.mallopt(-3, 1 << 20), call.mallopt(-8, 1), call.malloc_trim(0)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is not given back")
def test_glibc_is_recognized() -> None:
    assert native_memory._libc() is not None


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_memory, "_libc", lambda: None)
    held = bytearray(b"x" * (4 * mmap.PAGESIZE))

    give_back()
    prefer_small()
    with memoryview(held) as buffer:
        native_memory.forget(buffer)

    assert held == b"x" * (4 * mmap.PAGESIZE)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is not given back")
def test_released_buffer_frees_only_its_own_pages() -> None:
    held = bytearray(b"x" * (64 * mmap.PAGESIZE))
    with memoryview(held)[100:-100] as buffer:
        native_memory.forget(buffer)
        assert bytes(buffer).count(b"x") < 2 * mmap.PAGESIZE
    assert held[:100] == held[-100:] == b"x" * 100


def test_a_buffer_without_a_page_of_its_own_stays_as_it_is() -> None:
    held = bytearray(b"x" * (mmap.PAGESIZE - 1))
    with memoryview(held) as buffer:
        native_memory.forget(buffer)
    assert held == b"x" * (mmap.PAGESIZE - 1)
