"""Errors of requests to the extender and to the API server."""

from enum import Enum

from extender.runtime.terminal_escapes import escape_text


class Failure(Enum):
    """Kind of a failure; its value is the exit status of the command line."""

    NOT_FOUND = 1
    """The requested thing does not exist, no node is suitable, or the doctor finds an error."""
    BAD_REQUEST = 2
    """The request is invalid: a parameter, a manifest, a setting of the client."""
    UNREACHABLE = 3
    """The server does not answer in time, or the doctor could check nothing. Before Kubernetes 1.37
    a missing Service gives status 1."""
    REFUSED = 4
    """The caller has no right to it."""
    FAULT = 5
    """The answer is malformed, or reports an error of the server."""


class ClientError(Exception):
    """A request to the extender or to the API server failed or was refused.

    The message may quote a server, so control characters in it are escaped.

    Attributes:
        failure: kind of the failure.
    """

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(escape_text(message))
        self.failure = failure


def cause_of(error: Exception) -> str:
    """Return an error's message on one line, of a file's error without its number and path."""
    cause = error.strerror if isinstance(error, OSError) else None
    return " ".join((cause or str(error)).split())
