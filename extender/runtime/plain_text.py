"""Replace characters in names from outside that hide or reorder the text beside them."""

from typing import Final

_REPLACED: Final = "\ufffd"


def plain_text(text: str, most: int) -> str:
    r"""Return at most `most` characters of a text, without control and invisible characters.

    Example:
        >>> plain_text("python3\x1b[31m\u202e", 20)
        'python3�[31m�'
    """
    return "".join(one if one.isprintable() else _REPLACED for one in text[:most])
