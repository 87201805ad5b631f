"""Formatting of values for people; the docstrings have the examples."""

import doctest
import importlib

import pytest
import yaml

from extender.cli.formatting import parse_span, span
from extender.cli.session import dump

MODULES = (
    "extender.cli.formatting",
    "extender.cli.manifests",
    "extender.cli.__main__",
    "extender.cli.commands.pending",
    "extender.cli.transports",
    "extender.insight.scheduler_message",
    "extender.insight.holders",
    "extender.insight.views",
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_hold(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))

    assert done.attempted > 0
    assert done.failed == 0


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_no_document_controls_a_terminal(output: str) -> None:
    hostile = "\x1b[31m\x85\x9b\u2028\u202e"

    written = dump({"\u00b0C": hostile}, output)

    assert all(map(str.isprintable, written.split("\n")))
    assert yaml.safe_load(written) == {"\u00b0C": hostile}
    assert dump({"a": "\u00b0C"}, output).count("\u00b0C") == 1


@pytest.mark.parametrize("text", ["1h", "30m", "1d12h", "90", "45s"])
def test_a_time_span_is_read_as_it_is_written(text: str) -> None:
    assert span(parse_span(text)) in {text, "1m30s"}


@pytest.mark.parametrize("text", ["", " ", "h", "1x", "-1h", "12h1d"])
def test_invalid_time_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a time such as 30m"):
        parse_span(text)
