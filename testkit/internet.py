"""Environment variables for all tests, and for the few tests that use a package registry."""

import os
from typing import Final

_VARIABLES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_KEPT: Final = "BEFORE_TESTS_"


def trust_no_authority() -> None:
    """Stop this process and its children from loading certificate authorities of the Internet.

    Loading all 140 takes 40 ms in each of a thousand processes, and again in each API client. The
    old values stay in the environment, because pytest-xdist's workers inherit the environment of
    its controller.
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
