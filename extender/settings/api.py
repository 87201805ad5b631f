"""Settings of the served ports: TLS of the webhooks, the admission webhook, the API."""

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from extender.settings.section import AnyCase, Section, ValueForm
from extender.settings.service import OptionalAddress, split_address


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


_PROXIES_FORM: Final = "a list of IP addresses and networks, such as 10.0.0.4 or 10.0.0.0/28"

_HOST: Final = re.compile(r"[A-Za-z0-9_]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\]")
"""A host name, an IPv4 address, or an IPv6 address in brackets."""

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ApiAccess(StrEnum):
    """Clients that may read the API."""

    AUTO = "auto"
    """As `open` if the port is on loopback, otherwise as `token`."""
    TOKEN = "token"  # noqa: S105 - the setting's value
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


_NAME: Final = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
_NAMESPACE: Final = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$"


class Admission(Section):
    """Settings of the admission webhook, which assigns new GPU pods to a scheduler."""

    listen: OptionalAddress = Field(
        default="",
        description="host:port of the admission webhook, over TLS; in a pod 0.0.0.0:8890 or "
        "[::]:8890; empty: no webhook",
    )
    cert_file: Path | None = Field(
        default=None,
        description="certificate of admission.listen, with its intermediate certificates; empty: "
        "that of tls",
    )
    key_file: Path | None = Field(default=None, description="key of admission.cert_file")
    scheduler_name: str = Field(
        default="idlegpu-scheduler",
        pattern=_NAME,
        description="spec.schedulerName that the webhook gives to GPU pods with default-scheduler",
    )
    taint_key: str = Field(
        default="idlegpu.io/scheduler",
        max_length=317,
        description="key of the taint that keeps other pods off that scheduler's nodes, with the "
        "scheduler's name as value: GPU pods get a toleration for it; empty: no toleration",
    )
    proposals: bool = Field(
        default=False,
        description="annotate new GPU pods that state neither memory nor models: gpu-memory by the "
        "measured use of similar pods, prefer-models by the size of the model",
    )
    lease_name: str = Field(
        default="idlegpu-scheduler",
        pattern=_NAME,
        description="name of that scheduler's Lease; pods are assigned to the scheduler only "
        "while the Lease is renewed",
    )
    lease_namespace: str = Field(
        default="",
        pattern=_NAMESPACE,
        description="namespace of the Lease; empty: the pod's own, or idlegpu if a kubeconfig is "
        "set",
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("admission.cert_file and admission.key_file belong together: set both")
        if self.proposals and not self.listen:
            raise ValueError("admission.proposals needs the webhook: set admission.listen, too")
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on, or ("", 0) without a webhook."""
        return split_address(self.listen) if self.listen else ("", 0)

    def files(self, tls: Tls) -> tuple[Path, Path]:
        """Return the paths of certificate and key.

        Raises:
            ValueError: neither admission nor tls sets them; the API server requires TLS.
        """
        cert, key = (
            (self.cert_file, self.key_file) if self.cert_file else (tls.cert_file, tls.key_file)
        )
        if cert is None or key is None:
            raise ValueError(
                f"admission.listen ({self.listen}) needs a certificate, because the "
                "API server calls it over TLS only: set admission.cert_file and "
                "admission.key_file, or tls.*"
            )
        return cert, key
