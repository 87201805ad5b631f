"""How soon a replica is ready is told as a kubelet sees it, not as soon as it can decide."""

from math import isnan

import pytest

from bench import start
from bench.world import FleetSpec

SPEC = FleetSpec(nodes=20, gpu_pods=30, other_pods=50)
WAIT_SECONDS = 2.0


def test_ready_is_what_readyz_says_where_no_readings_come(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = {**start.DOWN, "ready": {"wait_seconds": WAIT_SECONDS}}
    monkeypatch.setattr(start, "DOWN", waiting)

    measured = start.measure(SPEC, is_down=True)

    assert measured.is_complete
    assert measured.ready_seconds - measured.decided_seconds > WAIT_SECONDS / 2
    assert isnan(measured.readings_seconds)
