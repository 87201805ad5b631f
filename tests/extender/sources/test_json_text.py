"""The filter skips only pods without GPUs, and other pods are parsed unchanged."""

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.request.gpu_resources import ResourceNames
from extender.kube.client import KubeError
from extender.sources.kubernetes.json_text import PodFilter, read_object, read_page
from extender.sources.kubernetes.records import reduce_exporter, reduce_pod

WORDS = ("dcgm-exporter",)
POD_FILTER = PodFilter(ResourceNames(), WORDS)


def pod(**parts: object) -> dict[str, object]:
    return {"metadata": {"uid": "u", "name": "p", "resourceVersion": "7"}, **parts}


def asking(resource: str, kind: str = "limits", where: str = "containers") -> dict[str, object]:
    containers = [{"name": "side"}, {"name": "main", "resources": {kind: {resource: "1"}}}]
    return pod(spec={where: containers})


def text(value: object) -> msgspec.Raw:
    return msgspec.Raw(orjson.dumps(value))


MATTERS = [
    asking("nvidia.com/gpu"),
    asking("nvidia.com/mig-1g.5gb", "requests"),
    asking("nvidia.com/gpu.shared", where="initContainers"),
    pod(spec={"resourceClaims": [{"name": "gpu"}]}),
    pod(status={"extendedResourceClaimStatus": {"requestMappings": []}}),
    {"metadata": {"uid": "u", "name": "nvidia-dcgm-exporter-x"}},
    {"metadata": {"uid": "u", "name": "x", "labels": {"app": "my-dcgm-exporter"}}},
    {"metadata": {"uid": "u", "labels": {"app.kubernetes.io/name": "dcgm-exporter"}}},
]

DOES_NOT = [
    pod(),
    pod(spec={"containers": [{"resources": {"limits": {"cpu": "1"}}}]}, status={}),
    pod(spec={"containers": None, "initContainers": None, "resourceClaims": None}),
    pod(spec={"resourceClaims": []}),
    asking("amd.com/gpu"),
    {"metadata": {"uid": "u", "name": "x", "labels": {"team": "dcgm-exporter"}}},
]

ODD: list[Any] = [
    [],
    None,
    pod(spec={"containers": "none"}),
    pod(spec={"containers": [7]}),
    {"metadata": {"uid": 7}},
    {"metadata": {"labels": {"app": 7}}},
]


@pytest.mark.parametrize("value", [*MATTERS, *ODD], ids=str)
def test_a_relevant_pod_is_parsed(value: object) -> None:
    event = orjson.dumps({"type": "ADDED", "object": value})

    assert POD_FILTER.is_relevant(text(value))
    assert POD_FILTER.irrelevant_change(event) is None


@pytest.mark.parametrize("value", DOES_NOT, ids=str)
def test_a_pod_without_gpus_is_skipped(value: object) -> None:
    assert not POD_FILTER.is_relevant(text(value))


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
def test_an_event_of_an_irrelevant_pod_has_its_version(kind: str) -> None:
    change = POD_FILTER.irrelevant_change(orjson.dumps({"type": kind, "object": pod()}))

    assert change is not None
    assert (change.uid, change.version) == ("u", "7")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BOOKMARK", "object": pod()},
        {"type": "ERROR", "object": {"code": 410}},
        {"type": "ADDED", "object": {"metadata": {"uid": "u"}}},
        {"object": pod()},
        {},
        [],
    ],
    ids=str,
)
def test_other_events_are_parsed(event: object) -> None:
    assert POD_FILTER.irrelevant_change(orjson.dumps(event)) is None
    assert POD_FILTER.irrelevant_change(b'{"type":"ADDED","obj') is None


def test_escaped_names_are_understood() -> None:
    escaped = orjson.dumps(asking("nvidia.com/gpu")).replace(b"nvidia", b"\\u006evidia")

    assert POD_FILTER.is_relevant(msgspec.Raw(escaped.replace(b"/", b"\\/")))


names = st.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "cpu", "amd.com/gpu", ""])
quantities = st.dictionaries(names, st.sampled_from(["1", "0", 2, None]), max_size=2)
containers = st.lists(
    st.fixed_dictionaries(
        {}, optional={"resources": st.fixed_dictionaries({}, optional={"limits": quantities})}
    ),
    max_size=2,
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "containers": containers,
        "initContainers": containers,
        "resourceClaims": st.lists(st.just({"name": "a"}), max_size=1),
        "nodeName": st.just("n"),
    },
)
metadata = st.fixed_dictionaries(
    {"uid": st.just("u"), "name": st.sampled_from(["web", "nvidia-dcgm-exporter-a"])},
    optional={"labels": st.dictionaries(st.just("app"), st.sampled_from(["a", "dcgm-exporter"]))},
)


@given(st.fixed_dictionaries({"metadata": metadata, "spec": specs}))
def test_a_pod_with_a_record_is_never_skipped(value: dict[str, object]) -> None:
    has_record = reduce_pod(value, ResourceNames(), early_seconds=60.0) is not None
    has_record |= reduce_exporter(value, WORDS) is not None

    assert POD_FILTER.is_relevant(text(value)) or not has_record


def test_objects_of_a_page_stay_text() -> None:
    body = orjson.dumps(
        {
            "kind": "PodList",
            "metadata": {"resourceVersion": "9", "continue": "more", "remainingItemCount": 1},
            "items": [{"a": 1}, None],
        }
    )

    page = read_page(body, "list pods")

    assert (page.version, page.token) == ("9", "more")
    assert [dict(read_object(item, "list pods")) for item in page.items] == [{"a": 1}, {}]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b'{"kind":"PodList","items":[]}', "not a list with a resourceVersion"),
        (b'{"kind":"Pod","metadata":{"resourceVersion":"9"}}', "not a list with a resourceVersion"),
        (
            b'{"kind":"PodList","metadata":{"resourceVersion":9}}',
            "not a list with a resourceVersion",
        ),
        (b"<html>", "not JSON"),
        (b"[]", "not a JSON object"),
    ],
)
def test_anything_but_a_list_is_refused(body: bytes, cause: str) -> None:
    with pytest.raises(KubeError, match=f"cannot list pods: .*{cause}"):
        read_page(body, "list pods")
