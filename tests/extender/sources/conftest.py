"""A fake Prometheus for tests of the sources."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from extender.sources.prometheus.responses import Rows
from testkit.collecting import NOW
from testkit.prometheus.fake import FakePrometheus


@pytest.fixture
async def fake() -> AsyncIterator[FakePrometheus]:
    """A Prometheus without series, at `NOW`."""
    fake = FakePrometheus(clock=lambda: NOW)
    server = await fake.start()
    yield fake
    await server.close()


@pytest.fixture
def parsing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of parsed rows of each answer with rows."""
    sizes: list[int] = []
    iterate = Rows.__iter__

    def counted(self: Rows) -> Any:
        sizes.extend([len(self)] if self else [])
        return iterate(self)

    monkeypatch.setattr(Rows, "__iter__", counted)
    return sizes
