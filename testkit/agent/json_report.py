"""Decode the JSON report that `/v1/report` and `--once` show."""

import msgspec

from agent.report.contract import Report


def decode_report(content: bytes | str) -> Report:
    """Decode a report; ignore unknown fields."""
    return msgspec.json.decode(content, type=Report)
