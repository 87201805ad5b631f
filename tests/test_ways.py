"""Paths of a request and of readings in docs/architecture.md, compared with the code."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from aiohttp.test_utils import TestClient, TestServer

from extender.core.request.gpu_resources import ResourceNames
from extender.sources.kubernetes.records import reduce_pod
from testkit.cards import IDLE
from testkit.webhook_requests import pod
from testkit.world import World
from tests.files import ROOT

STATION: Final = re.compile(r"^\d+\. `(?P<path>[\w/]+)\.py` `(?P<name>[\w.]+)`: ", re.MULTILINE)
SECTION: Final = re.compile(
    r"^### (?P<title>[^\n]+)\n(?P<text>.*?)(?=^##)", re.MULTILINE | re.DOTALL
)

Station = tuple[str, str]


def ways() -> dict[str, list[Station]]:
    """Return the file and name of each function of a path, by title of the path."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return {
        section["title"]: stations
        for section in SECTION.finditer(text)
        if (stations := [(one["path"], one["name"]) for one in STATION.finditer(section["text"])])
    }


def function_of(station: Station) -> Callable[..., Any]:
    path, name = station
    found: Any = importlib.import_module(f"extender.{path.replace('/', '.')}")
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def test_every_function_on_a_way_exists() -> None:
    assert list(ways()) == ["A filter request", "A Prometheus reading", "An agent's report"]
    for stations in ways().values():
        assert all(callable(function_of(station)) for station in stations)


def filter_args(world: World, name: str, nodes: list[str]) -> bytes:
    """Create a waiting pod; return its filter request as kube-scheduler writes it."""
    raw = pod(name)
    metadata: Any = raw["metadata"]
    raw["metadata"] = {
        **{key: metadata[key] for key in ("name", "namespace", "uid")},
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    record = reduce_pod(raw, ResourceNames(), early_seconds=60.0)
    assert record is not None
    world.fleet.apply_pod(record)
    document = {"Pod": raw, "Nodes": None, "NodeNames": nodes}
    return json.dumps(document, separators=(",", ":")).encode()


async def calls_of(client: TestClient[Any, Any], body: bytes) -> list[Station]:
    """Answer a filter request; return idlegpu's functions that were called, each once."""
    calls: dict[Station, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        _, is_ours, path = frame.f_code.co_filename.rpartition("/extender/")
        if event == "call" and is_ours:
            name = frame.f_code.co_qualname.removesuffix(".<locals>.handle")
            calls.setdefault((path.removesuffix(".py"), name))

    sys.setprofile(note)
    try:
        async with client.post("/filter", data=body) as answer:
            assert answer.status == 200
    finally:
        sys.setprofile(None)
    return list(calls)


async def test_a_filter_request_passes_the_functions_in_this_order() -> None:
    nodes = [f"node-{number:04d}-{'x' * 30}" for number in range(300)]
    world = World(shortlist=100)
    world.add({node: [IDLE] for node in nodes}, readings=1)
    async with TestClient(TestServer(world.build_app())) as client:
        await calls_of(client, filter_args(world, "first", nodes))
        calls = await calls_of(client, filter_args(world, "second", nodes))

    stations = ways()["A filter request"]
    assert [call for call in calls if call in stations] == stations
    assert len(stations) <= 22
    assert len({path.split("/")[0] for path, _ in stations}) <= 8
