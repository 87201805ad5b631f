from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry

from extender.api.status_routes import CertificateCollector, certificate_ends
from extender.settings.api import Tls
from extender.settings.config import Settings
from extender.settings.sources import Agents
from testkit.certificates import issue, settings_for

DAY = 86_400.0
METRIC = "idlegpu_certificate_end_timestamp_seconds"


def served(tls: Tls) -> Settings:
    return Settings(tls=tls, status_listen="127.0.0.1:8889")


def days_left(ends: dict[str, float]) -> dict[str, int]:
    now = datetime.now(UTC).timestamp()
    return {name: round((end - now) / DAY) for name, end in ends.items()}


def test_the_ends_of_certificates_are_exported(tmp_path: Path) -> None:
    issue(tmp_path)
    settings = served(settings_for(tmp_path))
    registry = CollectorRegistry()

    registry.register(CertificateCollector(lambda: certificate_ends(settings)))

    end = registry.get_sample_value(METRIC, {"certificate": "webhooks"})
    assert end == certificate_ends(settings)["webhooks"]
    assert set(certificate_ends(settings)) == {"webhooks", "clients"}


def test_a_file_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    files = issue(tmp_path, days_ago=100)
    settings = served(settings_for(tmp_path))
    before = days_left(certificate_ends(settings))["webhooks"]

    issue(tmp_path, days_ago=1, files={name: files[name] for name in ("ca.crt", "ca.key")})

    assert days_left(certificate_ends(settings))["webhooks"] == before + 99


def test_the_earliest_expiry_of_several_certificates_counts(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    issue(old, days_ago=100)
    issue(new)
    both = tmp_path / "ca.crt"
    both.write_bytes((new / "ca.crt").read_bytes() + (old / "ca.crt").read_bytes())
    own = settings_for(new)
    settings = served(own.model_copy(update={"client_ca_file": both}))

    first = certificate_ends(served(settings_for(old)))["clients"]
    assert certificate_ends(settings)["clients"] == first


def test_missing_and_unused_certificates_are_left_out(tmp_path: Path) -> None:
    assert certificate_ends(Settings()) == {}
    issue(tmp_path)
    own = settings_for(tmp_path)
    agents = Agents(listen="127.0.0.1:9401", cert_file=own.cert_file, key_file=own.key_file)
    assert set(certificate_ends(Settings(agents=agents))) == {"agents"}
    gone = Agents(listen="127.0.0.1:9401", cert_file=tmp_path / "gone", key_file=tmp_path / "gone")
    assert certificate_ends(Settings(agents=gone)) == {}
    (tmp_path / "bad").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----")
    bad = Agents(listen="127.0.0.1:9401", cert_file=tmp_path / "bad", key_file=tmp_path / "gone")
    assert certificate_ends(Settings(agents=bad)) == {}
