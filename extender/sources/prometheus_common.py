"""What both ends know: the extender, and its worker that talks to Prometheus.

Apart from either: the libraries that talk to Prometheus take 15 MiB, which the extender spares.
"""

from typing import Final

PATHS: Final = ("bearer_token_file", "password_file", "ca_file", "cert_file", "key_file")
"""Settings that are paths."""


class PrometheusError(Exception):
    """Prometheus gave no usable answer; the message says what failed, why, and what to do."""
