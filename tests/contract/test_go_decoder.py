"""Requests that the extender reads as Go would, or refuses."""

import re
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings

from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import parse_pod_ref, parse_request
from extender.webhook import wire
from extender.webhook.go_json import WireError
from testkit.controlplane.leash import leashed
from testkit.controlplane.tools import binary
from tests.contract import go_bodies

ARGS: Final = b"a"
PREEMPTION_ARGS: Final = b"p"
_HEAD: Final = struct.Struct(">cI")


class Rewritten(NamedTuple):
    """Request as Go writes it after decoding it, or the reason why Go cannot decode it."""

    body: bytes = b""
    error: str = ""


class GoDecoder:
    """Client of the running Go program."""

    def __init__(self, to_program: IO[bytes], from_program: IO[bytes]) -> None:
        self._to = to_program
        self._from = from_program

    def rewrite(self, kind: bytes, body: bytes) -> Rewritten:
        """Let Go decode a request and encode it again.

        Args:
            kind: `ARGS` or `PREEMPTION_ARGS`.
            body: the request.
        """
        self._to.write(_HEAD.pack(kind, len(body)) + body)
        self._to.flush()
        outcome, length = _HEAD.unpack(self._from.read(_HEAD.size))
        answer = self._from.read(length)
        if outcome == b"e":
            return Rewritten(error=answer.decode(errors="replace"))
        return Rewritten(body=answer)


@contextmanager
def running_decoder(program: Path) -> Iterator[GoDecoder]:
    """Run the program while the context is open."""
    with subprocess.Popen(
        leashed([str(program)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        yield GoDecoder(process.stdin, process.stdout)
        process.stdin.close()


pytestmark = pytest.mark.e2e  # the program is built like the control plane

GOLDEN: Final = Path(__file__).with_name("golden")
EXAMPLES: Final = 200

STRICTER: Final = re.compile(
    r"is not UTF-8|surrogate|hex escape|truncated|out of range|nested too deeply|has no UID"
    r"|\$ is null"
)
"""Refusals of bodies that Go accepts: invalid UTF-8 and lone surrogates (Go substitutes U+FFFD, so
that an answer would have other names), numbers that no double holds, victims without a UID."""

UNREAD: Final = re.compile(
    r"unmarshal .* into Go (struct field|value of type) "
    r"(Pod|Node|Object|Container|Resource|Meta)\w*\."
    r"|quantities must match|unable to parse quantity|v1\.(Node|Pod|Container)\b"
    r"|(ExtenderPreemptionArgs|Victims)\.NodeNameToVictims"  # when the other form is present, too
)
"""Go's refusals of bodies that the extender accepts: a value of another type in a Pod or a Node
counts as missing."""


@pytest.fixture(scope="module")
def go() -> Iterator[GoDecoder]:
    with running_decoder(binary("extenderargs")) as decoder:
        yield decoder


def read(kind: bytes, body: bytes) -> object:
    """Return all values that the extender reads from a request."""
    if kind == ARGS:
        request = wire.decode_request(body)
        names, is_whole = tuple(request.nodes), request.node_objects is not None
        said: tuple[object, ...] = (names, is_whole)
        pod = request.pod
    else:
        preemption = wire.decode_preemption(body)
        by_node = {each.node: each for each in preemption.candidates}  # Go's maps have no order
        said, pod = (by_node,), preemption.pod
    parsed = parse_request(pod, resources=ResourceNames(), defaults=Policy())
    return (*said, parse_pod_ref(pod), parsed.request, parsed.is_disabled)


class Refusal(str):
    """The extender's reason to refuse a request."""

    __slots__ = ()


def read_or_refuse(kind: bytes, body: bytes) -> object:
    try:
        return read(kind, body)
    except WireError as error:
        return Refusal(error)


def compare(go: GoDecoder, kind: bytes, body: bytes) -> None:
    """Fail if Go and the extender read a request differently."""
    ours = read_or_refuse(kind, body)
    rewritten = go.rewrite(kind, body)
    if rewritten.error:
        assert isinstance(ours, Refusal) or UNREAD.search(rewritten.error), rewritten
        return
    theirs = read_or_refuse(kind, rewritten.body)
    if not isinstance(ours, Refusal):
        assert ours == theirs
    elif not isinstance(theirs, Refusal):
        assert STRICTER.search(ours), f"Go reads it: {ours}"


@given(body=go_bodies.args)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@example(body=b'{"NodeName\xc5\xbf":["a"]}')  # the letter long s
@example(body=b'{"nodenames":["a"],"NODENAMES":["b"]}')
@example(body=b'{"NodeNames":["a"],"NodeNames":null}')
@example(body=b'{"NodeNames":["a"]} {}')
@example(body=b'\xef\xbb\xbf{"NodeNames":["a"]}')  # a byte order mark
@example(body=b'{"Pod":null,"Nodes":null,"NodeNames":["a\x00"]}')
@example(body=b'{"Pod":{"spec":{"overhead":{"cpu":" 1"}}}}')
@example(body=b"[]")
@example(body=b"null")
@example(body=b"")
def test_filter_and_prioritize_are_read_as_go_reads_them(go: GoDecoder, body: bytes) -> None:
    compare(go, ARGS, body)


@given(body=go_bodies.preemption)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@example(body=b'{"NodeNameToMetaVictims":{"a":{"Pods":[{"uid":"1"}]}}}')
@example(body=b'{"NodeNameToMetaVictims":{"a":{"Pods":[],"NumPDBViolations":1.0}}}')
@example(
    body=b'{"NodeNameToMetaVictims":{"a":{}},"NodeNameToVictims":{"a":{"NumPDBViolations":true}}}'
)
def test_preempt_is_read_as_go_reads_it(go: GoDecoder, body: bytes) -> None:
    compare(go, PREEMPTION_ARGS, body)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_requests_of_kube_scheduler_are_decoded_as_go_does(go: GoDecoder, path: Path) -> None:
    kind = PREEMPTION_ARGS if path.stem.startswith("preempt") else ARGS
    body = path.read_bytes()

    assert read(kind, body) == read(kind, go.rewrite(kind, body).body)


def test_duplicate_keys_take_the_last_object(go: GoDecoder) -> None:
    # kube-scheduler writes each key once, so merging would be useless.
    body = b'{"Pod":{"metadata":{"name":"a","uid":"1"}},"Pod":{"metadata":{"name":"b"}}}'

    ours, theirs = wire.decode_request(body), wire.decode_request(go.rewrite(ARGS, body).body)

    assert (ours.about.name, ours.about.uid) == ("b", "")
    assert (theirs.about.name, theirs.about.uid) == ("b", "1")
