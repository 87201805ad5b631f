"""Entry points of the command line: run or complete a subcommand, imported only when it runs."""

import errno
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, ShellComplete
from typing_extensions import override  # in typing from Python 3.12 on

from extender.cli.session import connection_options
from extender.cli.transports import ClientError, Failure

# Names and help lines of the subcommands; the module of each is imported only when it runs.
#
# To add a subcommand: a module in `extender/cli/commands` with a click command called `command`,
# and a line here.

COMMANDS: Final = {
    "nodes": "List nodes with GPUs: idle GPUs, activity, memory, state.",
    "gpus": "List GPUs of the cluster or of one node: activity, memory, state, tenants.",
    "top": "Show the busiest GPUs, live.",
    "best": "List the nodes that suit a pod now, best first.",
    "defrag": "List the fewest pods to move so that a node has room for a large request.",
    "size": "Propose the GPUs of a task: from similar pods, its command, its description.",
    "explain": "Explain a pod's placement, or why it waits; with -f, of a manifest.",
    "pending": "List GPU pods that wait, with the reasons.",
    "holders": "List pods that hold GPUs and do not use them.",
    "costs": "Show the cost of held GPUs, used and idle, by pod, owner or namespace.",
    "decisions": "List the latest decisions.",
    "replay": "Repeat logged decisions with other settings, offline.",
    "regret": "Compare the outcome of placements with idlegpu's choice and the best node.",
    "advise": "Recommend how to share GPUs, and find pods that request far too much.",
    "run": "Print a Job that runs a command on GPUs; --apply submits it.",
    "smoke": "Run nvidia-smi on a node, in a pod with one GPU.",
    "doctor": "Find faults of the installation, with remedies.",
    "completion": "Print the completion script for a shell.",
}
"""Help line by subcommand; the module is `extender.cli.commands.NAME`, hyphens as underscores."""


def _module_of(name: str) -> str:
    """Return the module name of a subcommand.

    Example:
        >>> _module_of("nodes")
        'extender.cli.commands.nodes'
    """
    return f"extender.cli.commands.{name.replace('-', '_')}"


_EPILOG: Final = """\b
Exit status: 0 success; 1 nothing found, or no node suits; 2 wrong usage;
3 the extender is unreachable; 4 access refused; 5 the extender failed."""


class _Commands(click.Group):
    """Click group that imports a subcommand only when it runs, so that `--help` stays fast."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands' names in the order of the help page."""
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand; fail with a usage error if the name is unknown."""
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:
                return None
            similar = get_close_matches(cmd_name, COMMANDS, n=1)
            meant = f": did you mean {similar[0]}?" if similar else ":"
            ctx.fail(f"{cmd_name!r} is not a command{meant} must be one of {', '.join(COMMANDS)}")
        command: click.Command = importlib.import_module(_module_of(cmd_name)).command
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each subcommand's name and help line without importing the subcommand."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return completions for a partial word: subcommands with their help line, and options."""
        found = [
            CompletionItem(name, help=text)
            for name, text in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    @override
    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; print a `ClientError` as one line and exit with its status."""
        try:
            return super().invoke(ctx)
        except ClientError as error:
            click.echo(f"idlegpu: {error}", err=True)
            ctx.exit(error.failure.value)


def _version() -> str:
    return importlib.metadata.version("idlegpu")


@click.group(
    cls=_Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, value: _show_version(ctx, is_wanted=value),
    help="Show the version.",
)
@connection_options(environment=True)
@click.pass_context
def idlegpu(context: click.Context, /, **connection: Any) -> None:  # noqa: ANN401 - options
    """Show a cluster's idle GPUs, and the reasons for the placement of pods."""
    context.default_map = {name: dict(connection) for name in COMMANDS}


def _show_version(context: click.Context, *, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        click.echo(_version())
        context.exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, run the subcommand and exit the process.

    Args:
        arguments: command-line arguments, None for those of the process.
    """
    # kubectl runs the plugin file kubectl-idlegpu; users type `kubectl idlegpu`.
    program = Path(sys.argv[0]).name
    if sys.stdout is None:  # the caller closed it
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end
    name = "kubectl idlegpu" if program.startswith("kubectl-") else "idlegpu"
    try:
        idlegpu.main(args=None if arguments is None else list(arguments), prog_name=name)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        click.echo(f"idlegpu: cannot write the output: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the flush at exit would fail again
        sys.exit(Failure.BAD_REQUEST.value)


class _Directive(IntEnum):
    """Instruction to the shell, with the numbers of cobra, kubectl's command-line library."""

    FILES = 0
    NO_FILES = 4
    FOLDERS = 16


_DIRECTIVES = {"file": _Directive.FILES, "dir": _Directive.FOLDERS}
"""Directives by the `type` of click's completion items."""


def complete(arguments: Sequence[str] | None = None) -> None:
    """Write the completions of a word for kubectl, which runs `kubectl_complete-idlegpu`.

    The output has cobra's format: one candidate per line, a tab, its description; on the last line
    a colon and a `_Directive`.

    Args:
        arguments: words after `idlegpu`, the last one incomplete; None: those of the process.
    """
    *before, typed = (sys.argv[1:] if arguments is None else arguments) or [""]
    found = ShellComplete(idlegpu, {}, "kubectl idlegpu", "").get_completions(before, typed)
    for line in _completion_lines(found):
        click.echo(line)


def _completion_lines(found: Iterable[CompletionItem]) -> Iterator[str]:
    directive = _Directive.NO_FILES
    for item in found:
        if item.type in _DIRECTIVES:
            directive = _DIRECTIVES[item.type]
        else:
            yield f"{item.value}\t{item.help}" if item.help else str(item.value)
    yield f":{directive}"


if __name__ == "__main__":
    main()
