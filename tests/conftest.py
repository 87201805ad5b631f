"""Fixtures that more than one folder of tests uses."""

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
ALL_IS_SEARCHED_AFTER: Final = 300
"""Tests from one thorough search for garbage to the next."""

_tests: Final = count(1)

# hypothesis asks for the current loop, and asyncio makes one that nobody closes unless told that
# there is none: each async test brings its own.
asyncio.set_event_loop(None)

# A shell's background jobs ignore SIGINT, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

trust_no_authority()
# As the extender sets it for itself and its worker process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# How long an example takes says how busy the machine is, not whether the code is right. The same
# examples each time: a change is not blamed for what chance finds; `--hypothesis-profile=random`
# looks for more. `quick` is for `make check ROOM=...`.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("idlegpu", settings.get_profile("random"), derandomize=True)
settings.register_profile("quick", settings.get_profile("idlegpu"), max_examples=15)
settings.load_profile("idlegpu")


class FilesAndScenarios(LoadScopeScheduling):  # type: ignore[misc] # xdist ships no types
    """Has one process run all tests of a file, which may share what they start; not of scenarios.

    Each process has what scenarios need running anyway. They go one by one, after all files: so no
    process has much left to do when the others are done.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SCENARIOS) else nodeid.partition("::")[0]


@pytest.fixture(autouse=True)
def _garbage_is_searched_in_what_is_new() -> None:
    """Keep thousands of collected tests out of the search that each extender begins with.

    Now and then all is searched nevertheless: what tests leave behind must not pile up, and tells
    here what was not closed.
    """
    if next(_tests) % ALL_IS_SEARCHED_AFTER == 0:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_level_is_restored() -> Iterator[None]:
    """Fail the test that leaves another log level behind: later tests would see other records."""
    level = logging.getLogger().level
    yield
    assert logging.getLogger().level == level


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Go so wherever tests of a file stay together."""
    return FilesAndScenarios(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Leave out modules without an example: importing them all takes a worker two seconds."""
    found = yield
    if any(isinstance(one, DoctestModule) for one in found) and ">>>" not in file_path.read_text():
        return [one for one in found if not isinstance(one, DoctestModule)]
    return found


def pytest_sessionfinish() -> None:
    """Have pytest's own last search find all."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the scenarios that may take longest."""
    scenarios = [item for item in items if item.nodeid.startswith(SCENARIOS)]
    others = [item for item in items if not item.nodeid.startswith(SCENARIOS)]
    items[:] = [*others, *sorted(scenarios, key=_limit_seconds, reverse=True)]


def _limit_seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0
