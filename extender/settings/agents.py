"""Settings of the port to which node agents report."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from extender.settings.peers import ADDRESS_FORM, split_address
from extender.settings.section import Section, ValueForm
from extender.settings.tls import is_loopback


class Agents(Section):
    """Settings of the port to which node agents report."""

    listen: Annotated[str, ValueForm(ADDRESS_FORM)] = Field(
        default="",
        description="host:port to which node agents report; in a pod 0.0.0.0:9401 or [::]:9401; "
        "empty: no reports",
    )
    cert_file: Path | None = Field(
        default=None,
        description="certificate of the agents' port, with its intermediate certificates, from a "
        "CA that agents trust; may be that of the webhooks. Changes in the files apply within "
        "seconds",
    )
    key_file: Path | None = Field(default=None, description="key of agents.cert_file")
    allow_plain: bool = Field(
        default=False,
        description="accept reports without TLS from other machines too; tokens then cross the "
        "network unencrypted",
    )
    audience: Annotated[str, Field(min_length=1)] = Field(
        default="idlegpu-extender", description="audience that an agent's token must have"
    )
    service_accounts: Annotated[tuple[str, ...], ValueForm("a list of namespace/name")] = Field(
        default=("idlegpu-agent/idlegpu-agent",),
        min_length=1,
        description="service accounts (namespace/name) whose tokens are accepted",
    )
    hold_seconds: float = Field(
        default=25.0,
        ge=1,
        le=600,
        description="an agent's report is preferred to a reading of another source that is newer "
        "by less than this; agents report at least every reports.heartbeat_seconds, 10 s by "
        "default",
    )
    silence_seconds: float = Field(
        default=35.0,
        ge=2,
        le=600,
        description="a connection without a message for this long is closed; must be longer than "
        "the agents' reports.heartbeat_seconds",
    )
    max_connections: int = Field(
        default=10_000,
        ge=1,
        le=100_000,
        description="most connections at a time to agents.listen, one for each node; if the port "
        "is full, as for max_connections",
    )

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str) -> str:
        if listen:
            split_address(listen)
        return listen

    @field_validator("service_accounts")
    @classmethod
    def _check_accounts(cls, accounts: tuple[str, ...]) -> tuple[str, ...]:
        for account in accounts:
            namespace, slash, name = account.partition("/")
            if not (namespace and slash and name) or "/" in name or ":" in account:
                raise ValueError(f"{account!r} is not allowed: must be namespace/name")
        return accounts

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("agents.cert_file and agents.key_file belong together: set both")
        is_safe = self.is_tls or self.allow_plain or not self.listen
        if not is_safe and not is_loopback(self.address[0]):
            raise ValueError(
                f"agents.listen ({self.listen}) is reached from other machines and there is no "
                "TLS: set agents.cert_file and agents.key_file, or agents.allow_plain where the "
                "network protects tokens and reports"
            )
        return self

    @property
    def is_tls(self) -> bool:
        """Whether agents report over TLS."""
        return self.cert_file is not None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on, or ("", 0) if no port is set."""
        return split_address(self.listen) if self.listen else ("", 0)

    @property
    def usernames(self) -> frozenset[str]:
        """User names of the service accounts, as the API server reports them."""
        return frozenset(
            f"system:serviceaccount:{account.replace('/', ':')}"
            for account in self.service_accounts
        )
