"""Escape control characters in text that comes from outside and is shown in a terminal."""

import re
from typing import Final

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 but for tab and newline, DEL, and C1: 0x9b alone begins a command as ESC [ does."""

_LEFT_BY_JSON: Final = re.compile(r"[\x7f-\x9f]")


def escape_text(text: str) -> str:
    r"""Return text without control characters; tabs and newlines stay.

    Example:
        >>> escape_text("a\x1b[31m\x9b31m")
        'a\\x1b[31m\\x9b31m'
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def escape_json(text: str) -> str:
    r"""Escape DEL and C1 in JSON: encoders leave them as they are.

    Example:
        >>> escape_json('{"a": "\x9b31m"}')
        '{"a": "\\u009b31m"}'
    """
    return _LEFT_BY_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
