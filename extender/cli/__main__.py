"""The command line's entry: finds the subcommand, and turns failures into exit statuses."""

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem
from typing_extensions import override  # in typing from Python 3.12 on

from extender.cli.registry import COMMANDS, module_of
from extender.cli.session import connection_options
from extender.remote.errors import ClientError

EPILOG: Final = """\b
Exit status: 0 done; 1 nothing was found, or nothing would do; 2 wrong usage;
3 the extender cannot be reached; 4 it refuses; 5 it failed."""


class Commands(click.Group):
    """Subcommands that are imported when they are used: help takes no more than a moment."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in their order."""
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand, None where there is none of that name."""
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:
                return None
            ctx.fail(f"{cmd_name!r} is no command: must be one of {', '.join(COMMANDS)}")
        command: click.Command = importlib.import_module(module_of(cmd_name)).command
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write name and help of each, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return what a word may become: subcommands with their whole line of help, options."""
        found = [
            CompletionItem(name, help=text)
            for name, text in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    @override
    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; what fails is told in a line."""
        try:
            return super().invoke(ctx)
        except ClientError as error:
            click.echo(f"idlegpu: {error}", err=True)
            ctx.exit(error.failure.value)


def _version() -> str:
    return importlib.metadata.version("idlegpu")


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
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
    """Where the idle GPUs of a cluster are, and why pods go where they go."""
    context.default_map = {name: dict(connection) for name in COMMANDS}


def _show_version(context: click.Context, *, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        click.echo(_version())
        context.exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process.

    Args:
        arguments: those of the process unless given.
    """
    # kubectl finds plugins by their file's name, and people call them otherwise.
    called = Path(sys.argv[0]).name
    name = "kubectl idlegpu" if called.startswith("kubectl-") else "idlegpu"
    idlegpu.main(args=None if arguments is None else list(arguments), prog_name=name)


if __name__ == "__main__":
    main()
