"""Read and write certificates in a folder or in Kubernetes objects; one run at a time."""

import asyncio
import base64
import binascii
import fcntl
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

import orjson

from extender.core.untyped import mapping_of, objects_of, text_of
from extender.kube.client import KubeClient, KubeError
from extender.kube.lease import Lease
from extender.runtime.decoding import decode_with
from extender.server.certificates.issuing import EXTENDER, SCHEDULER, CertsError, Files, trusted

SIDES: Final = (EXTENDER, SCHEDULER)
_AUTHORITY: Final = ("ca.crt", "ca.key", "next.crt", "next.key", "previous.crt")

CA_SECRET: Final = "idlegpu-ca"  # noqa: S105 - its name
CA_CONFIG_MAP: Final = "idlegpu-ca"
"""ConfigMap with the trusted CAs as `ca.crt`, for clients without a certificate of their own."""

SECRETS: Final = {EXTENDER: "idlegpu-extender-tls", SCHEDULER: "idlegpu-kube-scheduler-tls"}

_LABELS: Final = {"app.kubernetes.io/part-of": "idlegpu"}

_WEBHOOKS_PATH: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_WEBHOOK_RESOURCE: Final = "mutatingwebhookconfigurations.admissionregistration.k8s.io"

_TIMEOUT_SECONDS: Final = 10.0

LEASE_NAME: Final = "idlegpu-certs"
"""The Lease that a run holds while it changes the Secrets."""

_WAIT_SECONDS: Final = 60.0
"""Time to wait for another run. A run takes 1 to 2 s, and a dead run loses its Lease after 15 s.
After this time the run continues without the Lease, because `resourceVersion` protects every
write."""

_PAUSE_SECONDS: Final = (0.2, 0.4)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive file lock on a folder while the block runs; other runs wait."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the PEM files in a folder by name; empty if the folder does not exist."""
    paths = {name: folder / name for name in _AUTHORITY}
    for side in SIDES:
        paths |= {f"{side}{end}": folder / side / f"tls{end}" for end in (".crt", ".key")}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def write_folder(folder: Path, files: Files) -> None:
    """Write all PEM files to a folder, each atomically and with mode 0600.

    `FOLDER/extender` and `FOLDER/kube-scheduler` get the files of that side: `tls.crt`,
    `tls.key` and `ca.crt`. The CA itself stays in FOLDER: mount only the subfolders.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in _AUTHORITY:
        if name in files:
            _write(folder / name, files[name])
        else:
            (folder / name).unlink(missing_ok=True)
    for side in SIDES:
        (folder / side).mkdir(mode=0o700, exist_ok=True)
        for name, content in _side_of(files, side).items():
            _write(folder / side / name, content)


def _side_of(files: Files, side: str) -> dict[str, bytes]:
    """Return the files of one side under the key names of a kubernetes.io/tls Secret."""
    return {
        "tls.crt": files[f"{side}.crt"],
        "tls.key": files[f"{side}.key"],
        "ca.crt": trusted(files),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Content of a Secret at the last read or write; `version` is "" if it does not exist."""

    version: str = ""
    data: Mapping[str, str] = field(default_factory=dict)


class Secrets:
    """The Secrets that store the certificates, in one namespace.

    Concurrent runs are safe: each write carries the `resourceVersion` that was read, and the API
    server rejects it with 409 if another run changed the Secret. So one CA issues both
    certificates.

    Args:
        namespace: namespace of the Secrets.
    """

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._stored: dict[str, _Stored] = {}

    async def read(self) -> dict[str, bytes]:
        """Return the PEM files in the Secrets by name; empty if no Secret exists.

        Raises:
            KubeError: the API server cannot be reached or refuses the request.
            CertsError: a Secret holds invalid base64.
        """
        # Read the CA first: a run that changes it writes it before the certificates, so a
        # concurrent change shows up as a conflict.
        authority = await self._read(CA_SECRET)
        files = {name: content for name, content in authority.items() if name in _AUTHORITY}
        for side, secret in SECRETS.items():
            data = await self._read(secret)
            files |= {
                f"{side}{end}": data[f"tls{end}"] for end in (".crt", ".key") if f"tls{end}" in data
            }
        return files

    async def write_authority(self, files: Files) -> None:
        """Write the CA's Secret; call this first, because no certificate can be renewed without it.

        The Secret is also written unchanged when a certificate will change, so that the API server
        rejects the write if another run changed the CA.

        Raises:
            KubeError: the write failed; status 409 if another run changed the Secret first.
        """
        wanted = _encoded({name: files.get(name) for name in _AUTHORITY})
        sides = ((name, _encoded(_side_of(files, side))) for side, name in SECRETS.items())
        if self._differs(CA_SECRET, wanted) or any(self._differs(*one) for one in sides):
            await self._write(CA_SECRET, "Opaque", wanted)

    async def write_sides(self, files: Files) -> None:
        """Write the Secrets of both sides if their content changed.

        Raises:
            KubeError: the write failed; status 409 if another run changed the Secret first.
        """
        for side, secret in SECRETS.items():
            wanted = _encoded(_side_of(files, side))
            if self._differs(secret, wanted):
                await self._write(secret, "kubernetes.io/tls", wanted)

    async def is_current(self) -> bool:
        """Check that the CA's Secret is unchanged since the last read or write.

        Raises:
            KubeError: the API server cannot be reached or refuses the request.
        """
        return (await self._get(CA_SECRET)).version == self._stored[CA_SECRET].version

    def _differs(self, name: str, wanted: Mapping[str, str | None]) -> bool:
        data = self._stored[name].data
        return any(data.get(key) != text for key, text in wanted.items())

    async def _read(self, name: str) -> dict[str, bytes]:
        stored = self._stored[name] = await self._get(name)
        try:
            return {key: base64.b64decode(text) for key, text in stored.data.items()}
        except binascii.Error as error:
            raise CertsError(f"cannot read Secret {name}: {error}") from error

    async def _get(self, name: str) -> _Stored:
        secret = await self._client.find(
            f"{self._path}/{name}", action="get secrets", timeout_seconds=_TIMEOUT_SECONDS
        )
        return _Stored() if secret is None else _parse(secret)

    async def _write(self, name: str, kind: str, wanted: Mapping[str, str | None]) -> None:
        """Create the Secret, or patch the version that was read; keys set to None are removed."""
        if version := self._stored[name].version:
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
        self._stored[name] = _parse(mapping_of(decode_with(orjson.loads, answer)))

    async def _send(self, method: str, path: str, body: object, action: str) -> bytes:
        return await self._client.send(
            method, path, body, action=action, timeout_seconds=_TIMEOUT_SECONDS
        )


