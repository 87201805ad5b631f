import json
import re
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.node_names import NamesAt
from extender.runtime.decoding import _MOST_VALUES
from extender.webhook import wire
from extender.webhook.go_json import WireError

ARGS = {"Pod": None, "Nodes": None, "NodeNames": None}
NAMED = b'{"metadata":{"name":"p"}}'


def decode(document: object) -> wire.ExtenderRequest:
    return wire.decode_request(json.dumps(document).encode())


def victims(document: object) -> tuple[wire.PreemptionCandidate, ...]:
    return wire.decode_preemption(json.dumps(document).encode()).candidates


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "names", "pod"),
    [
        (b'{"Pod":%b,"Nodes":null,"NodeNames":["b","a"]}' % NAMED, ["b", "a"], "p"),
        (b'{"Pod":%b,"NodeNames":["c"],"NodeNames":["b"]}' % NAMED, ["b"], "p"),
        (b'{"Pod":%b,"NodeNames":["a"],"NODENAMES":["b"]}' % NAMED, ["b"], "p"),
        (b'{"Pod":%b,"NodeNames":["\\u0061"]}' % NAMED, ["a"], "p"),
        (b'{"NodeNames":["a"],"Pod":{"metadata":{"name":"p"},"NodeNames":["b"]}}', ["a"], "p"),
        (
            b'{"Pod":{"metadata":{"name":",\\"NodeNames\\":[\\"x\\"]}"}},"NodeNames":["b"]}',
            ["b"],
            ',"NodeNames":["x"]}',
        ),
    ],
    ids=["as-go-writes-it", "twice", "twice-in-another-case", "escaped", "nested", "in-a-string"],
)
def test_decoded_names_equal_those_of_the_request(body: bytes, names: list[str], pod: str) -> None:
    request = wire.decode_request(body)

    assert list(request.nodes) == names
    assert isinstance(request.pod, dict)
    metadata = request.pod["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["name"] == pod


NODES = [f"gpu-node-{number:05}" for number in range(2000)]
ROLL = NodeIndex(NODES, {})


def test_indexed_names_are_decoded_to_numbers() -> None:
    body = b'{"Pod":%b,"Nodes":null,"NodeNames":%b}' % (NAMED, json.dumps(NODES[::-1]).encode())
    body = body.replace(b", ", b",")

    request, without = wire.decode_request(body, ROLL), wire.decode_request(body)

    assert isinstance(request.nodes, NamesAt)
    assert list(request.nodes) == list(without.nodes) == NODES[::-1]
    assert request.pod == without.pod


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([*NODES, "unknown"], [*NODES, "unknown"]),
        ([*NODES, NODES[0]], NODES),
        ([*NODES, None], [*NODES, ""]),
    ],
    ids=["unknown", "twice", "null"],
)
def test_partly_unknown_names_are_decoded_as_without_the_index(
    names: list[str | None], expected: list[str]
) -> None:
    body = json.dumps({"Pod": None, "NodeNames": names}, separators=(",", ":")).encode()

    assert list(wire.decode_request(body, ROLL).nodes) == expected
    assert list(wire.decode_request(body).nodes) == expected


def test_whole_nodes_are_decoded_without_names() -> None:
    body = b'{"Pod":null,"Nodes":{"items":[{"metadata":{"name":"a"}}]},"NodeNames":[]}'

    request = wire.decode_request(body, ROLL)

    assert list(request.nodes) == ["a"]
    assert request.node_objects is not None


@pytest.mark.parametrize("end", [b'"', b"7", b'"a" "b"', b'"a",'])
def test_a_malformed_list_of_indexed_names_is_refused(end: bytes) -> None:
    inner = b",".join(b'"%b"' % name.encode() for name in NODES)
    body = b'{"Pod":null,"NodeNames":[%b,%b]}' % (inner, end)

    for node_index in (ROLL, NodeIndex((), {})):
        with pytest.raises(WireError, match=r"NodeNames|not JSON"):
            wire.decode_request(body, node_index)


