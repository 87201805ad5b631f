"""The subcommands by name, with a line of help each: only the one that is used is imported.

To add one: a module in `extender/cli/commands` with a click command called `command`, and a line
here.
"""

from typing import Final

COMMANDS: Final = {
    "nodes": "Nodes with GPUs: how many are idle, how busy they are.",
    "gpus": "Every GPU, or those of one node: activity, memory, state, tenants.",
    "top": "The busiest GPUs, live.",
    "best": "The nodes that a pod would get now, best first.",
    "explain": "Why a pod went where it went, or waits; with -f what would happen.",
    "pending": "GPU pods that wait, and what each waits for.",
    "holders": "Pods that hold GPUs and do not use them.",
    "costs": "What GPUs that pods hold cost, used and idle, by pod, owner or namespace.",
    "decisions": "The last decisions.",
    "replay": "Decide again, by other settings, what a log of decisions tells.",
    "regret": "How placements turned out, against our choice and the best in hindsight.",
    "advise": "How to share cards, and pods that ask for far too much, from measured use.",
    "run": "Print a Job that runs a command on GPUs; --apply submits it.",
    "smoke": "Run nvidia-smi on a node, in a pod with one GPU.",
    "doctor": "What is wrong with the installation, and what to do.",
    "completion": "Print the completion script for a shell.",
}
"""Name and help; the module is `extender.cli.commands.NAME`, hyphens as underscores."""


def module_of(name: str) -> str:
    """Return the module of a subcommand.

    Example:
        >>> module_of("nodes")
        'extender.cli.commands.nodes'
    """
    return f"extender.cli.commands.{name.replace('-', '_')}"
