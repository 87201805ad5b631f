"""What can go wrong between a program and the extender."""

from enum import Enum


class Failure(Enum):
    """What kind of failure it is; the value is the exit status that the command line ends with."""

    NOT_FOUND = 1
    """There is no such thing."""
    BAD_QUESTION = 2
    """The question cannot be used: a parameter, a manifest, a setting of the client."""
    UNREACHABLE = 3
    """Nobody answers there, or not in time."""
    REFUSED = 4
    """The caller may not."""
    FAULT = 5
    """The answer is none, or says that the other side failed."""


class ClientError(Exception):
    """The extender, or the API server, could not be asked, or refused.

    Attributes:
        failure: what kind of failure it is.
    """

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure
