"""Node selection of hypothetical pods, of any length."""

import io
from dataclasses import replace
from typing import Any

import pytest

from extender.core.nodes.inventory import NodeRecord, Taint, may_go, selects
from extender.core.nodes.pod_groups import likeness_of
from extender.insight.what_if import _MOST_REQUIREMENTS, _read_requested_selection
from testkit.others import SeesTeam
from testkit.webhook_requests import MakeClient
from testkit.world import World

MANY = 1000
NODE = NodeRecord(name="n", labels={"zone": "a"})
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

REQUIREMENT = {"key": "zone", "operator": "In", "values": ["b"]}

GIB = 1 << 30


def affinity(*keys: str) -> dict[str, object]:
    expressions = [{"key": key, "operator": "Exists"} for key in keys]
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": expressions}]}}}


def of_terms(terms: list[dict[str, object]]) -> dict[str, object]:
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}


def test_very_many_requirements_are_not_evaluated() -> None:
    selector = {f"label-{at}": "x" for at in range(MANY)}
    exists = affinity(*selector)

    by_selector = _read_requested_selection({"spec": {"nodeSelector": selector}})
    by_affinity = _read_requested_selection({"spec": {"affinity": exists}})
    just = _read_requested_selection(
        {"spec": {"affinity": affinity(*list(selector)[:_MOST_REQUIREMENTS])}}
    )

    assert by_selector.not_checked == ("nodeSelector", "quotas")
    assert by_affinity.not_checked == ("affinity", "quotas")
    assert selects(by_selector.selection, NODE)
    assert selects(by_affinity.selection, NODE)
    assert just.not_checked == ("quotas",)
    assert not selects(just.selection, NODE)


def test_tolerations_are_judged_however_many_they_are() -> None:
    tolerations = [{"key": f"other-{at}"} for at in range(MANY)]

    assert (
        len(_read_requested_selection({"spec": {"tolerations": tolerations}}).selection.tolerations)
        == MANY
    )


@pytest.mark.parametrize(
    ("spec", "unjudged"),
    [
        pytest.param({"nodeSelector": {str(at): "x" for at in range(1001)}}, "nodeSelector"),
        pytest.param({"tolerations": [{}] * 1001}, "tolerations"),
        pytest.param({"affinity": of_terms([{}] * 1001)}, "affinity", id="terms"),
        pytest.param(
            {"affinity": of_terms([{"matchFields": [REQUIREMENT] * 500}])}, "affinity", id="fields"
        ),
        pytest.param(
            {
                "affinity": of_terms(
                    [{"matchExpressions": [{**REQUIREMENT, "values": ["b"] * 999}]}]
                )
            },
            "affinity",
            id="values",
        ),
    ],
)
def test_a_selection_beyond_the_size_limit_is_not_evaluated(
    spec: dict[str, object], unjudged: str
) -> None:
    requested = _read_requested_selection({"spec": spec})

    assert requested.not_checked == (unjudged, "quotas")
    assert may_go(requested.selection, replace(NODE, taints=(Taint(key="any"),)))


def test_a_term_of_just_as_many_values_as_are_read_is_judged() -> None:
    values = ["b"] * 998
    requested = _read_requested_selection(
        {
            "spec": {
                "affinity": of_terms([{"matchExpressions": [{**REQUIREMENT, "values": values}]}])
            }
        }
    )

    assert requested.not_checked == ("quotas",)
    assert not selects(requested.selection, NODE)


def test_labels_that_are_not_kept_are_not_judged() -> None:
    feature = "feature.node.kubernetes.io/system-os_release.ID"

    assert _read_requested_selection(
        {"spec": {"nodeSelector": {feature: "a", "zone": "a"}}}
    ).not_checked == (f"nodeSelector {feature}", "quotas")
    assert _read_requested_selection({"spec": {"affinity": affinity(feature)}}).not_checked == (
        "affinity",
        "quotas",
    )


def test_required_node_affinity_is_judged_and_the_rest_of_affinity_is_not() -> None:
    known = affinity("zone")
    others: list[dict[str, object]] = [
        {**known, "podAntiAffinity": {}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    ]

    assert _read_requested_selection({"spec": {"affinity": known}}).not_checked == ("quotas",)
    for other in others:
        assert _read_requested_selection({"spec": {"affinity": other}}).not_checked == (
            "affinity",
            "quotas",
        )


def requested(image: str, namespace: str = "team") -> dict[str, Any]:
    return {"metadata": {"namespace": namespace}, "spec": {"containers": [{"image": image}]}}


@pytest.fixture
def measured() -> World:
    """Return a world with measurements of two pods of a Deployment."""
    world = World()
    world.add_node("node")
    for namespace in ("team", "hidden"):
        for number, used in enumerate((5 * GIB, 9 * GIB)):
            record = replace(
                world.fleet.pods[world.add_pod(f"chat-{number}", "node")],
                namespace=namespace,
                owner="Deployment chat",
                likeness=likeness_of(requested("team/chat", namespace)),
            )
            world.fleet._allocations.similar_pods.note(record, used)
    return world


@pytest.mark.parametrize(
    ("query", "pod", "by"),
    [
        ("?owner=Deployment%20chat", requested("other"), "owner"),
        ("", requested("team/chat"), "images"),
        ("?owner=Deployment%20new", requested("team/chat"), "images"),
    ],
)
async def test_the_most_similar_pods_are_reported(
    measured: World, aiohttp_client: MakeClient, query: str, pod: dict[str, Any], by: str
) -> None:
    client = await aiohttp_client(measured.build_app())

    answer = await (await client.post(f"/v1/size{query}", json=pod)).json()

    assert answer == {
        "measured": {"by": by, "pods": 2, "memory_bytes": 9 * GIB, "least_bytes": 5 * GIB}
    }


@pytest.mark.parametrize("pod", [requested("new"), requested("team/chat", "hidden")])
async def test_size_uses_only_pods_that_the_caller_may_read(
    measured: World, aiohttp_client: MakeClient, pod: dict[str, Any]
) -> None:
    client = await aiohttp_client(measured.build_app(viewer=SeesTeam()))

    response = await client.post("/v1/size", json=pod)

    assert (response.status, await response.json()) == (200, {"measured": None})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 5000, b"{}", b'{"spec": []}', b" " * (1 + (1 << 20))]
)
async def test_a_body_that_is_no_pod_is_refused(
    measured: World, aiohttp_client: MakeClient, body: bytes
) -> None:
    client = await aiohttp_client(measured.build_app())

    assert (await client.post("/v1/size", data=io.BytesIO(body))).status in {400, 413}
