"""Connect to the API server of the user's kubeconfig, exec plugins included."""

import asyncio
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from kubernetes_asyncio import config
from kubernetes_asyncio.client import Configuration

from extender.cli.transports import ClientError, Failure, Login, Params, UrlTransport
from extender.kube.kubeconfig import KUBECONFIG_ERRORS, cause_of
from extender.runtime.decoding import MalformedError, decode_with

_TOKEN_HEADER: Final = "X-Idlegpu-Token"  # noqa: S105 - the header's name
"""Header for the extender's token: the API server's proxy does not forward Authorization."""

_HTTPS: Final = "https"
"""Value of a Service port's `appProtocol`, or else its name, if the port speaks TLS."""

_SERVICE: Final = re.compile(
    r"([a-z0-9-]{1,63})/(?:(https?):)?([a-z0-9-]{1,63})(?::([a-z0-9-]{1,15}))?"
)


_MISSING: Final = re.compile(r'(services|namespaces) "[^"]+" not found')
"""The API server's message for a Service that does not exist."""

_NO_CONTEXT: Final = re.compile(r"object with name ?(.*?) in .*contexts list")
"""The Kubernetes client's message for a context that the kubeconfig lacks."""

_CLOSED: Final = (
    "; if NetworkPolicies keep the API server off the extender, use --url over a port-forward "
    "(docs/command-line.md)"
)
"""Hint if the API server answers, and the extender behind its proxy does not."""


class Cluster:
    """Client of the API server, with the identity of a kubeconfig.

    Args:
        namespace: namespace of the kubeconfig's context.
    """

    def __init__(self, transport: UrlTransport, namespace: str = "default") -> None:
        self._transport = transport
        self.namespace = namespace

    @classmethod
    def from_kubeconfig(
        cls,
        kubeconfig: str | None = None,
        *,
        context: str | None = None,
        timeout_seconds: float = 30.0,
    ) -> "Cluster":
        """Create a client of the cluster that a kubeconfig names.

        Args:
            kubeconfig: the file, or several joined as in KUBECONFIG; None for kubectl's default.
            context: name of a context, None for the current one.
            timeout_seconds: limit for one answer.

        Raises:
            ClientError: the kubeconfig cannot be read, or names no cluster.
        """
        shown = kubeconfig or config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
        files = [Path(part).expanduser() for part in shown.split(":") if part]
        if not any(file.is_file() for file in files):
            raise ClientError(
                f"kubeconfig {shown}: no such file: set another one with --kubeconfig (KUBECONFIG)",
                Failure.BAD_REQUEST,
            )
        configuration = Configuration()
        try:
            loader = asyncio.run(
                config.load_kube_config(
                    config_file=shown,
                    context=context,
                    client_configuration=configuration,
                    persist_config=False,
                )
            )
            namespace = _namespace(loader)
        except KUBECONFIG_ERRORS as error:
            raise ClientError(_why_unusable(shown, cause_of(error)), Failure.BAD_REQUEST) from error
        token = (configuration.api_key.get("BearerToken") or "").strip()
        login = Login(
            headers={"Authorization": token} if token else {},
            ca_file=configuration.ssl_ca_cert,
            cert_file=configuration.cert_file,
            key_file=configuration.key_file,
            verifies=configuration.verify_ssl,
            server_name=configuration.tls_server_name,
            timeout_seconds=timeout_seconds,
        )
        return cls(
            UrlTransport(
                configuration.host or "",
                login,
                if_unreachable="check that `kubectl get nodes` works with this kubeconfig",
            ),
            namespace,
        )

    def service(self, service: str, *, token: str = "") -> "_ServiceTransport":
        """Return a transport to a Service through the API server's proxy.

        Args:
            service: `namespace/name:port`. The Service declares whether the port speaks TLS; if the
                Service may not be read, TLS is assumed, as in the shipped manifests.
                `namespace/https:name:port` and `namespace/http:name:port` state it.
            token: token for the Service, "" for none.

        Raises:
            ClientError: `service` is malformed.
        """
        match = _SERVICE.fullmatch(service)
        if match is None:
            raise ClientError(
                f"service {service!r} is not allowed: must be namespace/name:port, such as "
                "idlegpu/idlegpu-extender:status",
                Failure.BAD_REQUEST,
            )
        address = _Address(*match.groups(default=""))
        return _ServiceTransport(self._transport, address, service, token)

    def get(self, path: str, params: Params | None = None) -> Any:  # noqa: ANN401 - an object
        """Read an object from the API server.

        Raises:
            ClientError: the request failed or was refused.
        """
        return _read(self._transport.request("GET", path, params), path)

    def create(self, path: str, item: Mapping[str, object]) -> Any:  # noqa: ANN401 - an object
        """Create an object in a collection, and return it.

        Raises:
            ClientError: the request failed or was refused.
        """
        return _read(self._transport.request("POST", path, None, msgspec.json.encode(item)), path)

    def delete(self, path: str) -> None:
        """Delete an object; a missing object is not an error.

        Raises:
            ClientError: the request failed or was refused.
        """
        try:
            self._transport.request("DELETE", path)
        except ClientError as error:
            if error.failure is not Failure.NOT_FOUND:
                raise

    def text(self, path: str, params: Params | None = None) -> str:
        """Return a text, such as a container's log.

        Raises:
            ClientError: the request failed or was refused.
        """
        return self._transport.request("GET", path, params).decode(errors="replace")


