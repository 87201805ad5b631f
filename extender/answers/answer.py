"""Base of the JSON API's answers.

None means unknown. A field that an older extender does not send gets its default, and a field that
this client does not know is ignored. Documentation of the fields is generated from the docstrings.
"""

import msgspec


class Answer(msgspec.Struct):
    """An object of an answer."""


class ErrorAnswer(Answer):
    """Error of a request.

    Attributes:
        error: the fault and its remedy.
        unreachable: addresses of the replicas that did not answer, if there are any.
    """

    error: str
    unreachable: list[str] | msgspec.UnsetType = msgspec.UNSET
