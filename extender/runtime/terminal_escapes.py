"""Escape control characters in text from outside before a terminal shows it."""

import re
from typing import Final

_DIRECTIONS: Final = r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""Separators of lines, and marks that change the direction of text: a terminal then shows another
text than the actual one."""

_CONTROLS: Final = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_DIRECTIONS}]")
"""C0 except tab and newline, DEL, and C1: 0x9b alone starts a command, as ESC [ does."""

_LEFT_BY_JSON: Final = re.compile(rf"[\x7f-\x9f{_DIRECTIONS}]")


def escape_text(text: str) -> str:
    r"""Escape the control characters in text, except tabs and newlines.

    Example:
        >>> escape_text("a\x1b[31m\x9b31m\u202eb")
        'a\\x1b[31m\\x9b31m\\u202eb'
    """
    return _CONTROLS.sub(lambda found: _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"  # noqa: PLR2004 - two digits


def escape_json(text: str) -> str:
    r"""Escape DEL, C1 and marks of direction in JSON, because encoders leave them unescaped.

    Example:
        >>> escape_json('{"a": "\x9b31m\u202e"}')
        '{"a": "\\u009b31m\\u202e"}'
    """
    return _LEFT_BY_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


_REPLACED: Final = "\ufffd"


def plain_text(text: str, most: int) -> str:
    r"""Return at most `most` characters of a text, without control and invisible characters.

    Example:
        >>> plain_text("python3\x1b[31m\u202e", 20)
        'python3�[31m�'
    """
    shown = text[:most]
    if shown.isprintable():  # nearly always, and ten times as fast
        return shown
    return "".join(one if one.isprintable() else _REPLACED for one in shown)
