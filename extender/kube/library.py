"""Import kubernetes-asyncio without its model classes.

The package imports one class for each of 900 API types, which takes 34 MiB and most of a second.
The extender needs only configuration, login and session. So this module imports those under empty
packages, and removes the packages from `sys.modules` again: a later import gets the full library.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Final

import yaml

__all__ = [
    "KUBECONFIG_ERRORS",
    "ApiClient",
    "ConfigException",
    "Configuration",
    "cause_of",
    "config",
]

LIBRARY: Final = "kubernetes_asyncio"
CLIENT: Final = f"{LIBRARY}.client"


@contextmanager
def _without_types() -> Iterator[None]:
    """Import modules of kubernetes-asyncio without the other imports of their packages."""
    if LIBRARY in sys.modules:  # the full library is loaded already
        yield
        return
    found = importlib.util.find_spec(LIBRARY)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {LIBRARY!r}", name=LIBRARY)
    folder = found.submodule_search_locations[0]
    library, client = _package(LIBRARY, folder), _package(CLIENT, f"{folder}/client")
    models = _package(f"{CLIENT}.models", f"{folder}/client/models")
    library.client, client.models = client, models  # type: ignore[attr-defined] # as the library does
    try:
        from kubernetes_asyncio.client.configuration import Configuration  # noqa: PLC0415 - of that package

        client.Configuration = Configuration  # type: ignore[attr-defined] # likewise
        from kubernetes_asyncio.client.api_client import ApiClient  # noqa: PLC0415 - likewise

        client.ApiClient = ApiClient  # type: ignore[attr-defined] # likewise
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == LIBRARY]:
            del sys.modules[name]


def _package(name: str, folder: str) -> ModuleType:
    """Register an empty package in place of the real one."""
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [folder]
    return package


if TYPE_CHECKING:
    from kubernetes_asyncio import config
    from kubernetes_asyncio.client import ApiClient, Configuration
    from kubernetes_asyncio.config import ConfigException
else:
    with _without_types():
        from kubernetes_asyncio import config
        from kubernetes_asyncio.client import ApiClient, Configuration
        from kubernetes_asyncio.config import ConfigException

KUBECONFIG_ERRORS: Final = (
    ConfigException,
    OSError,
    yaml.YAMLError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""Exceptions from the kubeconfig loader, which does not check the structure of its YAML."""


def cause_of(error: Exception) -> str:
    """Return an error's message on one line, or its type name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
