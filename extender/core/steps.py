"""Work in steps: whoever does it may let the event loop have its turn between two of them."""

from collections.abc import Generator
from typing import Final, TypeVar

Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""Each `next` is one step of a few milliseconds; the work's result is the generator's."""


def finish(steps: Generator[object, None, Result]) -> Result:
    """Do all steps at once, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


PIECE_RECORDS: Final = 64
"""Records that are freed in one step."""


def let_go(records: list[Result]) -> Steps[None]:
    """Free large records some at a time: a thousand explained nodes take milliseconds at once.

    Args:
        records: nobody else may hold them; the list is empty afterwards.
    """
    while records:
        del records[-PIECE_RECORDS:]
        yield
