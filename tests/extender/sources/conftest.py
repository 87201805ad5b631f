"""A small Prometheus, for whatever asks one."""

from collections.abc import AsyncIterator

import pytest

from tests.extender.sources.asking import NOW
from tests.extender.sources.fake_prometheus import FakePrometheus


@pytest.fixture
async def fake() -> AsyncIterator[FakePrometheus]:
    """A Prometheus without series, at `NOW`."""
    fake = FakePrometheus(clock=lambda: NOW)
    server = await fake.start()
    yield fake
    await server.close()
