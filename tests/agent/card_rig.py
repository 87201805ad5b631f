"""A reader of one scripted card, for tests of what it makes of the card's answers."""

from collections import Counter

from agent.card_reader import CardReader
from agent.reading import DeviceReading
from agent.worker import Lane
from tests.agent.scripted import ScriptedBackend, ScriptedCard

NOW = 1_800_000_000.0


class Rig:
    """A reader of the first card, and its clock."""

    def __init__(self, card: ScriptedCard) -> None:
        self.scripted = card
        self.backend = ScriptedBackend(card)
        self.backend.start()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.now = NOW
        self.lane = Lane(10.0)
        described = self.backend.card(0)
        self.reader = CardReader(
            self.backend,
            described,
            self.backend.topology(described, [described]),
            self.backend.instances(described),
            self.failures,
        )

    def read(self, *, is_slow: bool = True, with_rates: bool = True) -> tuple[DeviceReading, ...]:
        self.now += 1
        return self.reader.read(self.lane, self.now, is_slow=is_slow, with_rates=with_rates)

    def one(self, **due: bool) -> DeviceReading:
        (reading,) = self.read(**due)
        return reading
