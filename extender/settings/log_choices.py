"""What can be chosen of the log; apart, because a program without settings logs as well."""

from enum import StrEnum


class LogLevel(StrEnum):
    """From which weight on a line is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """For whom log lines are."""

    JSON = "json"
    """One JSON object for each line, for machines."""
    TEXT = "text"
    """For people."""
