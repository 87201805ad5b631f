"""Command line, and the extender that it queries."""

from collections.abc import Iterator

import pytest

from testkit.cli_serving import Run, build_fleet, runner, serving
from testkit.world import World


@pytest.fixture(scope="package")
def fleet() -> World:
    return build_fleet()


@pytest.fixture(scope="package")
def url(fleet: World) -> Iterator[str]:
    with serving(fleet.build_app()) as address:
        yield address


@pytest.fixture
def run(url: str) -> Run:
    return runner(url)