class _Port(msgspec.Struct, rename="camel"):
    """Port of a Service."""

    name: str = ""
    port: int = 0
    app_protocol: str = ""


class _Spec(msgspec.Struct):
    ports: list[_Port] = []


class _Service(msgspec.Struct):
    spec: _Spec = msgspec.field(default_factory=_Spec)


_SERVICE_DECODER: Final = msgspec.json.Decoder(_Service)


class _Address(NamedTuple):
    """Address of a Service's port; "" for parts that are not given."""

    namespace: str
    scheme: str
    name: str
    port: str

    @property
    def service_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/services/{self.name}"

    def proxy_path(self, scheme: str) -> str:
        """Return the proxy's path to the port, with this scheme."""
        target = f"{self.name}:{self.port}" if self.port else self.name
        if scheme:
            target = f"{scheme}:{self.name}:{self.port}"  # the second colon in any case
        return f"/api/v1/namespaces/{self.namespace}/services/{target}/proxy"

    def speaks_tls(self, service: _Service) -> bool:
        """Return whether the Service declares TLS for this port."""
        ports = service.spec.ports
        meant = [each for each in ports if self.port in {each.name, str(each.port)}]
        if not self.port and len(ports) == 1:
            meant = ports
        return any((each.app_protocol or each.name).lower() == _HTTPS for each in meant)


class _ServiceTransport:
    """Transport to a Service through the API server's proxy.

    Args:
        address: address of the Service's port.
        service: the address as the user wrote it, for messages.
        token: token for the Service, "" for none.
    """

    def __init__(
        self, transport: UrlTransport, address: _Address, service: str, token: str
    ) -> None:
        self._server = transport
        self._transport = transport.with_headers({_TOKEN_HEADER: token}) if token else transport
        self._address = address
        self._service = service
        self._hint = ""

    def request(
        self, method: str, path: str, params: Params | None = None, body: bytes | None = None
    ) -> bytes:
        """Send a request and return the body of the answer.

        Raises:
            ClientError: the request failed or was refused.
        """
        try:
            return self._transport.request(method, f"{self._proxy}{path}", params, body)
        except ClientError as error:
            hint = self._hint if error.failure is Failure.UNREACHABLE else ""
            if _MISSING.search(str(error)):
                hint = "; install idlegpu, or name its Service with --service (IDLEGPU_SERVICE)"
            raise ClientError(f"service {self._service}: {error}{hint}", error.failure) from error

    @functools.cached_property
    def _proxy(self) -> str:
        """Path of the proxy, determined once.

        Raises:
            ClientError: the API server does not answer.
        """
        address = self._address
        if address.scheme:
            return address.proxy_path(address.scheme)
        try:
            answer = self._server.request("GET", address.service_path)
        except ClientError as error:
            if error.failure not in {Failure.REFUSED, Failure.NOT_FOUND}:
                raise
            # The proxy needs no right to read the Service, and has a better message if it is
            # missing.
            if error.failure is Failure.NOT_FOUND:
                return address.proxy_path("")
            if address.port:
                plain = f"{address.namespace}/http:{address.name}:{address.port}"
                self._hint = f"{_CLOSED} (if the port does not speak TLS: --service {plain})"
            return address.proxy_path(_HTTPS)
        self._hint = _CLOSED
        try:
            service = decode_with(_SERVICE_DECODER.decode, answer)
        except MalformedError:  # not an API server: the next request reports that
            return address.proxy_path("")
        return address.proxy_path(_HTTPS if address.speaks_tls(service) else "")


def _read(body: bytes, path: str) -> Any:  # noqa: ANN401 - an object
    try:
        return decode_with(msgspec.json.decode, body)
    except MalformedError as error:
        raise ClientError(
            f"the API server's answer for {path} cannot be read: {error}", Failure.FAULT
        ) from error


def _why_unusable(file: str, cause: str) -> str:
    """Return the reason why a kubeconfig cannot be used, and the remedy for a missing context."""
    missing = _NO_CONTEXT.search(cause)
    if missing is None:
        return f"cannot use kubeconfig {file}: {cause}"
    names = "`kubectl config get-contexts` lists the names"
    if not missing[1]:
        return f"kubeconfig {file} has no current context: choose one with --context ({names})"
    return f"kubeconfig {file} has no context {missing[1]!r}: {names}"


def _namespace(loader: Any) -> str:  # noqa: ANN401 - the library's
    current = loader.current_context or {}
    return str((current.get("context") or {}).get("namespace") or "default")
