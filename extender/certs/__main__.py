"""Makes a CA and the certificates of both sides, or renews what is old.

    python -m extender.certs --folder DIR [--address 10.96.0.88]
    python -m extender.certs --secrets            (in a pod, or with --kubeconfig)
    python -m extender.certs --secrets --webhook idlegpu-scheduler-name

Run it as often as you like: what is good stays, there is one CA, and of several at a time one waits
for the other. A new CA is brought in without a gap: --next-ca, then restart every kube-scheduler,
which reads its CA once; --switch-ca; a day later --drop-ca.
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

from extender.certs.issuing import (
    EXTENDER_NAME,
    CertsError,
    Files,
    Wanted,
    ending,
    expires_at,
    renewed,
    switched,
    trusted,
    with_next,
    without_previous,
)
from extender.certs.lease import alone_with
from extender.certs.storing import (
    CA_CONFIG_MAP,
    SIDES,
    Secrets,
    alone_in,
    publish,
    read_folder,
    write_folder,
)
from extender.certs.webhook import write_ca_bundle
from extender.kube import KubeClient, KubeError
from extender.kube_config import SERVICE_ACCOUNT, KubeConfigError

DEFAULT_NAMESPACE: Final = "idlegpu"

TRIES: Final = 10
"""Where another changes what is kept at the same time."""
PAUSE_SECONDS: Final = (0.1, 0.5)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0, or 1 where certificates could not be made or kept.
    """
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.ca_namespace and not arguments.secrets:
        parser.error("--ca-namespace goes with --secrets: a folder has ca.crt for each side")
    if arguments.webhook and not arguments.secrets:
        parser.error("--webhook goes with --secrets: the API server is told as well")
    namespace = arguments.namespace or _own_namespace()
    service = f"{EXTENDER_NAME}.{namespace}.svc"
    # Who looks at health and API over a port-forward asks for the last of ours.
    names = (EXTENDER_NAME, service, f"{service}.cluster.local", "localhost", *arguments.name)
    wanted = Wanted(
        names=tuple(dict.fromkeys(names)),
        addresses=tuple(map(str, arguments.address)),
        days=arguments.days,
        renew_days=arguments.renew_days,
    )
    try:
        if arguments.folder is not None:
            with alone_in(arguments.folder):
                before: Files = read_folder(arguments.folder)
                after = changed(before, wanted, arguments.step)
                write_folder(arguments.folder, after)
        else:
            before, after = asyncio.run(_keep_secrets(arguments, namespace, wanted))
    except (CertsError, KubeError, KubeConfigError, OSError) as error:
        sys.stderr.write(f"cannot make certificates: {error}\n")
        return EXIT_FAILED
    sys.stdout.write(describe(before, after))
    if warning := ending(after, wanted, datetime.now(UTC)):
        sys.stderr.write(f"warning: {warning}\n")
    return EXIT_OK


def changed(files: Files, wanted: Wanted, step: str, now: datetime | None = None) -> Files:
    """Return all files after one step of a CA's change ("" for none), renewed where due.

    Raises:
        CertsError: they cannot be made of what is there.
    """
    at = now or datetime.now(UTC)
    if step == "next":
        files = with_next(files, at)
    elif step == "switch":
        files = switched(files)
    elif step == "drop":
        files = without_previous(files)
    return renewed(files, wanted, at)


def describe(before: Files, after: Files) -> str:
    """Return a line for each certificate: until when it is good, and whether it is new."""
    lines = []
    for name in ("ca", "next", "previous", *SIDES):
        file = f"{name}.crt"
        if file in after:
            news = "" if before.get(file) == after[file] else ", new"
            lines.append(f"{name}: good until {expires_at(after[file]):%Y-%m-%d}{news}\n")
    return "".join(lines)


async def _keep_secrets(
    arguments: argparse.Namespace, namespace: str, wanted: Wanted
) -> tuple[Files, Files]:
    client = await KubeClient.connect(arguments.kubeconfig)
    try:
        async with alone_with(client, namespace):
            return await _write_secrets(arguments, client, Secrets(client, namespace), wanted)
    finally:
        await client.close()


async def _write_secrets(
    arguments: argparse.Namespace, client: KubeClient, secrets: Secrets, wanted: Wanted
) -> tuple[Files, Files]:
    """Have the Secrets hold what they should, and return what they held and hold.

    The Lease keeps others away; should it fail to, each change is of what was read all the same.
    """
    before = await secrets.read()
    after: Files | None = None
    step = arguments.step
    for _ in range(TRIES):
        found = before if after is None else await secrets.read()
        after = changed(found, wanted, step)
        try:
            await secrets.write_authority(after)
            step = ""  # done, whatever becomes of the rest
            await secrets.write_sides(after)
            await _tell(arguments, client, after)
        except KubeError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
        else:
            if await secrets.is_current():
                return before, after
        # Another does the same at the same time: what it made is good for us, too.
        await asyncio.sleep(random.uniform(*PAUSE_SECONDS))
    raise CertsError(f"others changed them at the same time, {TRIES} times: run it again")


async def _tell(arguments: argparse.Namespace, client: KubeClient, files: Files) -> None:
    """Tell the CAs those who have no certificate of ours."""
    for other in arguments.ca_namespace:
        if told := await publish(client, other, files):
            sys.stdout.write(f"ConfigMap {other}/{CA_CONFIG_MAP}: {told}\n")
    webhook = arguments.webhook
    if webhook and await write_ca_bundle(client, webhook, trusted(files)):
        sys.stdout.write(f"MutatingWebhookConfiguration {webhook}: new\n")


def _own_namespace() -> str:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return DEFAULT_NAMESPACE


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m extender.certs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", type=Path, metavar="DIR", help="keep them in a folder")
    where.add_argument("--secrets", action="store_true", help="keep them in Secrets of Kubernetes")
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="where this is no pod")
    parser.add_argument(
        "--namespace", default="", help="the extender's; unless said, the pod's own, or idlegpu"
    )
    parser.add_argument(
        "--address",
        type=ipaddress.ip_address,
        action="append",
        default=[],
        help="IP address that kube-scheduler asks; may be repeated",
    )
    parser.add_argument(
        "--name", action="append", default=[], help="further DNS name; may be repeated"
    )
    parser.add_argument(
        "--webhook",
        default="",
        metavar="NAME",
        help="MutatingWebhookConfiguration that is told the CA, with --secrets",
    )
    parser.add_argument("--days", type=int, default=365, help="how long they are good (365)")
    parser.add_argument(
        "--renew-days", type=int, default=60, help="renew what is good for less (60)"
    )
    parser.add_argument(
        "--ca-namespace",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="with --secrets: have a ConfigMap idlegpu-ca there, with the CAs alone, for node "
        "agents that report over TLS; may be repeated",
    )
    step = parser.add_mutually_exclusive_group()
    for name, text in (
        ("next", "make another CA, which both sides trust from now on"),
        ("switch", "let that one issue all certificates"),
        ("drop", "trust the one before it no longer"),
    ):
        step.add_argument(f"--{name}-ca", dest="step", action="store_const", const=name, help=text)
    parser.set_defaults(step="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
