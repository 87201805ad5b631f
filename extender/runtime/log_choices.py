"""Choices of the log settings, importable without pydantic."""

from enum import StrEnum


class LogLevel(StrEnum):
    """Lowest level of the lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Format of the log lines."""

    JSON = "json"
    """One JSON object for each line, for machines."""
    TEXT = "text"
    """One line of text for people."""
