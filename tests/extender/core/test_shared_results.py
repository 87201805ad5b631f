from collections.abc import Callable

import pytest

from extender.core.decision import assessment
from extender.core.decision.assessment import assess
from extender.core.decision.evaluation import estimates
from extender.core.nodes.snapshot import _MAX_RESULTS, _SharedResults
from extender.core.policy import Policy
from testkit.builders import GIB, batch_of, busy, device_request, gpu, node


def refuse() -> str:
    raise AssertionError("made although it is there")


def give(value: str) -> Callable[[], str]:
    return lambda: value


def test_a_result_is_made_once_for_each_key() -> None:
    results = _SharedResults()

    assert results.get(("a", 1), give("first")) == "first"
    assert results.get(("a", 1), refuse) == "first"
    assert results.get(("a", 2), give("second")) == "second"


def test_without_a_key_nothing_is_cached() -> None:
    results = _SharedResults()
    results.get(None, give("first"))

    assert results.get(None, give("second")) == "second"


def test_the_least_recently_used_result_is_evicted_when_full() -> None:
    results = _SharedResults()
    for number in range(_MAX_RESULTS):
        results.get(number, give(str(number)))
    results.get(0, refuse)

    results.get("one more", give("..."))

    assert results.get(0, refuse) == "0"
    assert results.get(1, give("again")) == "again"


def test_requests_with_other_memory_share_the_remaining_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = batch_of(node(gpu(), busy()), node(busy(), busy()))
    assess(batch, device_request(memory_bytes=GIB).columns, estimates(Policy()))
    monkeypatch.setattr(assessment, "landing_set", None)  # any call fails
    monkeypatch.setattr(assessment, "_idleness", None)

    found = assess(batch, device_request(memory_bytes=100 * GIB).columns, estimates(Policy()))

    assert not found.fits.any()
    with pytest.raises(TypeError):
        assess(batch, device_request(2).columns, estimates(Policy()))
