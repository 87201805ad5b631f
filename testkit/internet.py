"""Environment of the few tests that reach a package registry."""

import os
from typing import Final

ENVIRONMENT: Final = dict(os.environ)
"""Environment variables before `trust_no_authority`."""


def trust_no_authority() -> None:
    """Have this process and its children load no certificate authorities of the Internet.

    Loading all 140 takes each of a thousand processes 40 ms, and each API client as long again.
    """
    os.environ["SSL_CERT_FILE"] = os.environ["SSL_CERT_DIR"] = os.devnull
