"""`idlegpu completion`: print a shell's completion script."""

from typing import Final

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")
_HELP: Final = """Print the completion script for SHELL.

\b
idlegpu completion bash > ~/.local/share/bash-completion/completions/idlegpu
idlegpu completion zsh > "${fpath[1]}/_idlegpu"
idlegpu completion fish > ~/.config/fish/completions/idlegpu.fish
"""


@click.command("completion", help=_HELP)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL."""
    completion_class = get_completion_class(shell)
    group = context.find_root().command
    if completion_class is None:
        raise click.UsageError(f"{shell}: click has no completion for this shell")
    click.echo(completion_class(group, {}, "idlegpu", "_IDLEGPU_COMPLETE").source())
