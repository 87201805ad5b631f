"""Retired words: none in any text that people read."""

import re
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
    r"unasked|not-asked": "bypassed; not called",
    r"sick": "unhealthy",
    r"as (?:it|they|things) (?:is|are|stands?|stood|was|were) then": "say when",
}
"""Pattern of a retired word, and the terms that replace it (docs/architecture.md has the words)."""

SUFFIXES: Final = {".py", ".md", ".js", ".html", ".css", ".yaml", ".tpl", ".sh", ".toml", ".txt"}
NOT_PROSE: Final = ("CHANGELOG.md", "requirements", "bench/data/", "bench/results/", "tests/data/")
"""Records, text of others, and measurements."""

_ANY: Final = re.compile(rf"(?<![a-z])(?:{'|'.join(RETIRED)})(?![a-z])")
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


def texts() -> Iterator[tuple[str, str]]:
    """Yield name and content of each text file for people."""
    for path in tracked("*"):
        name = str(path.relative_to(ROOT))
        is_text = path.suffix in SUFFIXES or path.name in {"Makefile", "Dockerfile"}
        if is_text and not name.startswith(NOT_PROSE) and path != Path(__file__):
            yield name, path.read_text(encoding="utf-8")


def retired(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and word of each retired word, also inside of names."""
    words = _CAMEL.sub(" ", text).lower()  # faster than a pattern that ignores case
    for found in _ANY.finditer(words):
        yield words.count("\n", 0, found.start()) + 1, found.group()


def test_no_text_holds_a_retired_word() -> None:
    assert [
        f"{name}:{number}: {word}" for name, text in texts() for number, word in retired(text)
    ] == []
