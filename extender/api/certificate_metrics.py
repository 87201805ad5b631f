"""Prometheus metric of the expiry times of the extender's certificates, read at each scrape."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from extender.settings.config import Settings


class CertificateCollector(Collector):
    """Prometheus collector for certificate expiry times.

    Args:
        ends: returns the expiry time by certificate purpose, seconds since the epoch.
    """

    def __init__(self, ends: Callable[[], Mapping[str, float]]) -> None:
        self._ends = ends

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the gauge of expiry times."""
        gauge = GaugeMetricFamily(
            "idlegpu_certificate_end_timestamp_seconds",
            "Earliest expiry time of the certificates in a file, by the file's purpose.",
            labels=["certificate"],
        )
        for name, end in self._ends().items():
            gauge.add_metric([name], end)
        yield gauge


def certificate_ends(settings: Settings) -> dict[str, float]:
    """Read the expiry times from the certificate files of the settings.

    A file that cannot be read is left out: the port that uses it logs the error.

    Returns:
        Earliest expiry time in each file, seconds since the epoch, by `webhooks`, `clients` (CAs of
        client certificates), `agents`, `admission` and `status`.
    """
    files = {
        "webhooks": settings.tls.cert_file,
        "clients": settings.tls.client_ca_file,
        "agents": settings.agents.cert_file,
        "admission": settings.admission.cert_file,
        "status": settings.api.cert_file,
    }
    ends = {name: _first_end(file) for name, file in files.items() if file is not None}
    return {name: end for name, end in ends.items() if end is not None}


def _first_end(file: Path) -> float | None:
    from cryptography import x509  # noqa: PLC0415 - 8 MiB that only those who use TLS pay

    try:
        found = x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError):
        return None
    return min((one.not_valid_after_utc.timestamp() for one in found), default=None)
