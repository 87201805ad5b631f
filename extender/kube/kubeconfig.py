"""Load the configuration of the API client: a kubeconfig, or the service account of a pod."""

from pathlib import Path
from typing import Final

import yaml
from kubernetes_asyncio import config
from kubernetes_asyncio.client import Configuration

KUBECONFIG_ERRORS: Final = (
    config.ConfigException,
    OSError,
    yaml.YAMLError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions from the kubeconfig loader, which does not check the structure of its YAML."""

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_DEFAULT_NAMESPACE: Final = "idlegpu"


class KubeConfigError(ValueError):
    """The kubeconfig or the service account is missing or cannot be read."""


async def load_kubeconfig(path: Path) -> Configuration:
    """Read a kubeconfig file.

    Raises:
        KubeConfigError: the file cannot be read, or is not a kubeconfig.
    """
    configuration = Configuration()
    try:
        _require_file(path)
        await config.load_kube_config(
            config_file=str(path), client_configuration=configuration, persist_config=False
        )
    except KUBECONFIG_ERRORS as error:
        raise KubeConfigError(f"cannot read kubeconfig {path}: {cause_of(error)}") from error
    _strip_token(configuration)
    return configuration


def load_service_account(folder: Path) -> Configuration:
    """Read address, CA and token of the API server from a pod's service account.

    Raises:
        KubeConfigError: the process runs outside a pod, or the pod has no service account.
    """
    configuration = Configuration()
    try:
        config.load_incluster_config(  # type: ignore[no-untyped-call]  # has no types
            configuration,
            token_filename=str(folder / "token"),
            cert_filename=str(folder / "ca.crt"),
        )
    except (config.ConfigException, OSError) as error:
        cause = cause_of(error).rstrip(".")
        raise KubeConfigError(
            "cannot find the API server: no kubeconfig is set, and this process is not in a pod "
            f"with a service account: {cause}: set kubeconfig (IDLEGPU_KUBECONFIG)"
        ) from error
    return configuration


def own_namespace(kubeconfig: Path | None = None, folder: Path = SERVICE_ACCOUNT) -> str:
    """Return the namespace of this pod, or the manifests' namespace outside a pod."""
    if kubeconfig is not None:
        return _DEFAULT_NAMESPACE
    try:
        return (folder / "namespace").read_text(encoding="utf-8").strip() or _DEFAULT_NAMESPACE
    except OSError:
        return _DEFAULT_NAMESPACE


def cause_of(error: Exception) -> str:
    """Return an error's message on one line, or its type name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def _require_file(path: Path) -> None:
    """Refuse a missing file: the library would only log it, and use an empty configuration."""
    if not path.is_file():
        raise FileNotFoundError("no such file")


def _strip_token(configuration: Configuration) -> None:
    """Strip line ends from a token that came from a file, because HTTP headers reject them."""
    token = configuration.api_key.get("BearerToken")
    if token:
        configuration.api_key["BearerToken"] = token.strip()
