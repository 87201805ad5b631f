"""Messages between replicas."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.effects.peer_wire import (
    MAX_RECORDS,
    VERSION,
    PeerError,
    decode_message,
    decode_receipt,
    encode_message,
    encode_receipt,
    fits_message,
    requests_in,
)
from extender.placement.request_log import AnsweredRequest

NAMES = st.text(st.characters(codec="utf-8"), max_size=40)


@st.composite
def answered_requests(draw: st.DrawFn) -> AnsweredRequest:
    return AnsweredRequest(
        verb=draw(st.sampled_from(("filter", "prioritize"))),
        uid=draw(NAMES.filter(bool)),
        key=draw(NAMES),
        at=draw(st.floats(900, 1000)),
        choices=draw(st.integers(0, 5000)),
        is_lost=draw(st.booleans()),
        node=draw(NAMES),
        resources=tuple(draw(st.dictionaries(NAMES, st.integers(1, 16), max_size=3)).items()),
        memory_bytes=draw(st.none() | st.integers(0, 1 << 40)),
    )


@given(st.lists(answered_requests(), max_size=5))
def test_records_keep_their_values_on_another_clock(sent: list[AnsweredRequest]) -> None:
    body = encode_message("a", sent, to="b", gap_at=700.0, mark=5.0, now=1000.0)
    message = decode_message(body)
    arrived = requests_in(message, sent_at=1000.0)

    assert all(map(fits_message, sent))
    assert [it.at for it in arrived] == pytest.approx([it.at for it in sent])
    assert [replace(it, at=0.0) for it in arrived] == [replace(it, at=0.0) for it in sent]
    assert (message.to, message.gap_at, message.mark) == ("b", 700.0, 5.0)
    assert message.sent_at == 1000.0


def message(**changes: Any) -> bytes:
    requested = {"verb": "filter", "uid": "u", "age_seconds": 1.0}
    return json.dumps(
        {"version": VERSION, "instance": "a", "asked": [{**requested, **changes}]}
    ).encode()


@pytest.mark.parametrize("faults", [None, [], ["apiserver/pods", "prometheus"]])
def test_a_message_has_the_faults_of_its_sender_or_none_if_not_ready(
    faults: list[str] | None,
) -> None:
    body = encode_message("a", [], to="", gap_at=0.0, mark=None, now=0.0, faults=faults)

    assert decode_message(body).faults == faults


def test_a_message_without_faults_counts_as_not_ready() -> None:
    assert decode_message(message()).faults is None  # as in an older release


def test_unknown_fields_are_ignored() -> None:
    (request,) = requests_in(decode_message(message(colour="red")), sent_at=10.0)

    assert (request.uid, request.at) == ("u", 9.0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(b"{", "truncated", id="not-json"),
        pytest.param(b"[]", "Expected `object`", id="a-list"),
        pytest.param(b"{}", "version", id="no-version"),
        pytest.param(b'{"version":2,"instance":"a"}', "$.version is 2, must be 1", id="version"),
        pytest.param(b'{"version":1}', "instance", id="no-instance"),
        pytest.param(message(verb="bind"), "$.asked[0].verb", id="verb"),
        pytest.param(message(uid=7), "$.asked[0].uid", id="uid-is-no-text"),
        pytest.param(message(uid=""), "$.asked[0].uid", id="no-uid"),
        pytest.param(message(uid="u" * 129), "$.asked[0].uid", id="long-uid"),
        pytest.param(message(age_seconds=-1), "$.asked[0].age_seconds", id="negative-age"),
        pytest.param(message(resources={"g": 0}), "$.asked[0].resources", id="no-devices"),
        pytest.param(
            message(resources={f"g{n}": 1 for n in range(17)}), "$.asked[0].resources", id="many"
        ),
        pytest.param(message(memory_bytes=-5), "$.asked[0].memory_bytes", id="negative-memory"),
        pytest.param(b"\xff" + message(), "", id="no-unicode"),
        pytest.param(b"[" * 100_000, "", id="deep"),
    ],
)
def test_bad_message_is_refused_with_the_place(body: bytes, words: str) -> None:
    with pytest.raises(PeerError, match="cannot read a message between replicas") as caught:
        decode_message(body)

    assert words in str(caught.value)


def test_message_with_too_many_records_is_refused() -> None:
    one = json.loads(message())
    one["asked"] *= MAX_RECORDS + 1

    with pytest.raises(PeerError, match=r"length <= 500.*\$\.asked"):
        decode_message(json.dumps(one).encode())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"uid": ""}, id="no-uid"),
        pytest.param({"uid": "u" * 129}, id="uid"),
        pytest.param({"key": "k" * 385}, id="key"),
        pytest.param({"node": "n" * 321}, id="node"),
        pytest.param({"resources": (("r" * 321, 1),)}, id="resource"),
        pytest.param({"resources": tuple((str(n), 1) for n in range(17))}, id="resources"),
    ],
)
def test_a_record_that_others_would_refuse_is_not_sent(changes: dict[str, Any]) -> None:
    record = {"verb": "filter", "uid": "u", "key": "k", "at": 0.0, "choices": 1}
    values: dict[str, Any] = record | changes

    assert not fits_message(AnsweredRequest(**values))


def test_receipt_has_the_replica_and_the_time() -> None:
    receipt = decode_receipt(encode_receipt("b", 7.0))

    assert (receipt.instance, receipt.mark) == ("b", 7.0)
    assert decode_receipt(b'{"version":1,"instance":"b"}').mark is None  # of an older release
    with pytest.raises(PeerError, match="cannot read a replica's answer"):
        decode_receipt(b"<html>")
