"""Complete names of nodes, pods and namespaces in a shell, from the extender's answers.

Without an answer in time there are no candidates and no error message, because the user is typing.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Final

import click

from extender.cli.client import Client
from extender.cli.remote.errors import ClientError
from extender.cli.session import ConnectionOptions, Session

_SECONDS: Final = 2.0
"""Time limit for one request."""
_MOST: Final = 1000

_Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def _nodes(client: Client) -> Iterable[str]:
    return (node.name for node in client.nodes().nodes)


def _pods(client: Client) -> Iterable[str]:
    """Yield the pods that hold GPUs, that wait, or whose decisions are remembered."""
    for node in client.nodes().nodes:
        yield from node.pods
    yield from (pod.pod for pod in client.pending(limit=_MOST).pods)
    yield from (one.pod for one in client.decisions(limit=_MOST).decisions)


def _namespaces(client: Client) -> Iterable[str]:
    return (pod.partition("/")[0] for pod in _pods(client) if "/" in pod)


def _from(names_of: Callable[[Client], Iterable[str]]) -> _Complete:
    """Return a completion callback for names that the extender knows."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        try:
            session = Session(_connection(ctx)).with_timeout(_SECONDS)
            names = {name for name in names_of(session.client) if name.startswith(incomplete)}
        except (ClientError, OSError, ValueError):
            return []
        given = ctx.params.get(param.name or "") or ()
        return sorted(names.difference(given if param.nargs == -1 else ()))

    return complete


def _connection(ctx: click.Context) -> ConnectionOptions:
    """Return the connection options typed so far: the subcommand's count before the group's."""
    values: dict[str, Any] = {}
    for one in fields(ConnectionOptions):
        for context in (ctx, ctx.parent):
            value = context.params.get(one.name) if context is not None else None
            if value not in {None, one.default}:
                values[one.name] = value
                break
    return ConnectionOptions(**values)


NODES: Final = _from(_nodes)
PODS: Final = _from(_pods)
NAMESPACES: Final = _from(_namespaces)
"""Values of `shell_complete` for click's parameters."""
