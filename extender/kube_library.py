"""What is used of kubernetes-asyncio, without the classes that are not.

Its package imports a class for each of the API's nine hundred types: 34 MiB and the better part of
a second, where all that we take of it is configuration, login and a session. So these modules are
imported by themselves, under empty packages that are forgotten again at once: whoever imports
kubernetes-asyncio later gets all of it.
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
    """Import modules of kubernetes-asyncio without what their packages import."""
    if LIBRARY in sys.modules:  # somebody has all of it already
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
    """Put an empty package in the place of one that imports too much."""
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
"""What reading a kubeconfig raises: whatever YAML there is, is read as if it were one."""


def cause_of(error: Exception) -> str:
    """Return in one line what an error says, or else of which kind it is."""
    return " ".join(str(error).split()) or type(error).__name__