def _parse(secret: Mapping[str, object]) -> _Stored:
    data = mapping_of(secret.get("data"))
    return _Stored(
        version=text_of(mapping_of(secret.get("metadata")).get("resourceVersion")),
        data={key: text_of(value) for key, value in data.items()},
    )


def _encoded(data: Mapping[str, bytes | None]) -> dict[str, str | None]:
    return {
        key: None if content is None else base64.b64encode(content).decode()
        for key, content in data.items()
    }


async def publish(client: KubeClient, namespace: str, files: Files) -> str:
    """Write the trusted CA certificates to a ConfigMap in another namespace.

    Args:
        namespace: namespace of clients without a certificate, such as the node agents.
        files: PEM files by name.

    Returns:
        Outcome in words, "" if the ConfigMap was up to date.

    Raises:
        KubeError: the write failed; status 409 if another run changed the ConfigMap first.
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
        found = await client.find(
            f"{path}/{CA_CONFIG_MAP}", action="get configmaps", timeout_seconds=_TIMEOUT_SECONDS
        )
        method, action = "POST", "create configmaps"
        if found is not None:
            stored = _parse(found)
            if stored.data == data:
                return ""
            method, action, path = "PATCH", "patch configmaps", f"{path}/{CA_CONFIG_MAP}"
            body = {"metadata": {"resourceVersion": stored.version}, "data": data}
        await client.send(method, path, body, action=action, timeout_seconds=_TIMEOUT_SECONDS)
    except KubeError as error:
        # An installation without agents has neither their namespace nor a Role in it.
        if error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN}:
            return f"skipped: the namespace does not exist or permits no write: {error}"
        raise
    return "new"


async def write_ca_bundle(client: KubeClient, name: str, bundle: bytes) -> bool:
    """Set the `caBundle` of every webhook in a MutatingWebhookConfiguration; keep its other fields.

    Args:
        name: name of the existing object.
        bundle: CA certificates in PEM.

    Returns:
        Whether the object was changed.

    Raises:
        KubeError: the API server cannot be reached, refuses, or has no such object.
    """
    found = await client.get(
        f"{_WEBHOOKS_PATH}/{name}",
        action=f"get {_WEBHOOK_RESOURCE}",
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    wanted = base64.b64encode(bundle).decode()
    webhooks = objects_of(found.get("webhooks"))
    configs = [mapping_of(webhook.get("clientConfig")) for webhook in webhooks]
    if all(config.get("caBundle") == wanted for config in configs):
        return False
    # A merge patch replaces a list, so send the whole list as read. resourceVersion makes the API
    # server reject the patch if another client changed the object since.
    version = text_of(mapping_of(found.get("metadata")).get("resourceVersion"))
    change = {
        "metadata": {"resourceVersion": version},
        "webhooks": [
            {**webhook, "clientConfig": {**config, "caBundle": wanted}}
            for webhook, config in zip(webhooks, configs, strict=True)
        ],
    }
    await client.send(
        "PATCH",
        f"{_WEBHOOKS_PATH}/{name}",
        change,
        action=f"patch {_WEBHOOK_RESOURCE}",
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    return True


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)


@asynccontextmanager
async def hold_lease(
    client: KubeClient, namespace: str, *, wait_seconds: float = _WAIT_SECONDS
) -> AsyncIterator[None]:
    """Hold the Lease for the certificate Secrets while the block runs; other runs wait.

    If the Lease is forbidden or another run does not release it, print a warning to standard error
    and continue without it.

    Args:
        namespace: namespace of the Secrets and of the Lease.
        wait_seconds: time to wait for another holder.

    Raises:
        KubeError: the API server cannot be reached or refuses the request.
    """
    lease = Lease(client, namespace=namespace, name=LEASE_NAME)
    problem = await _acquire(lease, wait_seconds)
    if problem:
        sys.stderr.write(
            f"warning: another run may change the Secrets at the same time: {problem}\n"
        )
        yield
        return
    renewing = asyncio.create_task(lease.run(), name="certs lease")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        # A task cancelled before its first step has not released the Lease.
        with suppress(KubeError):
            await lease.release()


async def _acquire(lease: Lease, wait_seconds: float) -> str:
    """Acquire the Lease; return the reason for a failure, "" on success."""
    ends = time.monotonic() + wait_seconds
    while time.monotonic() < ends:
        try:
            await lease.attempt()
        except KubeError as error:
            if error.status == HTTPStatus.FORBIDDEN:
                return str(error)
            raise
        if lease.is_held:
            return ""
        await asyncio.sleep(random.uniform(*_PAUSE_SECONDS))
    return f"another run holds the Lease {LEASE_NAME} for more than {wait_seconds:g} s"
