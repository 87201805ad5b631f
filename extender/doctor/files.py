"""Reads facts from files: what kubectl and curl have written, configurations, certificates."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from extender.decoding import MalformedError, decode_with
from extender.doctor.certificates import PEM, read_certificates
from extender.doctor.exposition import parse_exposition
from extender.doctor.pile import Pile
from extender.remote.errors import ClientError, Failure
from extender.yaml_documents import yaml_documents

ALLOWED: Final = (
    "must be objects of the API server as JSON or YAML (nodes, pods, daemonsets, configmaps, "
    "secrets, roles and their bindings), a KubeSchedulerConfiguration, metrics of dcgm-exporter or "
    "the extender, answers of /v1/unasked, /v1/gpus, /v1/nodes or /readyz, the extender's "
    "settings, or certificates"
)


def add_files(pile: Pile, files: Iterable[str]) -> None:
    """Add what files hold.

    Raises:
        ClientError: one cannot be read, or holds nothing that we know.
    """
    for file in files:
        path = Path(file)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ClientError(f"cannot read {file}: {error}", Failure.BAD_QUESTION) from error
        if not _add_text(pile, file, text):
            raise ClientError(
                f"{file} holds nothing that is known: {ALLOWED}", Failure.BAD_QUESTION
            )


def _add_text(pile: Pile, file: str, text: str) -> bool:
    """Add what a text holds; tell whether that is anything that we know.

    Raises:
        ClientError: a certificate in it cannot be read.
    """
    stem = Path(file).name.partition(".")[0]
    if text.lstrip().startswith(PEM[:10]):
        try:
            found = list(read_certificates(file, text))
        except ValueError as error:
            raise ClientError(
                f"{file}: a certificate cannot be read: {error}", Failure.BAD_QUESTION
            ) from error
        pile.add_certificates(found)
        return bool(found)
    # Each of them, though one is enough: no early end.
    known = [pile.add(file, document, stem=stem) for document in _documents(text)]
    return any(known) or _add_samples(pile, text)


def _documents(text: str) -> Iterator[object]:
    """Yield the documents of a text, none where it is neither JSON nor YAML."""
    try:
        yield decode_with(msgspec.json.decode, text)
        return
    except MalformedError:
        pass
    try:
        yield from decode_with(yaml_documents, text)
    except MalformedError:
        return


def _add_samples(pile: Pile, text: str) -> bool:
    try:
        return pile.add_samples(parse_exposition(text))
    except (ValueError, KeyError, IndexError):  # what the parser raises where it loses its way
        return False
