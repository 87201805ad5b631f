"""Names and help lines of the subcommands; the module of each is imported only when it runs.

To add a subcommand: a module in `extender/cli/commands` with a click command called `command`, and
a line here.
"""

from typing import Final

COMMANDS: Final = {
    "nodes": "List nodes with GPUs: idle GPUs, activity, memory, state.",
    "gpus": "List GPUs of the cluster or of one node: activity, memory, state, tenants.",
    "top": "Show the busiest GPUs, live.",
    "best": "List the nodes that suit a pod now, best first.",
    "explain": "Explain a pod's placement, or why it waits; with -f, of a manifest.",
    "pending": "List GPU pods that wait, with the reasons.",
    "holders": "List pods that hold GPUs and do not use them.",
    "costs": "Show the cost of held GPUs, used and idle, by pod, owner or namespace.",
    "decisions": "List the latest decisions.",
    "replay": "Repeat logged decisions with other settings, offline.",
    "regret": "Compare the outcome of placements with our choice and the best node.",
    "advise": "Recommend how to share GPUs, and find pods that request far too much.",
    "run": "Print a Job that runs a command on GPUs; --apply submits it.",
    "smoke": "Run nvidia-smi on a node, in a pod with one GPU.",
    "doctor": "Find faults of the installation, with remedies.",
    "completion": "Print the completion script for a shell.",
}
"""Help line by subcommand; the module is `extender.cli.commands.NAME`, hyphens as underscores."""


def module_of(name: str) -> str:
    """Return the module name of a subcommand.

    Example:
        >>> module_of("nodes")
        'extender.cli.commands.nodes'
    """
    return f"extender.cli.commands.{name.replace('-', '_')}"
