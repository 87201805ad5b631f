"""Shell completion for `kubectl idlegpu`: kubectl runs this as `kubectl_complete-idlegpu`.

The arguments are the words after `idlegpu`; the last one is incomplete. The output has cobra's
format: one candidate per line, a tab, its description; on the last line a colon and a `_Directive`.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

import click
from click.shell_completion import CompletionItem, ShellComplete

from extender.cli.__main__ import idlegpu


class _Directive(IntEnum):
    """Instruction to the shell, with the numbers of cobra, kubectl's command-line library."""

    FILES = 0
    NO_FILES = 4
    FOLDERS = 16


_DIRECTIVES = {"file": _Directive.FILES, "dir": _Directive.FOLDERS}
"""Directives by the `type` of click's completion items."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the completions of the word at the end.

    Args:
        arguments: words after `idlegpu`, None for those of the process.
    """
    *before, typed = (sys.argv[1:] if arguments is None else arguments) or [""]
    found = ShellComplete(idlegpu, {}, "kubectl idlegpu", "").get_completions(before, typed)
    for line in _lines(found):
        click.echo(line)


def _lines(found: Iterable[CompletionItem]) -> Iterator[str]:
    directive = _Directive.NO_FILES
    for item in found:
        if item.type in _DIRECTIVES:
            directive = _DIRECTIVES[item.type]
        else:
            yield f"{item.value}\t{item.help}" if item.help else str(item.value)
    yield f":{directive}"
