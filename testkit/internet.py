"""Environment of the few tests that reach a package registry."""

import os
from typing import Final

_VARIABLES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_KEPT: Final = "BEFORE_TESTS_"


def trust_no_authority() -> None:
    """Have this process and its children load no certificate authorities of the Internet.

    Loading all 140 takes each of a thousand processes 40 ms, and each API client as long again.
    The old values stay in the environment, because pytest-xdist's workers inherit the environment
    of its controller.
    """
    for name in _VARIABLES:
        os.environ.setdefault(_KEPT + name, os.environ.get(name, ""))
        os.environ[name] = os.devnull


def internet_environment() -> dict[str, str]:
    """Environment variables as they were before `trust_no_authority`."""
    environment = dict(os.environ)
    for name in _VARIABLES:
        before = environment.pop(_KEPT + name, environment.get(name, ""))
        environment.pop(name, None)
        if before:
            environment[name] = before
    return environment
