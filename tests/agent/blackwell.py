"""A SYNTHETIC card with NVLink 5: no Blackwell card was at hand, and nothing here was recorded.

The shape is that of NVIDIA's headers, nvidia-ml-py 13.615 and DCGM 4.6: NVLink 5 counts errors by
fields 206 to 215, 219 and 221, whose scope is a link, and answers that the totals of older
generations (38, 45, 52, 59) are not supported. All else is the recorded H200's.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any, Final

from tests.agent.replay import Replay

LINKS: Final = 18
COUNTERS: Final = (*range(206, 216), 219, 221)

_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED = 0, 2, 3
_UNSIGNED_LONG_LONG: Final = 3


class Blackwell(Replay):
    """The card.

    Attributes:
        counts: what it has counted, by field and link.
        broken: what reading a link answers in place of counts, by link.
        asked_of_links: how often a field of a link was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, int]] = Counter()
        self.broken: dict[int, int] = {}
        self.asked_of_links = 0

    def _nvmlDeviceGetFieldValues(self, _: Any, asked: list[Any]) -> list[Any]:
        return [self._field(*one) if isinstance(one, tuple) else _none(one) for one in asked]

    def _field(self, field: int, link: int) -> Any:
        self.asked_of_links += 1
        if link >= LINKS:
            return _none(field, _INVALID_ARGUMENT)
        if link in self.broken:
            return _none(field, self.broken[link])
        if field not in COUNTERS:
            return _none(field)
        # As the driver does: only the field of the type is set, others hold garbage.
        value = SimpleNamespace(ullVal=self.counts[field, link], dVal=1e-188)
        return SimpleNamespace(
            fieldId=field, nvmlReturn=_SUCCESS, valueType=_UNSIGNED_LONG_LONG, value=value
        )


def _none(field: int, code: int = _NOT_SUPPORTED) -> Any:
    return SimpleNamespace(fieldId=field, nvmlReturn=code, valueType=0, value=None)
