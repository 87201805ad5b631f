"""Settings of TLS at the webhooks' port."""

import ipaddress
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from extender.settings.section import Section, ValueForm


class Tls(Section):
    """Settings of TLS at the webhooks' port, where clients must show a certificate."""

    cert_file: Path | None = Field(
        default=None,
        description="certificate of the webhooks' port, with its intermediate certificates; "
        "changes in the three files apply within seconds",
    )
    key_file: Path | None = Field(default=None, description="key of tls.cert_file")
    client_ca_file: Path | None = Field(
        default=None,
        description="CAs of the certificates of kube-scheduler and of other replicas; use CAs "
        "made for this purpose, never the cluster's CA",
    )
    clients: Annotated[tuple[str, ...], ValueForm("a list of at least one name")] = Field(
        default=("idlegpu-kube-scheduler",),
        min_length=1,
        description="names of clients that may call the webhooks: one must be the common name or "
        "an alternative name in the client's certificate",
    )
    peers: Annotated[tuple[str, ...], ValueForm("a list of at least one name")] = Field(
        default=("idlegpu-extender",),
        min_length=1,
        description="names of clients that may send messages as a replica, checked in the same way",
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        files = (self.cert_file, self.key_file, self.client_ca_file)
        if any(files) and not all(files):
            raise ValueError(
                "tls.cert_file, tls.key_file and tls.client_ca_file belong together: set all three"
            )
        return self

    @property
    def is_used(self) -> bool:
        """Whether the webhooks' port uses TLS."""
        return self.cert_file is not None


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
