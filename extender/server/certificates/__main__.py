"""Create or renew the CA and the certificates of the extender and of kube-scheduler.

    python -m extender.server.certificates --folder DIR [--address 10.96.0.88]
    python -m extender.server.certificates --secrets            (in a pod, or with --kubeconfig)
    python -m extender.server.certificates --secrets --webhook idlegpu-scheduler-name

It is safe to run again at any time: valid certificates do not change, and concurrent runs wait for
each other. To replace the CA without downtime: run with --next-ca, restart every kube-scheduler (it
reads its CA only at start), run with --switch-ca, and a day later with --drop-ca.
"""

import argparse
import asyncio
import ipaddress
import random
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final

from extender.kube.client import KubeClient, KubeError
from extender.kube.kubeconfig import KubeConfigError, own_namespace
from extender.server.certificates.issuing import (
    EXTENDER_NAME,
    CertsError,
    Files,
    Wanted,
    expires_at,
    expiry_warning,
    renewed,
    switched,
    trusted,
    with_next,
    without_previous,
)
from extender.server.certificates.storing import (
    CA_CONFIG_MAP,
    SIDES,
    Secrets,
    hold_lease,
    lock_folder,
    publish,
    read_folder,
    write_ca_bundle,
    write_folder,
)

_TRIES: Final = 10
"""Attempts to write the Secrets while other runs change them."""
_PAUSE_SECONDS: Final = (0.1, 0.5)
_EXIT_OK: Final = 0
_EXIT_FAILED: Final = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Create or renew the certificates in a folder or in Secrets.

    Returns:
        Exit status: 0, or 1 if certificates could not be created or stored.
    """
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.ca_namespace and not arguments.secrets:
        parser.error("--ca-namespace goes with --secrets: a folder has ca.crt for each side")
    if arguments.webhook and not arguments.secrets:
        parser.error("--webhook goes with --secrets: it writes to the API server as well")
    namespace = arguments.namespace or own_namespace()
    service = f"{EXTENDER_NAME}.{namespace}.svc"
    # A client that connects over a port-forward uses the name localhost.
    names = (EXTENDER_NAME, service, f"{service}.cluster.local", "localhost", *arguments.name)
    wanted = Wanted(
        names=tuple(dict.fromkeys(names)),
        addresses=tuple(map(str, arguments.address)),
        days=arguments.days,
        renew_days=arguments.renew_days,
    )
    try:
        if arguments.folder is not None:
            with lock_folder(arguments.folder):
                before: Files = read_folder(arguments.folder)
                after = changed(before, wanted, arguments.step)
                write_folder(arguments.folder, after)
        else:
            before, after = asyncio.run(_keep_secrets(arguments, namespace, wanted))
    except (CertsError, KubeError, KubeConfigError, OSError) as error:
        sys.stderr.write(f"cannot make certificates: {error}\n")
        return _EXIT_FAILED
    sys.stdout.write(_describe(before, after))
    if warning := expiry_warning(after, wanted, datetime.now(UTC)):
        sys.stderr.write(f"warning: {warning}\n")
    return _EXIT_OK


def changed(files: Files, wanted: Wanted, step: str, now: datetime | None = None) -> Files:
    """Return all files after one step of a CA rollover, with certificates renewed if due.

    Args:
        files: PEM files by name.
        wanted: names, addresses and lifetime of the certificates.
        step: "next", "switch", "drop", or "" for none.
        now: time of issue, None for the current time.

    Raises:
        CertsError: a file is damaged or missing.
    """
    at = now or datetime.now(UTC)
    if step == "next":
        files = with_next(files, at)
    elif step == "switch":
        files = switched(files)
    elif step == "drop":
        files = without_previous(files)
    return renewed(files, wanted, at)


def _describe(before: Files, after: Files) -> str:
    """Format one line for each certificate: its expiry date, and whether it is new."""
    lines = []
    for name in ("ca", "next", "previous", *SIDES):
        file = f"{name}.crt"
        if file in after:
            suffix = "" if before.get(file) == after[file] else ", new"
            lines.append(f"{name}: good until {expires_at(after[file]):%Y-%m-%d}{suffix}\n")
    return "".join(lines)


async def _keep_secrets(
    arguments: argparse.Namespace, namespace: str, wanted: Wanted
) -> tuple[Files, Files]:
    client = await KubeClient.connect(arguments.kubeconfig)
    try:
        async with hold_lease(client, namespace):
            return await _write_secrets(arguments, client, Secrets(client, namespace), wanted)
    finally:
        await client.close()


async def _write_secrets(
    arguments: argparse.Namespace, client: KubeClient, secrets: Secrets, wanted: Wanted
) -> tuple[Files, Files]:
    """Write the renewed files to the Secrets; return the files from before and after.

    The Lease excludes concurrent runs. If it fails, `resourceVersion` still rejects a write that
    would overwrite another run's change.
    """
    before = await secrets.read()
    after: Files | None = None
    step = arguments.step
    for _ in range(_TRIES):
        found = before if after is None else await secrets.read()
        after = changed(found, wanted, step)
        try:
            await secrets.write_authority(after)
            step = ""  # do not repeat the step if a later write conflicts
            await secrets.write_sides(after)
            await _publish_cas(arguments, client, after)
        except KubeError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
        else:
            if await secrets.is_current():
                return before, after
        # Another run writes at the same time: read its certificates and use them.
        await asyncio.sleep(random.uniform(*_PAUSE_SECONDS))
    raise CertsError(
        f"other runs changed the Secrets at the same time, {_TRIES} times: run it again"
    )


async def _publish_cas(arguments: argparse.Namespace, client: KubeClient, files: Files) -> None:
    # For clients that have no certificate: node agents and the API server.
    for other in arguments.ca_namespace:
        if outcome := await publish(client, other, files):
            sys.stdout.write(f"ConfigMap {other}/{CA_CONFIG_MAP}: {outcome}\n")
    webhook = arguments.webhook
    if webhook and await write_ca_bundle(client, webhook, trusted(files)):
        sys.stdout.write(f"MutatingWebhookConfiguration {webhook}: new\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m extender.server.certificates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    store = parser.add_mutually_exclusive_group(required=True)
    store.add_argument("--folder", type=Path, metavar="DIR", help="store the files in a folder")
    store.add_argument("--secrets", action="store_true", help="store the files in Secrets")
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="kubeconfig, outside a pod")
    parser.add_argument(
        "--namespace", default="", help="the extender's namespace (this pod's own, or idlegpu)"
    )
    parser.add_argument(
        "--address",
        type=ipaddress.ip_address,
        action="append",
        default=[],
        help="IP address at which kube-scheduler reaches the extender; repeatable",
    )
    parser.add_argument("--name", action="append", default=[], help="further DNS name; repeatable")
    parser.add_argument(
        "--webhook",
        default="",
        metavar="NAME",
        help="MutatingWebhookConfiguration whose caBundle to update, with --secrets",
    )
    parser.add_argument(
        "--days", type=int, default=365, help="lifetime of certificates in days (365)"
    )
    parser.add_argument(
        "--renew-days",
        type=int,
        default=60,
        help="renew certificates that expire within this many days (60)",
    )
    parser.add_argument(
        "--ca-namespace",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="with --secrets: write the CA certificates to a ConfigMap idlegpu-ca there, for node "
        "agents that report over TLS; repeatable",
    )
    step = parser.add_mutually_exclusive_group()
    for name, text in (
        ("next", "create the next CA, which both sides trust from now on"),
        ("switch", "issue all certificates from the next CA"),
        ("drop", "stop trusting the previous CA"),
    ):
        step.add_argument(f"--{name}-ca", dest="step", action="store_const", const=name, help=text)
    parser.set_defaults(step="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
