"""Fixtures and hooks that several folders of tests use."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings
from typing_extensions import override
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from testkit.internet import trust_no_authority

pytest_plugins = ["testkit.controlplane.fixtures"]

SCENARIOS: Final = "tests/e2e/"
TESTS_PER_COLLECTION: Final = 1000
"""Number of tests between two full garbage collections, which take most of a second each."""

_tests: Final = count(1)

# hypothesis asks for the current event loop, and asyncio would create one that is never closed.
# Each async test has its own loop.
asyncio.set_event_loop(None)

# A shell's background jobs ignore SIGINT, and programs that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

trust_no_authority()
# The extender sets the same for itself and its worker process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No deadline: the duration of an example depends on the load of the machine. Derandomized: a
# failure is then due to the change under test. Half of hypothesis' usual examples, because they
# are the same at every run; `--hypothesis-profile=random` searches for more. `quick` is for
# `make check ROOM=...`.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile(
    "idlegpu", settings.get_profile("random"), derandomize=True, max_examples=50
)
settings.register_profile("quick", settings.get_profile("idlegpu"), max_examples=15)
settings.load_profile("idlegpu")


class FilesAndScenarios(LoadScopeScheduling):  # type: ignore[misc] # xdist ships no types
    """xdist scheduler that runs the tests of a file in one process, but each scenario separately.

    Tests of a file may share what they start; all scenarios share the same processes anyway.
    Scenarios run after all files, one by one, so that all processes finish at about the same time.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SCENARIOS) else nodeid.partition("::")[0]


@pytest.fixture(autouse=True)
def _exclude_tests_from_gc() -> None:
    """Exclude thousands of collected tests from the garbage collection at each extender's start.

    After every `TESTS_PER_COLLECTION` tests a full collection runs. It frees the garbage of these
    tests, and warns of resources that they did not close.
    """
    if next(_tests) % TESTS_PER_COLLECTION == 0:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _check_log_level() -> Iterator[None]:
    """Fail a test that changes the log level, because later tests would log other records."""
    level = logging.getLogger().level
    yield
    assert logging.getLogger().level == level


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Use `FilesAndScenarios` with `--dist loadfile`."""
    return FilesAndScenarios(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Skip modules without a doctest: importing them all would take a worker two seconds."""
    found = yield
    if any(isinstance(one, DoctestModule) for one in found) and ">>>" not in file_path.read_text():
        return [one for one in found if not isinstance(one, DoctestModule)]
    return found


def pytest_sessionfinish() -> None:
    """Unfreeze all objects, so that pytest's last garbage collection includes them."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run scenarios last, those with the longest timeout first."""
    scenarios = [item for item in items if item.nodeid.startswith(SCENARIOS)]
    others = [item for item in items if not item.nodeid.startswith(SCENARIOS)]
    items[:] = [*others, *sorted(scenarios, key=_limit_seconds, reverse=True)]


def _limit_seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0