@pytest.mark.parametrize(
    "body",
    [b',"NodeNames":["a"]}', b'{"Pod":{,"NodeNames":["a"]}', b'{"Pod":{"x":[,"NodeNames":["a"]}'],
)
def test_malformed_fields_before_the_names_are_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="not JSON"):
        wire.decode_request(body)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({}, id="nothing-at-all"),
        pytest.param(ARGS, id="everything-null"),
        pytest.param({"NodeNames": []}, id="no-names"),
        pytest.param({"Pod": {}, "NodeNames": [], "Nodes": None}, id="empty-pod"),
        pytest.param({"Unknown": {"a": [1]}, "NodeNames": None}, id="unknown-key"),
    ],
)
def test_a_request_without_candidates_has_no_names(document: object) -> None:
    request = decode(document)

    assert request.nodes == ()
    assert request.node_objects is None


@pytest.mark.parametrize(
    "node_list", [{}, {"items": None}, {"items": []}, {"metadata": {}, "Items": []}]
)
def test_an_empty_node_list_keeps_the_form_of_whole_nodes(node_list: object) -> None:
    request = decode({"Nodes": node_list})

    assert request.nodes == ()
    assert request.node_objects == ()


@pytest.mark.parametrize("key", ["NodeNames", "nodenames", "NODENAMES", "NodeName\u017f"])
def test_keys_are_matched_in_any_case(key: str) -> None:
    assert decode({key: ["b", "a"]}).nodes == ("b", "a")


@pytest.mark.parametrize(
    "document",
    [
        {"nodes": {"ITEMS": [{"METADATA": {"Name": "a"}}]}},
        {"NODES": {"Items": [{"Metadata": {"NAME": "a"}}]}},
        {"Nodes": {"items": [{"metadata": {"name": "a"}}]}, "NodeNames": []},
    ],
)
def test_whole_nodes_are_found_in_any_case(document: object) -> None:
    assert decode(document).nodes == ("a",)


def test_field_names_are_case_insensitive_but_annotation_keys_are_not() -> None:
    pod = {
        "Metadata": {"NAME": "a", "Annotations": {"X/Y": "Z"}},
        "SPEC": {
            "Containers": [{"Resources": {"LIMITS": {"nvidia.com/GPU": 1}}}, None],
            "initcontainers": [{"RestartPolicy": "Always"}],
            "RESOURCES": {"Limits": {"CPU": 1}},
        },
        "status": {"nominatednodename": "n"},
    }

    assert decode({"POD": pod}).pod == {
        "metadata": {"name": "a", "annotations": {"X/Y": "Z"}},
        "spec": {
            "containers": [{"resources": {"limits": {"nvidia.com/GPU": 1}}}, None],
            "initContainers": [{"restartPolicy": "Always"}],
            "resources": {"limits": {"CPU": 1}},
        },
        "status": {"nominatedNodeName": "n"},
    }


