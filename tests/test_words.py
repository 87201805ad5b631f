"""Retired words: none in most rooms, and no more than listed in the others."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.files import ROOT, tracked

RETIRED: Final = {
    r"seldom": "rarely; log throttle",
    r"anew": "again; refresh",
    r"whoever": "the caller, or the party by name",
    r"(?:no|some)body": "no one, or the party by name",
    r"g(?:ives?|iving|ave) way": "yield",
    r"standings?": "entry of the evaluation cache; state",
    r"belie(?:fs?|ves?|ved|ving)": "estimate; assume",
    r"foresight": "prefetch",
    r"doors?": "port",
    r"shel(?:f|ves)": "object cache",
    r"la(?:ys?|id|ying)[ _]out": "allocate; arrange",
    r"last[ _]word": "binding attribution",
    r"rosters?": "device index",
    r"(?:un)?hear(?:d|s|ing)?": "receive; peers",
    r"t(?:ells?|old|elling)": "report, notify",
    r"(?<=_)unasked|unasked(?=_)": "bypassed; alone it names a route, settings and a fact",
    r"sick": "unhealthy",
    r"as (?:it|they|things) (?:is|are|stands?|stood|was|were) then": "say when",
}
"""Pattern of a retired word, and the terms that replace it (docs/architecture.md has the words)."""

KEPT_NAMES: Final = re.compile(r"idlegpu_pods_bound_unasked|unasked_json")
"""Names that operators and tools use: a metric, and the file name of an answer."""

LEFT: Final[dict[str, int]] = {
    "testkit": 27,
    "tests": 339,
    "tests/extender": 39,
    "tests/extender/effects": 86,
    "tests/extender/placement": 72,
    "tests/extender/server": 1,
}
"""Number of retired words that a room still holds. Lower a number as words go; never raise one."""

SUFFIXES: Final = {".py", ".md", ".js", ".html", ".css", ".yaml", ".tpl", ".sh", ".toml", ".txt"}
NOT_PROSE: Final = ("CHANGELOG.md", "requirements", "bench/data/", "bench/results/", "tests/data/")
"""Records, text of others, and measurements."""

_ANY: Final = re.compile(
    "|".join(rf"(?<![a-z])(?:{word})(?![a-z])" for word in RETIRED), re.IGNORECASE
)
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


def room(name: str) -> str:
    """Return the room of a file: a package of the extender, its tests, or a top-level folder."""
    parts = name.split("/")
    if parts[0] == "extender":
        return "/".join(parts[: min(2, len(parts) - 1)])
    if parts[:2] == ["tests", "extender"]:
        return "/".join(parts[: min(3, len(parts) - 1)])
    return parts[0] if len(parts) > 1 else "(root)"


def texts() -> Iterator[tuple[str, str]]:
    """Yield name and content of each text file for people."""
    for path in tracked("*"):
        name = str(path.relative_to(ROOT))
        is_text = path.suffix in SUFFIXES or path.name in {"Makefile", "Dockerfile"}
        if is_text and not name.startswith(NOT_PROSE) and path != Path(__file__):
            yield name, path.read_text(encoding="utf-8")


def retired(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and word of each retired word, also inside of names."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in _ANY.finditer(_CAMEL.sub(" ", KEPT_NAMES.sub("", line))):
            yield number, found.group()


def places() -> dict[str, list[str]]:
    """Return the places of retired words by room."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in texts():
        found[room(name)] += [f"{name}:{number}: {word}" for number, word in retired(text)]
    return found


def test_no_room_holds_more_retired_words_than_listed() -> None:
    found = places()

    too_many = {name: where for name, where in found.items() if len(where) > LEFT.get(name, 0)}
    assert too_many == {}
