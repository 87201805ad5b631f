"""Options, client, output format and name completion that all subcommands share."""

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, ParamSpec

import click

from extender.answers.answer import Answer
from extender.cli.client import SERVICE, Client, read_token
from extender.cli.formatting import Number
from extender.cli.transports import ClientError
from extender.runtime.terminal_escapes import escape_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from extender.cli.cluster import Cluster

_P = ParamSpec("_P")

_WIDE: Final = 10_000
"""Width in columns if the output is not a terminal, so that `grep` and `awk` see whole lines."""

FILE: Final = click.Path(readable=False)
"""File name that shells can complete; a missing file is reported where it is opened."""

_OUTPUTS: Final = ("table", "wide", "json", "yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Options for reaching the extender; "" means not given.

    Attributes:
        url: base URL of the extender; without it requests go through the API server's proxy.
        service: the extender's Service as `namespace/name:port`, for the proxy.
        kubeconfig: path of the kubeconfig, "" for the one that kubectl would use.
        context: context of the kubeconfig.
        token: bearer token for the extender.
        token_file: file that contains the token.
        ca_file: PEM file of the CA that signed the certificate of `url`.
        timeout: time limit for one request, in seconds.
    """

    url: str = ""
    service: str = SERVICE
    kubeconfig: str = ""
    context: str = ""
    token: str = ""
    token_file: str = ""
    ca_file: str = ""
    timeout: float = 30.0


class Session:
    """One run of a subcommand: its connection and its output format.

    Args:
        connection: options for reaching the extender.
    """

    def __init__(self, connection: ConnectionOptions, output: str = "table") -> None:
        self._connection = connection
        self._has_shown = False
        self.output = output

    @property
    def is_wide(self) -> bool:
        """Whether tables show all their columns."""
        return self.output == "wide"

    @property
    def is_table(self) -> bool:
        """Whether the output is a table for people, not JSON or YAML."""
        return self.output in {"table", "wide"}

    @functools.cached_property
    def client(self) -> Client:
        """Client for the extender, created on first use."""
        known = self._connection
        token = known.token or (read_token(known.token_file) if known.token_file else "")
        if known.url:
            return Client.at(
                known.url, token=token, ca_file=known.ca_file or None, timeout_seconds=known.timeout
            )
        try:
            cluster = self.cluster
        except ClientError as error:
            hint = "or connect to an extender directly, --url (IDLEGPU_URL)"
            raise ClientError(f"{error}; {hint}", error.failure) from error
        return Client(cluster.service(known.service, token=token))

    def with_timeout(self, seconds: float) -> "Session":
        """Return a session with a shorter timeout, for an answer that is optional."""
        known = self._connection
        return Session(replace(known, timeout=min(seconds, known.timeout)), self.output)

    @functools.cached_property
    def cluster(self) -> "Cluster":
        """Client for the API server, created on first use."""
        from extender.cli.cluster import Cluster  # takes half a second

        known = self._connection
        return Cluster.from_kubeconfig(
            known.kubeconfig or None, context=known.context or None, timeout_seconds=known.timeout
        )

    @functools.cached_property
    def console(self) -> "Console":
        """Console that prints the tables."""
        return _make_console()

    def show(self, answer: Answer, render: "Callable[[], RenderableType]") -> None:
        """Print an answer in the chosen format, separated from the previous answer.

        Args:
            answer: the extender's answer.
            render: builds the table; called only for table output.
        """
        is_next, self._has_shown = self._has_shown, True
        if self.is_table:
            if is_next:
                click.echo()
            show_table(self.console, render())
            return
        if is_next and self.output == "yaml":
            click.echo("---")
        self.write(answer)

    def write(self, document: object) -> None:
        """Write a document to standard output as JSON or YAML."""
        sys.stdout.write(dump(document, self.output))


def _make_console() -> "Console":
    """Return a console that prints text literally: it interprets no markup."""
    from rich.console import Console  # slow to import, not needed for JSON

    is_terminal = sys.stdout.isatty()
    return Console(
        markup=False,
        highlight=False,
        emoji=False,
        width=None if is_terminal else _WIDE,
        soft_wrap=False,
    )


def show_table(console: "Console", table: "RenderableType") -> None:
    """Print a table; without a terminal, strip the trailing blanks of each line."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    sys.stdout.flush()  # the live view prints more later, and a pipe's reader wants this now


def dump(document: object, output: str) -> str:
    """Encode a document as JSON or YAML."""
    import msgspec  # slow to import, not needed for tables

    plain = msgspec.to_builtins(document)
    if output == "yaml":
        import yaml

        # libyaml, where PyYAML has it, is several times as fast: thousands of nodes take seconds.
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml.dump(plain, Dumper=dumper, sort_keys=False, allow_unicode=True)
        if all(map(str.isprintable, text.split("\n"))):
            return str(text)
        escaped = yaml.dump(plain, Dumper=dumper, sort_keys=False, allow_unicode=False)
        return str(escaped)
    return escape_json(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()) + "\n"


def output_option(command: Callable[_P, None]) -> Callable[_P, None]:
    """Add the option `--output` to a command."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(_OUTPUTS),
        default="table",
        show_default=True,
        help="Output format.",
    )(command)


def connection_options(
    *, environment: bool, timeout: bool = True
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]:
    """Return a decorator that adds the connection options to a command.

    Args:
        environment: whether the options read environment variables. Only the group does, and the
            options of a subcommand override it.
        timeout: whether to add --timeout; a subcommand may use that name for itself.
    """

    def variable(name: str) -> str | None:
        return name if environment else None

    options = [
        click.option("--url", default="", envvar=variable("IDLEGPU_URL"), metavar="URL",
                     help="URL of the extender (https://localhost:8889) or its page; unless set, "
                     "requests go through the API server. [IDLEGPU_URL]"),
        click.option("--service", default=SERVICE, envvar=variable("IDLEGPU_SERVICE"),
                     metavar="NS/NAME:PORT", show_default=True,
                     help="The extender's Service, for the API server's proxy. [IDLEGPU_SERVICE]"),
        click.option("--kubeconfig", default="", envvar=variable("KUBECONFIG"), metavar="FILE",
                     type=FILE, help="Kubeconfig for the API server. [KUBECONFIG]"),
        click.option("--context", default="", metavar="NAME", help="Context of the kubeconfig."),
        click.option("--token", default="", envvar=variable("IDLEGPU_TOKEN"), metavar="TOKEN",
                     help="Bearer token for the extender. [IDLEGPU_TOKEN]"),
        click.option("--token-file", default="", envvar=variable("IDLEGPU_TOKEN_FILE"),
                     metavar="FILE", type=FILE, help="File with the token. [IDLEGPU_TOKEN_FILE]"),
        click.option("--ca-file", default="", envvar=variable("IDLEGPU_CA_FILE"), metavar="FILE",
                     type=FILE, help="CA file for the certificate of --url. [IDLEGPU_CA_FILE]"),
    ]  # fmt: skip
    if timeout:
        options.append(
            click.option("--timeout", default=30.0, show_default=True, metavar="SECONDS",
                         type=Number(0.1, 3600), help="Time limit for one request.")
        )  # fmt: skip

    def add(command: Callable[_P, Any]) -> Callable[_P, Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def connected(command: Callable[..., None], *, timeout: bool = True) -> Callable[..., None]:
    """Decorate a subcommand: add the connection options and pass it a `Session` made from them.

    Args:
        command: the subcommand's function.
        timeout: whether --timeout is a connection option here; if not, only `idlegpu --timeout`
            sets it.
    """

    @functools.wraps(command)
    def run(**values: Any) -> None:  # noqa: ANN401 - a command's own options
        own = {
            name: values.pop(name)
            for name in ConnectionOptions.__dataclass_fields__
            if timeout or name != "timeout"
        }
        if not timeout:
            group = click.get_current_context().parent
            own["timeout"] = group.params["timeout"] if group is not None else 30.0
        command(Session(ConnectionOptions(**own), values.pop("output")), **values)

    return output_option(connection_options(environment=False, timeout=timeout)(run))


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

namespace_option = click.option(
    "-n",
    "--namespace",
    metavar="NAME",
    shell_complete=NAMESPACES,
    help="Only pods of this namespace.",
)
"""Decorator that adds the option `--namespace` to a command that lists pods."""
