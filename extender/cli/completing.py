"""What `kubectl idlegpu` may go on with: kubectl runs `kubectl_complete-idlegpu` to know.

It is given the words after `idlegpu`, the last one as far as it is typed, and writes what that may
become as kubectl's own completion does: a line each, with a tab before what people are told of it,
and last a colon and what the shell is to do besides.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

import click
from click.shell_completion import CompletionItem, ShellComplete

from extender.cli.__main__ import idlegpu


class Directive(IntEnum):
    """What the shell is to do besides; numbers are cobra's, kubectl's library for commands."""

    FILES = 0
    NO_FILES = 4
    FOLDERS = 16


_DIRECTIVES = {"file": Directive.FILES, "dir": Directive.FOLDERS}
"""By click's word for what may stand there."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what the last word may become.

    Args:
        arguments: the words after `idlegpu`; those of the process unless given.
    """
    *before, typed = (sys.argv[1:] if arguments is None else arguments) or [""]
    found = ShellComplete(idlegpu, {}, "kubectl idlegpu", "").get_completions(before, typed)
    for line in _lines(found):
        click.echo(line)


def _lines(found: Iterable[CompletionItem]) -> Iterator[str]:
    directive = Directive.NO_FILES
    for item in found:
        if item.type in _DIRECTIVES:
            directive = _DIRECTIVES[item.type]
        else:
            yield f"{item.value}\t{item.help}" if item.help else str(item.value)
    yield f":{directive}"
