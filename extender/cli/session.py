"""What every subcommand needs: the way to the extender, and how answers are shown."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, ParamSpec

import click

from extender.cli.words import Number
from extender.client import SERVICE, Client, read_token
from extender.escaping import escape_json
from extender.remote.answers import Answer
from extender.remote.errors import ClientError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from extender.remote.cluster import Cluster

P = ParamSpec("P")

WIDE: Final = 10_000
"""Columns where the output is no terminal: nothing is cut or folded for `grep` and `awk`."""

FILE: Final = click.Path(readable=False)
"""A file's name, for shells to complete; whoever opens it says what is wrong with it."""

OUTPUTS: Final = ("table", "wide", "json", "yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How the extender is reached; "" is not said.

    Attributes:
        url: its base URL; without one it is asked through the API server.
        service: `namespace/name:port`, for the API server's proxy.
        kubeconfig: the user's, "" for what kubectl takes.
        context: of the kubeconfig.
        token: for the extender.
        token_file: where one stands.
        ca_file: who signs the certificate behind `url`.
        timeout: limit for one answer, seconds.
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
    """One run of a subcommand.

    Args:
        connection: how the extender is reached.
        output: one of `OUTPUTS`.
    """

    def __init__(self, connection: Connection, output: str = "table") -> None:
        self._connection = connection
        self._has_shown = False
        self.output = output

    @property
    def is_wide(self) -> bool:
        """Whether a table is to have all its columns."""
        return self.output == "wide"

    @property
    def is_table(self) -> bool:
        """Whether people read the output."""
        return self.output in {"table", "wide"}

    @functools.cached_property
    def client(self) -> Client:
        """The extender."""
        known = self._connection
        token = known.token or (read_token(known.token_file) if known.token_file else "")
        if known.url:
            return Client.at(
                known.url,
                token=token,
                ca_file=known.ca_file or None,
                timeout_seconds=known.timeout,
            )
        try:
            cluster = self.cluster
        except ClientError as error:
            hint = "or ask an extender directly, --url (IDLEGPU_URL)"
            raise ClientError(f"{error}; {hint}", error.failure) from error
        return Client(cluster.service(known.service, token=token))

    def hurried(self, seconds: float) -> "Session":
        """Return a session that waits no longer for an answer that it can do without."""
        known = self._connection
        return Session(replace(known, timeout=min(seconds, known.timeout)), self.output)

    @functools.cached_property
    def cluster(self) -> "Cluster":
        """The API server."""
        from extender.remote.cluster import Cluster  # takes half a second

        known = self._connection
        return Cluster.of(
            known.kubeconfig or None,
            context=known.context or None,
            timeout_seconds=known.timeout,
        )

    @functools.cached_property
    def console(self) -> "Console":
        """Where tables go."""
        return make_console()

    def show(self, answer: Answer, render: "Callable[[], RenderableType]") -> None:
        """Show an answer as was asked, set apart from one before it.

        Args:
            answer: the answer.
            render: makes what people read of it.
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
        """Write a document for programs."""
        sys.stdout.write(dump(document, self.output))


def make_console() -> "Console":
    """Return where people read: texts of others are shown as they are, never as markup."""
    from rich.console import Console  # not needed for JSON

    is_terminal = sys.stdout.isatty()
    return Console(
        markup=False,
        highlight=False,
        emoji=False,
        width=None if is_terminal else WIDE,
        soft_wrap=False,
    )


def show_table(console: "Console", table: "RenderableType") -> None:
    """Print something for people; where no terminal is, without the blanks that fill lines."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    sys.stdout.flush()  # whoever reads the pipe may be shown more later


def dump(document: object, output: str) -> str:
    """Return a document as JSON or YAML."""
    import msgspec  # not needed for tables

    plain = msgspec.to_builtins(document)
    if output == "yaml":
        import yaml

        return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    return escape_json(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()) + "\n"


def output_option(command: Callable[P, None]) -> Callable[P, None]:
    """Add `--output`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(OUTPUTS),
        default="table",
        show_default=True,
        help="How to show it.",
    )(command)


def connection_options(*, environment: bool) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Return what adds the options that say how the extender is reached.

    Args:
        environment: whether variables of the environment count: those of the group say so once,
            and those of a subcommand come before them.
    """

    def variable(name: str) -> str | None:
        return name if environment else None

    options = (
        click.option("--url", default="", envvar=variable("IDLEGPU_URL"), metavar="URL",
                     help="Ask the extender there (https://localhost:8889), not through the "
                     "API server. [IDLEGPU_URL]"),
        click.option("--service", default=SERVICE, envvar=variable("IDLEGPU_SERVICE"),
                     metavar="NS/NAME:PORT", show_default=True,
                     help="The extender's Service, for the API server's proxy. [IDLEGPU_SERVICE]"),
        click.option("--kubeconfig", default="", envvar=variable("KUBECONFIG"), metavar="FILE",
                     type=FILE, help="The way to the API server. [KUBECONFIG]"),
        click.option("--context", default="", metavar="NAME", help="Which context of it."),
        click.option("--token", default="", envvar=variable("IDLEGPU_TOKEN"), metavar="TOKEN",
                     help="A token that the extender takes. [IDLEGPU_TOKEN]"),
        click.option("--token-file", default="", envvar=variable("IDLEGPU_TOKEN_FILE"),
                     metavar="FILE", type=FILE, help="Where one stands. [IDLEGPU_TOKEN_FILE]"),
        click.option("--ca-file", default="", envvar=variable("IDLEGPU_CA_FILE"), metavar="FILE",
                     type=FILE, help="Who signs the certificate behind --url. [IDLEGPU_CA_FILE]"),
        click.option("--timeout", default=30.0, show_default=True, metavar="SECONDS",
                     type=Number(0.1, 3600), help="Limit for one answer."),
    )  # fmt: skip

    def add(command: Callable[P, Any]) -> Callable[P, Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Have a subcommand be given a `Session` first, made from the options that this adds."""

    @functools.wraps(command)
    def run(**values: Any) -> None:  # noqa: ANN401 - a command's own options
        own = {name: values.pop(name) for name in Connection.__dataclass_fields__}
        command(Session(Connection(**own), values.pop("output")), **values)

    return output_option(connection_options(environment=False)(run))
