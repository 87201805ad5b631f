"""Where certificates are kept: a folder, or Secrets of Kubernetes."""

import base64
import binascii
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

import orjson

from extender.certs.issuing import EXTENDER, SCHEDULER, CertsError, Files, trusted
from extender.core.untyped import mapping_of, text_of
from extender.decoding import decode_with
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


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep others, who do the same, from changing a folder meanwhile: they wait."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What a Secret held when it was read or written last; `version` is "" while there is none."""

    version: str = ""
    data: Mapping[str, str] = field(default_factory=dict)


class Secrets:
    """The Secrets that hold certificates, in one namespace.

    Several may write them at once: each change is of what was read, and is refused (409) where
    another was faster. So there is one CA, which issued what both sides have.

    Args:
        client: the API server.
        namespace: theirs.
    """

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._held: dict[str, _Held] = {}

    async def read(self) -> dict[str, bytes]:
        """Return what they hold; nothing where there are none.

        Raises:
            KubeError: the API server could not be asked, or refused.
            CertsError: what they hold is damaged.
        """
        # The CA first: who changes it changes what it issued later, and is noticed.
        authority = await self._read(CA_SECRET)
        files = {name: content for name, content in authority.items() if name in AUTHORITY}
        for side, secret in SECRETS.items():
            held = await self._read(secret)
            files |= {
                f"{side}{end}": held[f"tls{end}"] for end in (".crt", ".key") if f"tls{end}" in held
            }
        return files

    async def write_authority(self, files: Files) -> None:
        """Make the CA's hold what it should, before what it issues: else nothing can be renewed.

        Where that is what it holds, and what it issued is to change, it is written all the same:
        that is refused where another has changed it.

        Raises:
            KubeError: it was not done; with status 409 where another was faster.
        """
        wanted = _encoded({name: files.get(name) for name in AUTHORITY})
        sides = ((name, _encoded(side_of(files, side))) for side, name in SECRETS.items())
        if self._is_news(CA_SECRET, wanted) or any(self._is_news(*one) for one in sides):
            await self._write(CA_SECRET, "Opaque", wanted)

    async def write_sides(self, files: Files) -> None:
        """Make those of both sides hold what they should.

        Raises:
            KubeError: it was not done; with status 409 where another was faster.
        """
        for side, secret in SECRETS.items():
            wanted = _encoded(side_of(files, side))
            if self._is_news(secret, wanted):
                await self._write(secret, "kubernetes.io/tls", wanted)

    async def is_current(self) -> bool:
        """Tell whether the CA's is as it was read or written last.

        Raises:
            KubeError: the API server could not be asked, or refused.
        """
        return (await self._get(CA_SECRET)).version == self._held[CA_SECRET].version

    def _is_news(self, name: str, wanted: Mapping[str, str | None]) -> bool:
        data = self._held[name].data
        return any(data.get(key) != text for key, text in wanted.items())

    async def _read(self, name: str) -> dict[str, bytes]:
        held = self._held[name] = await self._get(name)
        try:
            return {key: base64.b64decode(text) for key, text in held.data.items()}
        except binascii.Error as error:
            raise CertsError(f"cannot read Secret {name}: {error}") from error

    async def _get(self, name: str) -> _Held:
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
                return _Held()
            raise
        return _held(secret)

    async def _write(self, name: str, kind: str, wanted: Mapping[str, str | None]) -> None:
        """Create a Secret, or change the one that was read; what is None is removed."""
        if version := self._held[name].version:
            change = {"metadata": {"resourceVersion": version}, "data": wanted}
            answer = await self._send("PATCH", f"{self._path}/{name}", change, "patch secrets")
        else:
            body = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "labels": _LABELS},
                "type": kind,
                "data": {key: text for key, text in wanted.items() if text is not None},
            }
            answer = await self._send("POST", self._path, body, "create secrets")
        self._held[name] = _held(mapping_of(decode_with(orjson.loads, answer)))

    async def _send(self, method: str, path: str, body: object, action: str) -> bytes:
        return await self._client.send(
            method, path, body, action=action, timeout_seconds=TIMEOUT_SECONDS
        )


def _held(secret: Mapping[str, object]) -> _Held:
    data = mapping_of(secret.get("data"))
    return _Held(
        version=text_of(mapping_of(secret.get("metadata")).get("resourceVersion")),
        data={key: text_of(value) for key, value in data.items()},
    )


def _encoded(data: Mapping[str, bytes | None]) -> dict[str, str | None]:
    return {
        key: None if content is None else base64.b64encode(content).decode()
        for key, content in data.items()
    }


async def publish(client: KubeClient, namespace: str, files: Files) -> str:
    """Have a ConfigMap of another namespace hold the CAs that both sides trust, and nothing else.

    Args:
        client: the API server.
        namespace: where those are who ask without a certificate: node agents.
        files: all files.

    Returns:
        What was done, in words; "" for nothing.

    Raises:
        KubeError: it was not done; with status 409 where another was faster.
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
        found = await _config_map(client, f"{path}/{CA_CONFIG_MAP}")
        method, action = "POST", "create configmaps"
        if found is not None:
            held = _held(found)
            if held.data == data:
                return ""
            method, action, path = "PATCH", "patch configmaps", f"{path}/{CA_CONFIG_MAP}"
            body = {"metadata": {"resourceVersion": held.version}, "data": data}
        await client.send(method, path, body, action=action, timeout_seconds=TIMEOUT_SECONDS)
    except KubeError as error:
        # Who has no agents has neither their namespace nor the right to write there.
        if error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN}:
            return f"left out, for there is no such namespace, or no right in it: {error}"
        raise
    return "new"


async def _config_map(client: KubeClient, path: str) -> Mapping[str, object] | None:
    """Return a ConfigMap, None where there is none."""
    try:
        return await client.get(
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


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)
