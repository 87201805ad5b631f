"""Cooperative work in steps, so that the event loop can run between two steps."""

from collections.abc import Generator
from typing import Final, TypeVar

_Result = TypeVar("_Result")

Steps = Generator[None, None, _Result]
"""Generator of work: each `next` is one step of a few milliseconds; returns the result."""


def finish(steps: Generator[object, None, _Result]) -> _Result:
    """Run all steps without a pause, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result


_PIECE_RECORDS: Final = 64
"""Number of records freed per step."""


def let_go(records: list[_Result]) -> Steps[None]:
    """Free large records in steps: freeing a thousand explained nodes at once takes milliseconds.

    Args:
        records: list with the only references; empty afterwards.
    """
    while records:
        del records[-_PIECE_RECORDS:]
        yield
