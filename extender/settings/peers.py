"""Settings of messages between replicas, and of the check for bypassed pods."""

import re
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from extender.settings.section import Section, ValueForm

MAX_PORT: Final = 65535
ADDRESS_FORM: Final = f"host:port with a port from 1 to {MAX_PORT}"

_LEAST_SECRET: Final = 16
"""Shortest allowed secret, in characters."""

_HOST: Final = re.compile(
    r"[0-9A-Za-z]([-.0-9A-Za-z]*[0-9A-Za-z])?\.?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*"
)
"""A host name, an IPv4 address, or an IPv6 address without brackets."""


def split_address(address: str) -> tuple[str, int]:
    """Split host:port into host and port; an IPv6 address loses its brackets.

    Raises:
        ValueError: the text is not host:port; the message says what it must be.

    Example:
        >>> split_address("idlegpu-peers:8888"), split_address("[::1]:8888")
        (('idlegpu-peers', 8888), ('::1', 8888))
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or "", parts.port or 0
        is_plain = parts.netloc == address and "@" not in address
    except ValueError:  # the port is not a number or too large, or the IPv6 address is malformed
        host, port, is_plain = "", 0, False
    if not port or not is_plain or not _HOST.fullmatch(host):
        raise ValueError(
            f"{address!r} is not allowed: must be {ADDRESS_FORM}, such as idlegpu-peers:8888"
        )
    return host, port


class PeersSettings(Section):
    """Settings of the messages in which replicas share requests and placements."""

    service: Annotated[str, ValueForm(ADDRESS_FORM)] = Field(
        default="",
        description="host:port of a headless Service of all replicas: they share the requests that "
        "they receive and their placements; empty: there is one replica",
    )
    addresses: Annotated[tuple[str, ...], ValueForm(f"a list of {ADDRESS_FORM}")] = Field(
        default=(), description="addresses of replicas, in addition to those of the service"
    )
    secret_file: Path | None = Field(
        default=None,
        description="file with a secret that all replicas share; replicas without TLS need it, "
        "and ignore messages without it. With TLS, certificates identify replicas",
    )

    @field_validator("service")
    @classmethod
    def _check_service(cls, service: str) -> str:
        if service:
            split_address(service)
        return service

    @field_validator("addresses")
    @classmethod
    def _check_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            split_address(address)
        return addresses

    def secret(self) -> str:
        """Read the shared secret, or return "" if no file is set.

        Raises:
            ValueError: the file cannot be read, or the secret is too short.
        """
        if self.secret_file is None:
            return ""
        try:
            secret = self.secret_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"peers.secret_file {self.secret_file}: {error}") from error
        if len(secret) < _LEAST_SECRET:
            raise ValueError(
                f"peers.secret_file {self.secret_file} holds {len(secret)} characters: must hold "
                f"at least {_LEAST_SECRET}, such as `openssl rand -hex 32` prints"
            )
        return secret

    @property
    def is_used(self) -> bool:
        """Whether other replicas are configured."""
        return bool(self.service or self.addresses)


class BypassSettings(Section):
    """Settings of the check for pods that were bound without a request to any replica."""

    enabled: bool = Field(
        default=True,
        description="count GPU pods that were bound although kube-scheduler called no replica "
        "for them",
    )
    schedulers: tuple[str, ...] = Field(
        default=(),
        description="values of spec.schedulerName whose pods the extender should be called for; "
        "empty: all",
    )
