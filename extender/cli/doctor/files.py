"""Load facts from files: output of kubectl and curl, configurations, certificates."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from extender.cli.doctor.fact_collector import (
    PEM,
    FactCollector,
    parse_exposition,
    read_certificates,
)
from extender.cli.remote.errors import ClientError, Failure, cause_of
from extender.runtime.decoding import MalformedError, decode_with
from extender.runtime.yaml_documents import yaml_documents

_ALLOWED: Final = (
    "must be objects of the API server as JSON or YAML (nodes, pods, daemonsets, configmaps, "
    "services, secrets, roles and their bindings), the output of kubectl version, a "
    "KubeSchedulerConfiguration, metrics of dcgm-exporter or the extender, answers of /v1/unasked, "
    "/v1/gpus, /v1/nodes or /readyz, the extender's settings, or certificates"
)


def add_files(collector: FactCollector, files: Iterable[str]) -> None:
    """Load each file into the fact collector.

    Raises:
        ClientError: a file cannot be read, or its content is not recognized.
    """
    for file in files:
        path = Path(file)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ClientError(
                f"cannot read {file}: {cause_of(error)}", Failure.BAD_REQUEST
            ) from error
        if not _add_text(collector, file, text):
            raise ClientError(
                f"the content of {file} is not recognized: {_ALLOWED}", Failure.BAD_REQUEST
            )


def _add_text(collector: FactCollector, file: str, text: str) -> bool:
    """Add the content of a file; return whether it was recognized.

    Raises:
        ClientError: a certificate is malformed.
    """
    stem = Path(file).name.partition(".")[0]
    if text.lstrip().startswith(PEM[:10]):
        try:
            found = list(read_certificates(file, text))
        except ValueError as error:
            raise ClientError(
                f"{file}: malformed certificate: {error}", Failure.BAD_REQUEST
            ) from error
        collector.add_certificates(found)
        return bool(found)
    # A list, so that every document is added: `any` on a generator would stop at the first.
    known = [collector.add(file, document, stem=stem) for document in _documents(text)]
    return any(known) or _add_samples(collector, text)


def _documents(text: str) -> Iterator[object]:
    """Decode a text as JSON or YAML; yield nothing if it is neither."""
    try:
        yield decode_with(msgspec.json.decode, text)
        return
    except MalformedError:
        pass
    try:
        yield from decode_with(yaml_documents, text)
    except MalformedError:
        return


def _add_samples(collector: FactCollector, text: str) -> bool:
    try:
        return collector.add_samples(parse_exposition(text))
    except (ValueError, KeyError, IndexError):  # errors of the parser on malformed input
        return False
