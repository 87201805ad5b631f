"""Reports of agents of earlier and later releases."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from agent.report.contract import ReportError, decode_update
from testkit.agent.json_report import decode_report
from tests.contract.reports import (
    MEANING,
    RECORDINGS,
    REPORT,
    STREAM,
    frames,
    meaning,
    project_version,
    reports,
    rest_report,
    stream,
)

RELEASES: Final = sorted(RECORDINGS.iterdir())
RECORD_AGAIN: Final = "the agent sends other bytes now: python -m tests.contract.reports"

releases = pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)


def of_a_later_release(messages: Iterator[bytes]) -> Iterator[bytes]:
    """Add unknown fields and an unknown row to each message."""
    devices = 0
    for message in messages:
        update: dict[str, Any] = msgspec.msgpack.decode(message)
        layout = update.get("layout")
        if layout:
            devices = len(layout["devices"])
            layout |= {"novelty": [1], "rows": [*layout["rows"], "novel_ratio"]}
            layout["devices"] = [{**device, "novelty": {"a": 1}} for device in layout["devices"]]
        if update.get("holders"):
            update["holders"]["novelty"] = "x"
        update |= {"novelty": {"b": 2}, "values": update["values"] + bytes(8 * devices)}
        yield msgspec.msgpack.encode(update)


@releases
def test_extender_decodes_reports_of_that_release(folder: Path) -> None:
    expected = json.loads((folder / MEANING).read_text())

    assert meaning(frames((folder / STREAM).read_bytes())) == expected
    assert len(expected) == len(reports())


@releases
def test_additional_fields_of_a_later_agent_are_ignored(folder: Path) -> None:
    messages = frames((folder / STREAM).read_bytes())
    expected = json.loads((folder / MEANING).read_text())

    assert meaning(of_a_later_release(messages)) == expected


@releases
def test_the_report_of_an_agent_of_that_release_can_be_read(folder: Path) -> None:
    content = (folder / REPORT).read_bytes()
    report = decode_report(content)

    assert report.agent_version == folder.name
    assert [device.key for device in report.devices] == [("GPU-aaaa", ""), ("GPU-bbbb", "")]
    novel = json.loads(content) | {"novelty": 1}
    assert decode_report(json.dumps(novel).encode()) == report


def test_a_message_that_would_be_misunderstood_is_refused_with_both_versions() -> None:
    message = msgspec.msgpack.decode(next(frames(stream())))

    with pytest.raises(ReportError, match="update of version 2: must be version 1"):
        decode_update(msgspec.msgpack.encode({**message, "version": 2}))


def test_recording_of_this_release_matches_its_agent() -> None:
    folder = RECORDINGS / project_version()

    assert (folder / STREAM).read_bytes() == stream(), RECORD_AGAIN
    assert (folder / REPORT).read_bytes() == rest_report() + b"\n", RECORD_AGAIN
