"""Where certificates are kept: a folder, or Secrets of Kubernetes."""

import base64
import binascii
import os
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final

from extender.certs.issuing import EXTENDER, SCHEDULER, CertsError, Files, trusted
from extender.core.untyped import mapping_of, text_of
from extender.kube import KubeClient, KubeError

SIDES: Final = (EXTENDER, SCHEDULER)
AUTHORITY: Final = ("ca.crt", "ca.key", "next.crt", "next.key", "previous.crt")

CA_SECRET: Final = "idlegpu-ca"  # noqa: S105 - its name
CA_CONFIG_MAP: Final = "idlegpu-ca"
"""Holds what is trusted, as `ca.crt`, for those that are told nothing more."""

SECRETS: Final = {EXTENDER: "idlegpu-extender-tls", SCHEDULER: "idlegpu-kube-scheduler-tls"}

_LABELS: Final = {"app.kubernetes.io/part-of": "idlegpu"}

TIMEOUT_SECONDS: Final = 10.0
LIMIT_BYTES: Final = 1 << 20


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return what a folder holds; nothing where there is none."""
    paths = {name: folder / name for name in AUTHORITY}
    for side in SIDES:
        paths |= {f"{side}{end}": folder / side / f"tls{end}" for end in (".crt", ".key")}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def write_folder(folder: Path, files: Files) -> None:
    """Write all files, each whole or not at all, for nobody else to read.

    `FOLDER/extender` and `FOLDER/kube-scheduler` hold what that side needs: `tls.crt`, `tls.key`
    and `ca.crt`. The CA itself stays in FOLDER: keep it away from both.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in AUTHORITY:
        if name in files:
            _write(folder / name, files[name])
        else:
            (folder / name).unlink(missing_ok=True)
    for side in SIDES:
        (folder / side).mkdir(mode=0o700, exist_ok=True)
        for name, content in side_of(files, side).items():
            _write(folder / side / name, content)


def side_of(files: Files, side: str) -> dict[str, bytes]:
    """Return what one side needs, by the names that a Secret of type kubernetes.io/tls has."""
    return {
        "tls.crt": files[f"{side}.crt"],
        "tls.key": files[f"{side}.key"],
        "ca.crt": trusted(files),
    }


class Secrets:
    """The Secrets that hold certificates, in one namespace.

    Args:
        client: the API server.
        namespace: theirs.
    """

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._present: set[str] = set()

    async def read(self) -> dict[str, bytes]:
        """Return what they hold; nothing where there are none.

        Raises:
            KubeError: the API server could not be asked, or refused.
            CertsError: what they hold is damaged.
        """
        files = {
            name: content
            for name, content in (await self._read(CA_SECRET)).items()
            if name in AUTHORITY
        }
        for side, secret in SECRETS.items():
            held = await self._read(secret)
            files |= {
                f"{side}{end}": held[f"tls{end}"] for end in (".crt", ".key") if f"tls{end}" in held
            }
        return files

    async def write(self, files: Files) -> None:
        """Make them hold what they should; the CA first, for without it nothing can be renewed.

        Raises:
            KubeError: the API server could not be asked, or refused.
        """
        authority: dict[str, bytes | None] = {name: files.get(name) for name in AUTHORITY}
        await self._write(CA_SECRET, "Opaque", authority)
        for side, secret in SECRETS.items():
            await self._write(secret, "kubernetes.io/tls", side_of(files, side))

    async def _read(self, name: str) -> dict[str, bytes]:
        try:
            secret = await self._client.get(
                f"{self._path}/{name}",
                {},
                action="get secrets",
                timeout_seconds=TIMEOUT_SECONDS,
                limit_bytes=LIMIT_BYTES,
            )
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return {}
            raise
        self._present.add(name)
        data = mapping_of(secret.get("data"))
        try:
            return {key: base64.b64decode(text_of(value)) for key, value in data.items()}
        except binascii.Error as error:
            raise CertsError(f"cannot read Secret {name}: {error}") from error

    async def _write(self, name: str, kind: str, data: Mapping[str, bytes | None]) -> None:
        """Create a Secret or change it; what is None is removed."""
        encoded = {
            key: None if content is None else base64.b64encode(content).decode()
            for key, content in data.items()
        }
        if name in self._present:
            await self._send("PATCH", f"{self._path}/{name}", {"data": encoded}, "patch secrets")
            return
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": _LABELS},
            "type": kind,
            "data": {key: text for key, text in encoded.items() if text is not None},
        }
        await self._send("POST", self._path, body, "create secrets")

    async def _send(self, method: str, path: str, body: object, action: str) -> None:
        await self._client.send(method, path, body, action=action, timeout_seconds=TIMEOUT_SECONDS)


async def publish(client: KubeClient, namespace: str, files: Files) -> str:
    """Have a ConfigMap of another namespace hold the CAs that both sides trust, and nothing else.

    Args:
        client: the API server.
        namespace: where those are who ask without a certificate: node agents.
        files: all files.

    Returns:
        What was done, in words; "" for nothing.

    Raises:
        KubeError: the API server could not be asked, or refused.
    """
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    data = {"ca.crt": trusted(files).decode("ascii")}
    body: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CA_CONFIG_MAP, "labels": _LABELS},
        "data": data,
    }
    try:
        held = await _config_map(client, f"{path}/{CA_CONFIG_MAP}")
        if held == data:
            return ""
        method, path = ("POST", path) if held is None else ("PATCH", f"{path}/{CA_CONFIG_MAP}")
        action = f"{'create' if held is None else 'patch'} configmaps"
        await client.send(method, path, body, action=action, timeout_seconds=TIMEOUT_SECONDS)
    except KubeError as error:
        # Who has no agents has neither their namespace nor the right to write there.
        if error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN}:
            return f"left out, for there is no such namespace, or no right in it: {error}"
        raise
    return "new"


async def _config_map(client: KubeClient, path: str) -> Mapping[str, object] | None:
    """Return what a ConfigMap holds, None where there is none."""
    try:
        found = await client.get(
            path,
            {},
            action="get configmaps",
            timeout_seconds=TIMEOUT_SECONDS,
            limit_bytes=LIMIT_BYTES,
        )
    except KubeError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return None
        raise
    return mapping_of(found.get("data"))


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)
