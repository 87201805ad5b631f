"""Certificates for TLS tests: valid ones from `extender.server.certificates`, and invalid ones."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from extender.server.certificates.__main__ import changed
from extender.server.certificates.issuing import Files, Wanted
from extender.server.certificates.storing import write_folder
from extender.settings.api import Tls

WANTED = Wanted(names=("localhost", "idlegpu-extender.idlegpu.svc"), addresses=("127.0.0.1",))


def issue(folder: Path, *, days_ago: float = 0.0, files: Files | None = None) -> Files:
    """Write a CA's certificates of extender and kube-scheduler, as if issued some days ago."""
    made = changed(files or {}, WANTED, "", datetime.now(UTC) - timedelta(days=days_ago))
    write_folder(folder, made)
    return made


def reissue(folder: Path, files: Files) -> Files:
    """Replace the certificates of extender and kube-scheduler by others of the same CA."""
    authority = {name: text for name, text in files.items() if name.startswith("ca.")}
    return issue(folder, files=authority)


def settings_for(folder: Path) -> Tls:
    """Return the TLS settings of an extender whose certificates are in a folder."""
    own = folder / "extender"
    return Tls(cert_file=own / "tls.crt", key_file=own / "tls.key", client_ca_file=own / "ca.crt")


def client_context(
    folder: Path, *, shows: Path | None, side: str = "kube-scheduler"
) -> ssl.SSLContext:
    """Return a client's TLS context that trusts one folder's CA and presents another's certificate.

    Args:
        folder: folder of the trusted CA.
        shows: folder of the client certificate, None for none.
        side: name of the client certificate in that folder.
    """
    context = ssl.create_default_context(cafile=folder / side / "ca.crt")
    if shows is not None:
        context.load_cert_chain(shows / side / "tls.crt", shows / side / "tls.key")
    return context
