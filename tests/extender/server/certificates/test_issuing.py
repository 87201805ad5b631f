import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from extender.server.certificates.__main__ import changed
from extender.server.certificates.issuing import (
    CertsError,
    Files,
    Wanted,
    expires_at,
    expiry_warning,
    trusted,
)

KEY_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
)
NOW = datetime(2030, 1, 1, tzinfo=UTC)
WANTED = Wanted(names=("idlegpu-extender.idlegpu.svc",), addresses=("10.96.0.88",))


def made(now: datetime = NOW) -> Files:
    return changed({}, WANTED, "", now)


def certificate(files: Files, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(files[name])


def verified_names(files: Files, side: str, at: datetime = NOW) -> list[str]:
    """Return the alternative names of a side's certificate, if the CA bundle verifies it."""
    authorities = x509.load_pem_x509_certificates(trusted(files))
    verifier = PolicyBuilder().store(Store(authorities)).time(at).build_client_verifier()
    found = verifier.verify(certificate(files, f"{side}.crt"), [])
    assert found.subjects is not None
    return [str(name.value) for name in found.subjects]


def test_both_sides_get_certificates_of_one_ca_for_their_names() -> None:
    files = made()

    assert verified_names(files, "extender") == ["idlegpu-extender.idlegpu.svc", "10.96.0.88"]
    assert verified_names(files, "kube-scheduler") == ["idlegpu-kube-scheduler"]


def test_only_the_extender_may_serve() -> None:
    files = made()

    usages = {
        side: certificate(files, f"{side}.crt")
        .extensions.get_extension_for_class(x509.ExtendedKeyUsage)
        .value
        for side in ("extender", "kube-scheduler")
    }

    assert ExtendedKeyUsageOID.SERVER_AUTH in usages["extender"]
    assert list(usages["kube-scheduler"]) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_only_the_ca_may_sign_certificates() -> None:
    files = made()

    for name, may_sign, usages in (
        ("ca.crt", True, {"key_cert_sign", "crl_sign"}),
        ("extender.crt", False, {"digital_signature"}),
    ):
        extensions = certificate(files, name).extensions
        critical = {type(one.value) for one in extensions if one.critical}
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        assert critical == {x509.BasicConstraints, x509.KeyUsage}
        assert (constraints.ca, constraints.path_length) == (may_sign, 0 if may_sign else None)
        assert {one for one in KEY_USAGES if getattr(usage, one)} == usages


def test_a_valid_certificate_stays_until_60_days_before_its_end() -> None:
    files, later = made(), NOW + timedelta(days=305)

    assert changed(files, WANTED, "", later) == files
    assert changed(files, WANTED, "", later + timedelta(seconds=1)) != files


@pytest.mark.parametrize("lost", [".crt", ".key"])
def test_a_certificate_that_lost_a_file_is_issued_again(lost: str) -> None:
    files = {name: text for name, text in made().items() if name != f"extender{lost}"}

    after = changed(files, WANTED, "", NOW)

    assert verified_names(after, "extender")
    assert {name: after[name] for name in files if not name.startswith("extender")} == {
        name: text for name, text in files.items() if not name.startswith("extender")
    }
    assert after.keys() == made().keys()


@pytest.mark.parametrize("side", ["extender", "kube-scheduler"])
def test_a_certificate_that_expires_soon_is_renewed(side: str) -> None:
    later = NOW + timedelta(days=310)

    before = made()
    after = changed(before, WANTED, "", later)

    assert expires_at(after[f"{side}.crt"]) == later + timedelta(days=365)
    assert after["ca.crt"] == before["ca.crt"]
    assert verified_names(after, side, later)


def test_other_names_renew_only_the_extenders_certificate() -> None:
    files = made()

    after = changed(files, Wanted(names=("other",)), "", NOW)

    assert verified_names(after, "extender") == ["other"]
    assert after["kube-scheduler.crt"] == files["kube-scheduler.crt"]


def test_new_ca_is_trusted_before_it_issues() -> None:
    first = made()
    both = changed(first, WANTED, "next", NOW)
    switched = changed(both, WANTED, "switch", NOW)
    dropped = changed(switched, WANTED, "drop", NOW)

    assert both["extender.crt"] == first["extender.crt"]
    assert switched["extender.crt"] != first["extender.crt"]
    # The first bundle does not contain the new CA; the second one contains both.
    with pytest.raises(VerificationError):
        verified_names({**first, "extender.crt": switched["extender.crt"]}, "extender")
    assert verified_names({**both, "extender.crt": switched["extender.crt"]}, "extender")
    assert verified_names({**switched, "extender.crt": first["extender.crt"]}, "extender")
    with pytest.raises(VerificationError):
        verified_names({**dropped, "extender.crt": first["extender.crt"]}, "extender")
    assert verified_names(dropped, "extender")


@pytest.mark.parametrize("left", [{}, {"next.crt": b"x"}, {"next.key": b"x"}])
def test_switch_without_a_next_ca_states_the_remedy(left: Files) -> None:
    with pytest.raises(CertsError, match="--next-ca first"):
        changed({**made(), **left}, WANTED, "switch", NOW)


SHORTLY_BEFORE, AFTER = NOW + timedelta(days=3620), NOW + timedelta(days=3700)
"""Times shortly before and after the end of the CA, which lasts 3650 days."""


def test_certificates_expire_with_their_ca_at_the_latest() -> None:
    first = made()

    later = changed(first, WANTED, "", SHORTLY_BEFORE)

    for side in ("extender", "kube-scheduler"):
        assert expires_at(later[f"{side}.crt"]) == expires_at(first["ca.crt"])
        assert verified_names(later, side, SHORTLY_BEFORE)
    assert changed(later, WANTED, "", SHORTLY_BEFORE + timedelta(days=7)) == later


@pytest.mark.parametrize("at", [SHORTLY_BEFORE, AFTER], ids=["shortly-before", "after"])
@pytest.mark.parametrize("is_renewed", [True, False], ids=["renewed", "not-renewed"])
def test_an_expiring_ca_is_replaced_step_by_step(at: datetime, *, is_renewed: bool) -> None:
    files = made()
    if is_renewed:
        files = changed(files, WANTED, "", SHORTLY_BEFORE)

    reported = []
    for step in ("next", "switch", "drop"):
        files = changed(files, WANTED, step, at)
        reported.append(expiry_warning(files, WANTED, at))

    assert "continue with --switch-ca" in reported[0]
    assert reported[1:] == ["", ""]
    assert expires_at(files["extender.crt"]) == at + timedelta(days=365)
    for side in ("extender", "kube-scheduler"):
        assert verified_names(files, side, at)
    assert trusted(files) == files["ca.crt"]


@pytest.mark.parametrize(
    ("days", "reported"),
    [
        pytest.param(3285, "", id="as-long-as-what-it-issues"),
        pytest.param(3286, "the CA expires on 2039-12-30", id="shorter"),
        pytest.param(3650, "the CA expired on 2039-12-30", id="over"),
    ],
)
def test_the_end_of_a_ca_is_reported_a_year_before(days: int, reported: str) -> None:
    warning = expiry_warning(made(), WANTED, NOW + timedelta(days=days))

    assert warning.startswith(reported)
    assert ("continue with --next-ca" in warning) is bool(reported)


@pytest.mark.parametrize("name", ["ca.crt", "extender.crt"])
def test_a_damaged_file_is_named(name: str) -> None:
    with pytest.raises(CertsError, match=f"{name} is not a certificate"):
        changed({**made(), name: b"nonsense"}, WANTED, "", NOW)


def test_a_ca_without_its_key_is_not_replaced() -> None:
    files = {name: text for name, text in made().items() if name != "ca.key"}

    with pytest.raises(CertsError, match=r"ca\.crt exists without ca\.key"):
        changed(files, WANTED, "", NOW)


def test_openssl_takes_key_and_certificate_together(tmp_path: Path) -> None:
    files = made()
    (tmp_path / "both.pem").write_bytes(files["extender.crt"] + files["extender.key"])

    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "both.pem")
