"""Reads the way to the API server: a kubeconfig, or the service account of a pod."""

from pathlib import Path
from typing import Final

from extender.kube_library import KUBECONFIG_ERRORS, Configuration, cause_of, config

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubeConfigError(ValueError):
    """The way to the API server is not configured, or not readable."""


async def load_kubeconfig(path: Path) -> Configuration:
    """Read a kubeconfig file.

    Raises:
        KubeConfigError: it cannot be read, or is none.
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
    """Read what a pod's service account says of its cluster.

    Raises:
        KubeConfigError: this is no pod, or it has no service account.
    """
    configuration = Configuration()
    try:
        config.load_incluster_config(  # type: ignore[no-untyped-call]  # has no types
            configuration,
            token_filename=str(folder / "token"),
            cert_filename=str(folder / "ca.crt"),
        )
    except (config.ConfigException, OSError) as error:
        raise KubeConfigError(
            f"cannot find the API server: no kubeconfig is set, and this is no pod with a service "
            f"account: {error}: set kubeconfig (IDLEGPU_KUBECONFIG)"
        ) from error
    return configuration


def _require_file(path: Path) -> None:
    """Refuse a missing file: the library only logs it, and goes on with nothing.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError("no such file")


def _strip_token(configuration: Configuration) -> None:
    """Take the line end off a token that was read from a file: no header may hold it."""
    token = configuration.api_key.get("BearerToken")
    if token:
        configuration.api_key["BearerToken"] = token.strip()