def test_a_repeated_node_counts_once() -> None:
    assert decode({"NodeNames": ["b", "a", "b"]}).nodes == ("b", "a")

    nodes = [{"metadata": {"name": name, "uid": str(at)}} for at, name in enumerate("bab")]
    request = decode({"Nodes": {"items": nodes}})

    assert request.nodes == ("b", "a")
    assert request.node_objects is not None
    assert [json.loads(bytes(node))["metadata"]["uid"] for node in request.node_objects] == [
        "0",
        "1",
    ]


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({"NodeNames": [None, "a"]}, id="null-name"),
        pytest.param({"NodeNames": ["", "a"]}, id="empty-name"),
        pytest.param({"Nodes": {"items": [None, {"metadata": {"name": "a"}}]}}, id="null-node"),
        pytest.param({"Nodes": {"items": [{}, {"metadata": {"name": "a"}}]}}, id="empty-node"),
        pytest.param(
            {"Nodes": {"items": [{"metadata": {"name": None}}, {"metadata": {"name": "a"}}]}},
            id="node-with-null-name",
        ),
    ],
)
def test_a_node_without_a_name_has_the_empty_name_as_in_go(document: object) -> None:
    assert decode(document).nodes == ("", "a")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b"", "$ is not JSON", id="empty"),
        pytest.param(b"{", "$ is not JSON", id="truncated"),
        pytest.param(b'{"NodeNames":["a"', "$ is not JSON", id="truncated-list"),
        pytest.param(b'{"NodeNames":["a"]} {}', "$ is not JSON", id="trailing"),
        pytest.param(b'{"Pod":NaN}', "$ is not JSON", id="NaN"),
        pytest.param(b"\xef\xbb\xbf{}", "$ is not JSON", id="byte-order-mark"),
        pytest.param(b"[]", "$ is a list, must be an object", id="list"),
        pytest.param(b"null", "$ is null, must be an object", id="null"),
        pytest.param(b'"%s"', '$ is "%s", must be an object', id="text"),
        pytest.param(b'{"Pod":[1]}', "$.Pod is a list, must be an object or null", id="pod"),
        pytest.param(
            b'{"Pod":{"a":"%s"}}' % (b"x" * wire._MOST_POD_BYTES),
            "$.Pod is an object, must be at most 4194304 bytes",
            id="a pod larger than the API server takes",
        ),
        pytest.param(b'{"Nodes":[{}]}', "$.Nodes is a list", id="nodes-as-list"),
        pytest.param(b'{"Nodes":7,"NodeNames":["a"]}', "$.Nodes is 7", id="nodes-beside-names"),
        pytest.param(b'{"Nodes":{"items":{}}}', "$.Nodes.items is an object", id="items"),
        pytest.param(b'{"Nodes":{"items":[7]}}', "$.Nodes.items[0] is 7", id="node"),
        pytest.param(
            b'{"Nodes":{"items":[{"metadata":{"name":7}}]}}',
            "$.Nodes.items[0].metadata.name is 7, must be a string",
            id="node-name",
        ),
        pytest.param(
            b'{"NodeNames":{"a":1}}', "$.NodeNames is an object, must be a list", id="names"
        ),
        pytest.param(
            b'{"NodeNames":["a",{"b":"c"}]}',
            "$.NodeNames[1] is an object, must be a string",
            id="name",
        ),
        pytest.param(b'{"NodeNames":["\xff"]}', "$ is not UTF-8", id="not-utf-8"),
        pytest.param(b'{"NodeNames":["\\ud800"]}', "is not JSON", id="half-a-surrogate"),
        pytest.param(
            b'{"Pod":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply", id="deep"
        ),
        pytest.param(
            b'{"NodeNames":["a",' + b"1" * 5000 + b"]}", f"is {'1' * 80}..., must", id="huge"
        ),
    ],
)
def test_the_error_of_a_malformed_request_names_the_place(body: bytes, message: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_request(body)

    assert str(caught.value).startswith("cannot read ExtenderArgs: $")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250


def of_pod(**spec: object) -> bytes:
    return json.dumps({"Pod": {"spec": spec}, "NodeNames": ["a"]}).encode()


def of_victims(victims: object) -> bytes:
    return json.dumps({"NodeNameToMetaVictims": victims}).encode()


KNOWN = [f"node-{number:04}" for number in range(1000)]
MANY = {str(number): "1" for number in range(1001)}


@pytest.mark.parametrize(
    ("decode_any", "body", "message"),
    [
        pytest.param(
            wire.decode_request,
            json.dumps({"Nodes": {"items": [{}] * 20_001}}).encode(),
            "$.Nodes.items has 20001 entries, must be at most 20000",
            id="nodes",
        ),
        pytest.param(
            wire.decode_request,
            json.dumps({"NodeNames": ["a"] * 20_001}).encode(),
            "$.NodeNames has 20001 entries",
            id="names",
        ),
        pytest.param(
            wire.decode_request,
            json.dumps({"Pod": {}, "NodeNames": [None] * 20_001}).encode(),
            "$.NodeNames has 20001 entries",
            id="null-names",
        ),
        pytest.param(
            wire.decode_request,
            msgspec.json.encode({"Pod": {}, "NodeNames": [str(at) for at in range(20_001)]}),
            "$.NodeNames has 20001 entries",
            id="names-as-go-writes-them",
        ),
        pytest.param(
            wire.decode_request,
            msgspec.json.encode({"Pod": {}, "NodeNames": ["a", "n" * 1025]}),
            "$.NodeNames has a name of 1025 bytes, must be at most 1024",
            id="long-name",
        ),
        pytest.param(
            partial(wire.decode_request, node_index=NodeIndex(KNOWN, {})),
            msgspec.json.encode({"Pod": {}, "NodeNames": [*KNOWN, "n" * 1023]}),
            "$.NodeNames has a name of 1025 bytes, must be at most 1024",
            id="long-name-among-known-ones",
        ),
        pytest.param(
            wire.decode_request,
            json.dumps({"Pod": {}, "NODENAMES": ["n" * 1025]}).encode(),
            "$.NodeNames has a name of 1025 bytes",
            id="long-name-in-another-case",
        ),
        pytest.param(
            wire.decode_request,
            json.dumps({"Nodes": {"items": [{"metadata": {"name": "n" * 1025}}]}}).encode(),
            "$.Nodes.items has a name of 1025 bytes",
            id="long-name-of-an-object",
        ),
        pytest.param(
            wire.decode_request, json.dumps(MANY).encode(), "an object of 1001 fields", id="fields"
        ),
        pytest.param(
            wire.decode_request,
            of_pod(containers=[{}] * 501, initContainers=[{}] * 500),
            "$.Pod has 1001 containers: must be at most 1000",
            id="containers",
        ),
        pytest.param(
            wire.decode_request,
            of_pod(Containers=[{}] * 1001),
            "a list of 1001 items: must be at most 1000",
            id="containers-in-another-case",
        ),
        pytest.param(
            wire.decode_request, of_pod(**MANY), "an object of 1001 fields", id="fields-of-a-pod"
        ),
        pytest.param(
            wire.decode_request,
            of_pod(containers=[{"resources": {"limits": MANY}}] * 5),
            "$.Pod has 5005 limits and requests: must be at most 5000",
            id="quantities",
        ),
        pytest.param(
            wire.decode_preemption,
            of_victims({str(at): {} for at in range(20_001)}),
            "$.NodeNameToMetaVictims has 20001 entries",
            id="candidates",
        ),
        pytest.param(
            wire.decode_preemption,
            of_victims({"a": {"Pods": [{"UID": "1"}] * 20_000}, "b": {"Pods": [{}] * 10_001}}),
            "$.NodeNameToMetaVictims['b'].Pods has 10001 entries, must be at most 10000",
            id="victims-of-all-candidates",
        ),
    ],
)
def test_a_request_with_more_nodes_than_any_cluster_is_refused(
    decode_any: Callable[[bytes], object], body: bytes, message: str
) -> None:
    with pytest.raises(WireError, match=re.escape(message)):
        decode_any(body)


@pytest.mark.parametrize("value", [b"{}", b"[]", b"0", b'""', b"null"])
@pytest.mark.parametrize(
    ("decode_any", "form"),
    [
        pytest.param(wire.decode_request, b'{"Nodes":{"items":[%b]}}', id="nodes"),
        pytest.param(wire.decode_request, b'{"Pod":{},"NodeNames":[%b]}', id="names"),
        pytest.param(wire.decode_request, b'{"Pod":{"spec":[%b]}}', id="pod"),
        pytest.param(
            wire.decode_preemption, b'{"NodeNameToMetaVictims":{"a":{"Pods":[%b]}}}', id="victims"
        ),
    ],
)
def test_a_request_with_too_many_values_is_not_decoded(
    decode_any: Callable[[bytes], object], form: bytes, value: bytes
) -> None:
    body = form % b",".join([value] * 2 * _MOST_VALUES)

    with pytest.raises(WireError, match=r"\$ has (399999|400000) commas, must be at most 2\d{5}"):
        decode_any(body)


def test_requests_may_be_larger_in_a_larger_cluster() -> None:
    body = json.dumps({"Nodes": {"items": [{"metadata": {"name": "a"}}] * 20_001}}).encode()

    assert wire.decode_request(body, known=10_001).nodes == ("a",)
    with pytest.raises(WireError, match="must be at most 20000"):
        wire.decode_request(body, known=10_000)


# --- preemption -----------------------------------------------------------------------------------


META = {"a": {"Pods": [{"UID": "1"}, {"UID": "2"}], "NumPDBViolations": 3}}


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({"NodeNameToMetaVictims": META}, id="by-uid"),
        pytest.param({"NodeNameToMetaVictims": META, "NodeNameToVictims": None}, id="other-null"),
        pytest.param({"NodeNameToMetaVictims": {}, "NodeNameToVictims": META}, id="other-empty"),
        pytest.param(
            {
                "nodenametometavictims": {
                    "a": {"pods": [{"uid": "1"}, {"Uid": "2"}], "numpdbviolations": 3}
                }
            },
            id="lower-case",
        ),
        pytest.param(
            {
                "NodeNameToVictims": {
                    "a": {
                        "Pods": [{"metadata": {"uid": "1"}}, {"Metadata": {"UID": "2"}}],
                        "NumPDBViolations": 3,
                    }
                }
            },
            id="whole-pods",
        ),
    ],
)
def test_victims_are_returned_unchanged(document: object) -> None:
    candidates = victims(document)

    assert json.loads(wire.encode_preemption(candidates)) == {"NodeNameToMetaVictims": META}


