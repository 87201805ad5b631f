"""Settings of the API: access, TLS and limits."""

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from extender.settings.section import AnyCase, Section, ValueForm
from extender.settings.tls import Tls, is_loopback

_PROXIES_FORM: Final = "a list of IP addresses and networks, such as 10.0.0.4 or 10.0.0.0/28"

_HOST: Final = re.compile(r"[A-Za-z0-9_]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\]")
"""A host name, an IPv4 address, or an IPv6 address in brackets."""

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ApiAccess(StrEnum):
    """Clients that may read the API."""

    AUTO = "auto"
    """As `open` if the port is on loopback, otherwise as `token`."""
    TOKEN = "token"  # noqa: S105 - the word
    """Clients with a token that the API server accepts."""
    OPEN = "open"
    """Every client that reaches the port."""


class ApiSettings(Section):
    """Settings of the API and the page: access, TLS and limits."""

    cert_file: Path | None = Field(
        default=None,
        description="certificate of status_listen, with its intermediate certificates; empty: "
        "that of tls. Changes in the files apply within seconds",
    )
    key_file: Path | None = Field(default=None, description="key of api.cert_file")
    allow_plain: bool = Field(
        default=False,
        description="serve status_listen without TLS to other machines too if api.cert_file is "
        "not set; tokens then cross the network unencrypted",
    )
    access: Annotated[ApiAccess, AnyCase] = Field(
        default=ApiAccess.AUTO,
        description="auto: open if the port is on loopback, otherwise token. token: a client "
        "needs a token of the cluster, and sees the pods of the namespaces in which it may list "
        "pods. open: every client that reaches the port sees everything. Health and metrics are "
        "always open",
    )
    audience: str = Field(
        default="idlegpu-api",
        description="audience that a token must have (kubectl create token NAME --audience ...), "
        "so the token is valid for nothing else; empty: a token for the API server "
        "itself",
    )
    proxies: Annotated[tuple[str, ...], ValueForm(_PROXIES_FORM)] = Field(
        default=(),
        description="addresses of the API server; a client from these addresses sees everything "
        "without a token. The API server's proxy does not forward a user's token, so the right "
        "to use the proxy decides",
    )
    hosts: Annotated[tuple[str, ...], ValueForm("a list of host names, without a port")] = Field(
        default=(),
        description="further host names that requests may use if the port is on loopback and "
        "needs no token. Other names are refused, because another site could point its own name "
        "at this port and read the API",
    )

    @field_validator("proxies")
    @classmethod
    def _check_proxies(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(
                    f"{proxy!r} is not allowed: {error}: must be {_PROXIES_FORM}"
                ) from error
        return proxies

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"{host!r} is not allowed: must be a name such as gpus.example.com, without "
                    "scheme and port"
                )
        return hosts

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("api.cert_file and api.key_file belong together: set both")
        if self.cert_file and self.allow_plain:
            raise ValueError(
                "api.allow_plain (true) is not allowed with api.cert_file: with a certificate the "
                "port speaks TLS"
            )
        return self

    def files(self, tls: Tls) -> tuple[Path, Path] | None:
        """Return the paths of status_listen's certificate and key, or None for plain HTTP."""
        own = (self.cert_file, self.key_file)
        cert, key = own if self.cert_file or self.allow_plain else (tls.cert_file, tls.key_file)
        return None if cert is None or key is None else (cert, key)

    @property
    def networks(self) -> tuple[_Network, ...]:
        """IP networks of the API server's proxies, parsed from `proxies`."""
        return tuple(map(ipaddress.ip_network, self.proxies))

    def is_open(self, host: str) -> bool:
        """Return whether clients need no token if the API is served on `host`."""
        if self.access is ApiAccess.AUTO:
            return is_loopback(host)
        return self.access is ApiAccess.OPEN
