"""The API server, as the user's kubeconfig names it; kubernetes-asyncio reads that, plugins too."""

import asyncio
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from extender.cli.remote.errors import ClientError, Failure
from extender.cli.remote.transports import Login, Params, UrlTransport
from extender.kube.library import KUBECONFIG_ERRORS, Configuration, cause_of, config
from extender.runtime.decoding import MalformedError, decode_with

TOKEN_HEADER: Final = "X-Idlegpu-Token"  # noqa: S105 - the header's name
"""A token for the extender behind the API server's proxy, which keeps Authorization to itself."""

HTTPS: Final = "https"
"""How a Service says that one of its ports speaks TLS: `appProtocol`, else the port's name."""

_SERVICE: Final = re.compile(
    r"([a-z0-9-]{1,63})/(?:(https?):)?([a-z0-9-]{1,63})(?::([a-z0-9-]{1,15}))?"
)


class Cluster:
    """One API server and one identity there.

    Args:
        way: the way to it.
        namespace: that of the kubeconfig's context.
    """

    def __init__(self, way: UrlTransport, namespace: str = "default") -> None:
        self._way = way
        self.namespace = namespace

    @classmethod
    def of(
        cls,
        kubeconfig: str | None = None,
        *,
        context: str | None = None,
        timeout_seconds: float = 30.0,
    ) -> "Cluster":
        """Return the cluster that a kubeconfig names.

        Args:
            kubeconfig: the file, or several joined as in KUBECONFIG; None for what kubectl takes.
            context: which of its contexts, None for the current one.
            timeout_seconds: limit for one answer.

        Raises:
            ClientError: it cannot be read, or names no cluster.
        """
        shown = kubeconfig or config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
        files = [Path(part).expanduser() for part in shown.split(":") if part]
        if not any(file.is_file() for file in files):
            raise ClientError(
                f"kubeconfig {shown}: there is no such file: name another, --kubeconfig "
                "(KUBECONFIG)",
                Failure.BAD_QUESTION,
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
            raise ClientError(
                f"cannot use kubeconfig {shown}: {cause_of(error)}", Failure.BAD_QUESTION
            ) from error
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
        return cls(UrlTransport(configuration.host or "", login), namespace)

    def service(self, service: str, *, token: str = "") -> "ServiceTransport":
        """Return the way to a Service through the API server's proxy.

        Args:
            service: `namespace/name:port`. Whether the port speaks TLS says the Service itself;
                where it may not be read, it is taken to, as shipped. `namespace/https:name:port`
                and `namespace/http:name:port` say it in its place.
            token: a token for whoever answers there, "" for none.

        Raises:
            ClientError: that names no Service.
        """
        match = _SERVICE.fullmatch(service)
        if match is None:
            raise ClientError(
                f"service {service!r} is not allowed: must be namespace/name:port, such as "
                "idlegpu/idlegpu-extender:status",
                Failure.BAD_QUESTION,
            )
        address = _Address(*match.groups(default=""))
        return ServiceTransport(self._way, address, service, token)

    def get(self, path: str, params: Params | None = None) -> Any:  # noqa: ANN401 - an object
        """Return an object.

        Raises:
            ClientError: the API server does not give it.
        """
        return _read(self._way.ask("GET", path, params), path)

    def create(self, path: str, item: Mapping[str, object]) -> Any:  # noqa: ANN401 - an object
        """Create an object in a collection, and return it.

        Raises:
            ClientError: the API server does not take it.
        """
        return _read(self._way.ask("POST", path, None, msgspec.json.encode(item)), path)

    def delete(self, path: str) -> None:
        """Delete an object; one that is gone is no failure.

        Raises:
            ClientError: the API server refuses.
        """
        try:
            self._way.ask("DELETE", path)
        except ClientError as error:
            if error.failure is not Failure.NOT_FOUND:
                raise

    def text(self, path: str, params: Params | None = None) -> str:
        """Return a text, such as a container's log.

        Raises:
            ClientError: the API server does not give it.
        """
        return self._way.ask("GET", path, params).decode(errors="replace")


class _Port(msgspec.Struct, rename="camel"):
    """What a Service says of one of its ports."""

    name: str = ""
    port: int = 0
    app_protocol: str = ""


class _Spec(msgspec.Struct):
    ports: list[_Port] = []


class _Service(msgspec.Struct):
    spec: _Spec = msgspec.field(default_factory=_Spec)


_SERVICE_DECODER: Final = msgspec.json.Decoder(_Service)


class _Address(NamedTuple):
    """A Service's port; "" is not said."""

    namespace: str
    scheme: str
    name: str
    port: str

    @property
    def service_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/services/{self.name}"

    def proxy_path(self, scheme: str) -> str:
        """Return the path of the proxy to it, by a scheme that says how the port speaks."""
        target = f"{self.name}:{self.port}" if self.port else self.name
        if scheme:
            target = f"{scheme}:{self.name}:{self.port}"  # the second colon in any case
        return f"/api/v1/namespaces/{self.namespace}/services/{target}/proxy"

    def speaks_tls(self, service: _Service) -> bool:
        """Tell whether the Service says that this port speaks TLS."""
        ports = service.spec.ports
        meant = [each for each in ports if self.port in {each.name, str(each.port)}]
        if not self.port and len(ports) == 1:
            meant = ports
        return any((each.app_protocol or each.name).lower() == HTTPS for each in meant)


class ServiceTransport:
    """The way to a Service through the API server's proxy.

    Args:
        way: the way to the API server.
        address: the Service's port.
        service: how people call it.
        token: a token for whoever answers there, "" for none.
    """

    def __init__(self, way: UrlTransport, address: _Address, service: str, token: str) -> None:
        self._server = way
        self._way = way.adding({TOKEN_HEADER: token}) if token else way
        self._address = address
        self._service = service
        self._hint = ""

    def ask(
        self, method: str, path: str, params: Params | None = None, body: bytes | None = None
    ) -> bytes:
        """Return the body of an answer.

        Raises:
            ClientError: there is none, or it says no.
        """
        try:
            return self._way.ask(method, f"{self._proxy}{path}", params, body)
        except ClientError as error:
            hint = self._hint if error.failure is Failure.UNREACHABLE else ""
            raise ClientError(f"service {self._service}: {error}{hint}", error.failure) from error

    @functools.cached_property
    def _proxy(self) -> str:
        """The path of the proxy, found out once.

        Raises:
            ClientError: the API server does not answer.
        """
        address = self._address
        if address.scheme:
            return address.proxy_path(address.scheme)
        try:
            answer = self._server.ask("GET", address.service_path)
        except ClientError as error:
            if error.failure not in {Failure.REFUSED, Failure.NOT_FOUND}:
                raise
            # The proxy needs no right to read it, and tells better what is not there.
            if error.failure is Failure.NOT_FOUND:
                return address.proxy_path("")
            if address.port:
                plain = f"{address.namespace}/http:{address.name}:{address.port}"
                self._hint = f" (where that port speaks no TLS: --service {plain})"
            return address.proxy_path(HTTPS)
        try:
            service = decode_with(_SERVICE_DECODER.decode, answer)
        except MalformedError:  # no API server answers: what is asked next says so
            return address.proxy_path("")
        return address.proxy_path(HTTPS if address.speaks_tls(service) else "")


def _read(body: bytes, path: str) -> Any:  # noqa: ANN401 - an object
    try:
        return decode_with(msgspec.json.decode, body)
    except MalformedError as error:
        raise ClientError(
            f"the API server's answer for {path} cannot be read: {error}", Failure.FAULT
        ) from error


def _namespace(loader: Any) -> str:  # noqa: ANN401 - the library's
    current = loader.current_context or {}
    return str((current.get("context") or {}).get("namespace") or "default")