@pytest.mark.parametrize(
    "document", [{}, {"NodeNameToMetaVictims": None}, {"NodeNameToVictims": {}}, {"Pod": None}]
)
def test_a_request_without_victims_has_no_candidates(document: object) -> None:
    assert victims(document) == ()


@pytest.mark.parametrize(
    "value", [None, {}, {"Pods": None}, {"Pods": [], "NumPDBViolations": None}]
)
def test_a_candidate_may_have_no_victims(value: object) -> None:
    (candidate,) = victims({"NodeNameToMetaVictims": {"a": value}})

    assert candidate == wire.PreemptionCandidate(node="a", uids=(), pdb_violations=0)


@pytest.mark.parametrize("count", [-1, 0, 2**63 - 1])
def test_violations_are_returned_unchanged(count: int) -> None:
    document = {"NodeNameToMetaVictims": {"a": {"Pods": [], "NumPDBViolations": count}}}

    assert victims(document)[0].pdb_violations == count


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param([], "[\"'a'\"] is a list", id="list"),
        pytest.param({"Pods": {}}, ".Pods is an object, must be a list or null", id="pods"),
        pytest.param({"Pods": [7]}, ".Pods[0] is 7, must be an object", id="pod"),
        pytest.param({"Pods": [None]}, ".Pods[0] has no UID", id="null-pod"),
        pytest.param({"Pods": [{"UID": ""}]}, ".Pods[0] has no UID", id="empty-uid"),
        pytest.param({"Pods": [{"UID": 7}]}, ".Pods[0].UID is 7, must be a string", id="uid"),
        pytest.param({"NumPDBViolations": True}, "NumPDBViolations is true, must", id="boolean"),
        pytest.param({"NumPDBViolations": 1.5}, "NumPDBViolations is 1.5, must", id="fraction"),
        pytest.param({"NumPDBViolations": 2**63}, "must be a whole number", id="too-big"),
        pytest.param({"NumPDBViolations": "1"}, 'is "1", must be a whole number', id="text"),
    ],
)
def test_the_error_of_malformed_victims_names_the_place(value: object, message: str) -> None:
    with pytest.raises(WireError) as caught:
        victims({"NodeNameToMetaVictims": {"a": value}})

    assert str(caught.value).startswith("cannot read ExtenderPreemptionArgs: $.NodeNameTo")
    assert message.replace("[\"'a'\"]", "['a']") in str(caught.value)


# --- random input ---------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["Pod", "metadata", "name", "uid", "UID", "Pods", "items", "spec", ""]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)
ALMOST = st.dictionaries(
    st.sampled_from(
        ["Pod", "Nodes", "nodes", "NodeNames", "NodeNameToVictims", "NodeNameToMetaVictims"]
    ),
    ANYTHING,
    max_size=4,
)


@given(ANYTHING | ALMOST)
def test_any_json_is_decoded_or_refused(document: object) -> None:
    body = msgspec.json.encode(document)

    try:
        request = wire.decode_request(body)
    except WireError:
        pass
    else:
        answer = json.loads(wire.encode_filter(request, None))
        kept = answer["NodeNames"] if request.node_objects is None else answer["Nodes"]["items"]
        assert len(kept) == len(request.nodes)
    try:
        preemption = wire.decode_preemption(body)
    except WireError:
        return
    assert json.loads(wire.encode_preemption(preemption.candidates)).keys() == {
        "NodeNameToMetaVictims"
    }


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    for decode_any in (wire.decode_request, wire.decode_preemption):
        try:
            decode_any(body)
        except WireError as error:
            assert str(error).startswith("cannot read Extender")  # noqa: PT017 - both ways are right
