"""Explanations of a pod's placement, and of a hypothetical pod."""

import json
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest

from extender.core.decision.scoring import Breakdown, Factor, ScorePart
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import PodRecord, Taint
from extender.core.nodes.node_selection import Selection
from extender.insight.what_if import _NOT_SELECTED, TAINTED, why_closed
from testkit.api_requests import decide, get, strict
from testkit.builders import GPU
from testkit.cards import BUSY, IDLE, Gpu
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient, names_request, pod
from testkit.world import MESSAGE, SHARED, World


@pytest.fixture
def world() -> World:
    world = World()
    cards = {"idle": [IDLE, IDLE], "half": [IDLE, BUSY], "busy": [BUSY], "dead": [Gpu(xid=79.0)]}
    world.register_node("busy", gpus=1)
    world.add_pod("tenant", "busy")
    world.add(cards)
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


async def call(client: Client, verb: str, *nodes: str, **wishes: Any) -> None:
    request = names_request(*nodes, requester=pod(**wishes))
    assert (await client.post(f"/{verb}", data=json.dumps(request))).status == 200


async def foresee(client: Client, body: object, status: int = 200) -> Any:
    data = BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    response = await client.post("/v1/explain", data=data)
    text = await response.text()
    assert response.status == status, text
    return strict(text)


def total(node: Any) -> float:
    return Breakdown(
        parts=tuple(ScorePart(**part) for part in node["parts"]),
        factors=tuple(Factor(**factor) for factor in node["factors"]),
    ).score


async def test_every_node_has_the_parts_of_its_score(world: World, client: Client) -> None:
    await call(client, "filter", "idle", "half", "busy", "dead", name="p")
    await call(client, "prioritize", "idle", "half", "busy", name="p")
    uid = world.add_pod("p", "idle")
    world.history.note_bound(uid, "idle")

    answer = await get(client, "/v1/explain", pod="team/p")

    assert (answer["state"], answer["bound_node"], answer["is_followed"]) == ("bound", "idle", True)
    assert [node["node"] for node in answer["nodes"]] == ["idle", "half", "busy", "dead"]
    assert [node["rank"] for node in answer["nodes"]] == [1, 2, 3, None]
    for node in answer["nodes"]:
        assert total(node) == pytest.approx(node["score"], abs=1e-9)
    assert answer["nodes"][0]["is_bound"] is True
    assert answer["nodes"][0]["lost_by"] is None
    assert answer["nodes"][1]["lost_by"] == "may get an idle GPU (50 %)"
    device = answer["nodes"][0]["devices"][0]
    assert (device["source"], device["age_seconds"], device["can_land"]) == ("prometheus", 0, True)
    reported = {"source": "prometheus", "age_seconds": 0}
    of_activity = {**reported, "signal": "gpu_utilization_ratio"}
    assert device["signals"] == {"utilization": of_activity, "memory": reported}
    assert answer["rejected"] == [
        {"count": 1, "reason": "node(s) had too few working GPUs", "nodes": ["dead"]}
    ]
    thresholds = {"max_utilization_ratio": 0.3, "max_memory_ratio": 0.5}
    brief = {
        "id": "here-2",
        "replica": "",
        "number": 2,
        "at": "2027-01-15T08:00:30.000+00:00",
        "verb": "prioritize",
        "pod": "team/p",
        "uid": "uid-p",
        "request": thresholds
        | {
            "resources": {GPU: 1},
            "gpu_memory_bytes": None,
            "gpu_memory_share": None,
            "gpu_memory_from": None,
            "require_idle": False,
            "strategy": "auto",
            "prefer_models": [],
            "require_models": [],
            "targets": [],
            "target_policy": "require",
        },
        "candidates": 3,
        "feasible": 3,
        "node": "idle",
        "runner_up": "half",
        "bound_node": "idle",
        "is_followed": True,
        "is_shadow": False,
        "group": None,
    }
    decision = answer["decision"]
    assert decision.pop("duration_seconds") >= 0
    assert decision.pop("snapshot") >= 1
    assert decision == brief
    assert answer["filter"].items() >= {"id": "here-1", "verb": "filter", "candidates": 4}.items()
    rest = ("others", "others_left", "pending", "requested_node", "is_hypothetical", "gpus")
    assert [answer[name] for name in rest] == [[], 0, None, None, False, []]
    assert (answer["kept"]["in_full"], answer["kept"]["in_short"]) == (4, 0)


async def test_a_pods_gpus_are_named(world: World, client: Client) -> None:
    cards = {"idle": [IDLE, Gpu(busy=0.5, tenants=("team/p",))]}
    await decide(client, "idle", name="p")
    world.history.note_bound(world.add_pod("p", "idle"), "idle")
    world.live(cards, 120)

    assert (await get(client, "/v1/explain", pod="team/p"))["gpus"] == [1]


async def test_one_decision_is_explained_with_the_filter_before_it(client: Client) -> None:
    for _ in range(2):
        await call(client, "filter", "idle", "dead", name="p")
        await call(client, "prioritize", "idle", name="p")

    answer = await get(client, "/v1/explain", number="2")

    assert (answer["decision"]["number"], answer["filter"]["number"]) == (2, 1)
    assert (await get(client, "/v1/explain", number="3"))["filter"] is None


async def test_explanation_shows_the_recorded_decision(world: World, client: Client) -> None:
    await decide(client, "idle", "half", name="p")
    before = await get(client, "/v1/explain", pod="p")

    world.now += 10
    world.report({"idle": [BUSY, BUSY], "half": [BUSY, BUSY]})
    after = await get(client, "/v1/explain", pod="p")

    assert after["nodes"] == before["nodes"]
    assert after["nodes"][0]["devices"][0]["utilization_ratio"] == 0.0


async def test_assumed_pods_are_counted(client: Client) -> None:
    await decide(client, "idle", name="first")
    await decide(client, "idle", "half", name="second")

    answer = await get(client, "/v1/explain", pod="second")
    by_name = {node["node"]: node for node in answer["nodes"]}

    assert (by_name["idle"]["taken"], by_name["half"]["taken"]) == (1, 0)


async def test_pods_assumed_on_a_shared_device_are_counted_on_it(
    world: World, client: Client
) -> None:
    world.register_node(
        "shared",
        allocatable={SHARED: 4},
        capacity={SHARED: 4},
        labels={
            "nvidia.com/gpu.count": "1",
            "nvidia.com/gpu.replicas": "4",
            "nvidia.com/gpu.sharing-strategy": "time-slicing",
        },
    )
    world.report({"shared": [IDLE]})
    for name in ("first", "second", "third"):
        await decide(client, "shared", name=name, resource=SHARED)

    (node,) = (await get(client, "/v1/explain", pod="third"))["nodes"]

    assert (node["assumed"], node["devices"][0]["assumed"]) == (2, 2)


async def test_nodes_without_full_record_are_counted_and_listed(
    world: World, client: Client
) -> None:
    world.placer.detailed = 1
    await decide(client, "idle", "half", "busy", name="p")

    answer = await get(client, "/v1/explain", pod="p")
    some = await get(client, "/v1/explain", pod="p", limit="1")

    assert [node["node"] for node in answer["nodes"]] == ["idle"]
    assert [node["node"] for node in answer["others"]] == ["half", "busy"]
    assert (answer["kept"]["in_full"], answer["kept"]["in_short"]) == (1, 2)
    assert "1 of 3 candidates are recorded in full" in answer["kept"]["note"]
    assert (len(some["others"]), some["others_left"]) == (1, 1)


@pytest.mark.parametrize(
    ("node", "kept", "rank", "rejection"),
    [
        ("idle", "in-full", 1, None),
        ("busy", "in-short", 3, None),
        ("dead", "in-short", None, "node(s) had too few working GPUs"),
        ("other", "no-candidate", None, None),
        ("gone", "unknown", None, None),
    ],
)
async def test_any_node_shows_its_known_data_and_the_reason_for_gaps(
    world: World, client: Client, node: str, kept: str, rank: int | None, rejection: str | None
) -> None:
    world.register_node("other")
    world.placer.detailed = 1
    await call(client, "filter", "idle", "half", "busy", "dead", name="p")
    await call(client, "prioritize", "idle", "half", "busy", name="p")

    one = (await get(client, "/v1/explain", pod="p", node=node))["requested_node"]

    assert (one["node"], one["kept"], one["rank"]) == (node, kept, rank)
    assert one["rejection"] == rejection
    assert (one["why"] is None) == (kept == "in-full")
    assert (one["score"] is None) == (kept in {"no-candidate", "unknown"})


async def test_the_node_bound_to_is_explained_whatever_its_rank(
    world: World, client: Client
) -> None:
    world.placer.detailed = 1
    await decide(client, "idle", "half", "busy", name="p")
    uid = world.add_pod("p", "busy")
    world.history.note_bound(uid, "busy")

    answer = await get(client, "/v1/explain", pod="p")

    assert [(node["node"], node["rank"]) for node in answer["nodes"]] == [("idle", 1), ("busy", 3)]
    assert answer["is_followed"] is False
    assert answer["nodes"][1]["is_bound"] is True


async def test_waiting_pod_states_its_reason(world: World, client: Client) -> None:
    await call(client, "filter", "busy", name="p", require_idle="true")
    world.add_waiting("p", is_unscheduled=True, is_refused=True, message=MESSAGE)

    answer = await get(client, "/v1/explain", pod="p")

    assert (answer["state"], answer["bound_node"]) == ("refused", None)
    assert answer["pending"]["nodes"] == 9
    assert answer["rejected"][0]["reason"] == "node(s) had too few GPUs known to be idle"
    assert answer["rejected"][0]["nodes"] == ["busy"]


async def test_pod_without_requests_states_its_reason_to_wait(world: World, client: Client) -> None:
    world.add_waiting("p", is_unscheduled=True, message="0/9 nodes are available: 9 Insufficient x")

    answer = await get(client, "/v1/explain", pod="team/p")

    assert (answer["state"], answer["decision"], answer["nodes"]) == ("unschedulable", None, [])
    assert answer["pending"]["by_scheduler"] == [{"count": 9, "reason": "Insufficient x"}]


async def test_a_bound_pod_without_a_decision_shows_its_node(client: Client) -> None:
    answer = await get(client, "/v1/explain", pod="tenant")

    assert (answer["state"], answer["bound_node"]) == ("bound", "busy")
    assert (answer["decision"], answer["nodes"], answer["is_followed"]) == (None, [], None)


async def test_a_decision_is_found_by_its_number(client: Client) -> None:
    await decide(client, "idle", name="a")
    await decide(client, "half", name="a")

    assert (await get(client, "/v1/explain", number="1"))["decision"]["node"] == "idle"


async def test_a_name_that_two_pods_have_is_refused_with_both(world: World, client: Client) -> None:
    world.add_waiting("p")
    world.add_waiting("q", "other")
    world.fleet.apply_pod(_renamed(world, "uid-q", "p"))

    answer = await get(client, "/v1/explain", 400, pod="p")

    assert answer["error"] == "pod='p' is the name of several pods: use one of other/p, team/p"


async def test_a_name_of_two_pods_with_decisions_is_refused_with_both(client: Client) -> None:
    for namespace in ("team", "other"):
        requester = pod("p") | {"metadata": {"name": "p", "namespace": namespace, "uid": namespace}}
        body = names_request("idle", requester=requester)
        assert (await client.post("/prioritize", data=json.dumps(body))).status == 200

    answer = await get(client, "/v1/explain", 400, pod="p")

    assert answer["error"] == "pod='p' is the name of several pods: use one of other/p, team/p"


def _renamed(world: World, uid: str, name: str) -> Any:
    return replace(world.fleet.pods[uid], name=name)


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ({"pod": "team/gone"}, 404, "no decision about 'team/gone' is remembered"),
        ({"number": "77"}, 404, "decision '77' is not remembered"),
        ({"id": "here-77"}, 404, "decision 'here-77' is not remembered"),
        ({"number": "1", "id": "here-1"}, 400, "or give number, or id"),
        ({}, 400, "must be namespace/name, name or UID"),
        ({"pod": "a", "number": "1"}, 400, "must be namespace/name, name or UID"),
        ({"number": "x"}, 400, "must be a whole number from 1"),
        ({"uid": "a"}, 400, "is not a parameter of this path: use id, limit, node, number, pod"),
    ],
)
async def test_a_missing_explanation_states_the_reason(
    client: Client, query: dict[str, str], status: int, words: str
) -> None:
    assert words in (await get(client, "/v1/explain", status, **query))["error"]


async def test_a_pod_that_the_caller_may_not_read_is_not_there(
    world: World, aiohttp_client: MakeClient
) -> None:
    world.add_waiting("secret", "other")
    client = await aiohttp_client(world.build_app(viewer=SeesTeam()))

    await get(client, "/v1/explain", 404, pod="other/secret")


async def test_a_recreated_pod_does_not_get_its_predecessors_decision(
    world: World, client: Client
) -> None:
    await call(client, "filter", "idle", name="p")
    before = await get(client, "/v1/explain", pod="team/p")
    record = PodRecord(uid="uid-new", namespace="team", name="p", resources={GPU: 2})
    world.fleet.apply_pod(record)

    after = await get(client, "/v1/explain", pod="team/p")

    assert (before["uid"], before["state"]) == ("uid-p", "gone")
    assert (after["uid"], after["state"], after["decision"]) == ("uid-new", "untried", None)
    world.fleet.remove_pod("uid-new", world.now)
    assert (await get(client, "/v1/explain", pod="team/p"))["uid"] == "uid-p"


# --- hypothetical pods ----------------------------------------------------------------------------


async def test_a_pod_that_is_not_there_gets_the_ranking_that_it_would_get(
    world: World, client: Client
) -> None:
    answer = await foresee(client, pod("p"))

    assert (answer["is_hypothetical"], answer["state"]) == (True, "placeable")
    none = ("uid", "bound_node", "is_followed", "pending", "filter", "requested_node")
    assert [answer[name] for name in none] == [None] * len(none)
    decision = answer["decision"]
    assert decision.pop("request")["resources"] == {GPU: 1}
    assert decision == {
        "candidates": 3,
        "feasible": 2,
        "node": "idle",
        "runner_up": "half",
        "group": None,
    }
    assert (answer["pod"], answer["problems"]) == ("team/p", [])
    assert (answer["others"], answer["others_left"]) == ([], 0)
    assert (answer["kept"]["in_full"], answer["kept"]["in_short"]) == (2, 1)
    assert [node["node"] for node in answer["nodes"]] == ["idle", "half"]
    assert [group["nodes"] for group in answer["rejected"]] == [["dead"]]
    assert [group["nodes"] for group in answer["closed"]] == [["busy"]]
    assert not world.placer.history.last_of("uid-p")
    assert len(world.fleet.ledger) == 0


async def test_a_requested_node_of_a_pod_that_is_not_there_is_described(
    world: World, client: Client
) -> None:
    world.placer.detailed = 1

    async def kept(node: str) -> tuple[Any, ...]:
        data = BytesIO(json.dumps(pod("p")).encode())
        response = await client.post("/v1/explain", data=data, params={"node": node, "limit": "0"})
        answer = strict(await response.text())
        found = answer["requested_node"]
        named = [one["node"] for one in answer["nodes"]]
        return found["kept"], found["rank"], found["why"], named, answer["others_left"]

    assert await kept("idle") == ("in-full", 1, None, ["idle"], 1)
    assert await kept("half") == ("in-full", 2, None, ["idle", "half"], 0)
    assert await kept("busy") == (
        "no-candidate",
        None,
        "kube-scheduler itself would reject it: "
        "node(s) had too few free GPUs by kube-scheduler's count",
        ["idle"],
        1,
    )


async def test_nodes_that_kube_scheduler_leaves_out_are_counted_by_reason(
    world: World, client: Client
) -> None:
    zone = {"topology.kubernetes.io/zone": "a"}
    fast: dict[str, Any] = {"labels": zone, "other_labels": {"disk": "ssd"}}
    world.register_node("here", **fast)
    world.register_node("slow", labels=zone)
    world.register_node("cordoned", is_unschedulable=True, **fast)
    world.register_node("down", is_ready=False, **fast)
    world.register_node("tainted", taints=(Taint(key="team", value="x"),), **fast)
    requested: dict[str, Any] = pod("p", gpus=2)
    requested["spec"] |= {"nodeSelector": zone | {"disk": "ssd"}, "affinity": {"podAffinity": {}}}

    answer = await foresee(client, requested)

    assert {group["reason"]: group["count"] for group in answer["closed"]} == {
        _NOT_SELECTED: 5,
        "node(s) were unschedulable": 1,
        "node(s) were not ready": 1,
        "node(s) had taints that a plain GPU pod does not tolerate": 1,
    }
    assert answer["decision"]["node"] == "here"
    assert answer["not_checked"] == ["affinity", "quotas"]


async def test_nodes_without_cpu_memory_or_storage_for_a_pod_are_left_out(
    world: World, client: Client
) -> None:
    host = HostResources(8_000, 64 << 30, 100 << 30)
    for name, used in (
        ("no-cpu", HostResources(5_000)),
        ("no-memory", HostResources(0, 60 << 30)),
        ("no-storage", HostResources(0, 0, 90 << 30)),
        ("enough", HostResources(4_000, 32 << 30, 50 << 30)),
    ):
        world.register_node(name, labels={"topology.kubernetes.io/zone": "a"}, host=host)
        world.fleet.apply_host_use(name, used)
    requested: dict[str, Any] = pod("p", gpus=2)
    requested["spec"]["nodeSelector"] = {"topology.kubernetes.io/zone": "a"}
    requests = {"cpu": "4", "memory": "32Gi", "ephemeral-storage": "50Gi"}
    requested["spec"]["containers"][0]["resources"]["requests"] = requests

    answer = await foresee(client, requested)

    closed = {group["reason"]: group["nodes"] for group in answer["closed"]}
    assert closed["node(s) had too little CPU, memory or ephemeral storage left"] == [
        "no-cpu",
        "no-memory",
        "no-storage",
    ]
    assert answer["decision"]["node"] == "enough"
    assert answer["not_checked"] == ["quotas"]


@pytest.mark.parametrize(
    ("toleration", "node"),
    [
        ({"key": "team", "operator": "Exists"}, "tainted"),
        ({"key": "team", "value": "x"}, "tainted"),
        ({"operator": "Exists"}, "tainted"),
        ({"key": "team", "value": "y"}, None),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, None),
        ({"key": "other", "operator": "Exists"}, None),
        ({}, None),
    ],
)
async def test_taints_keep_out_all_but_pods_that_tolerate_them(
    aiohttp_client: MakeClient, toleration: dict[str, str], node: str | None
) -> None:
    world = World()
    world.register_node("tainted", taints=(Taint(key="team", value="x"),))
    client = await aiohttp_client(world.build_app())
    requested = pod("p")
    requested["spec"] |= {"tolerations": [toleration]}  # type: ignore[operator] # a mapping

    assert (await foresee(client, requested))["decision"]["node"] == node


@pytest.mark.parametrize(
    ("key", "reason"), [(SHARED, ""), ("nvidia.com/gpu", ""), ("nvidia.com/mig-1g.10gb", TAINTED)]
)
def test_a_pod_tolerates_the_taint_of_its_resource(key: str, reason: str) -> None:
    world = World()
    world.register_node("node", taints=(Taint(key=key, value="present"),))

    assert why_closed(world.fleet.nodes["node"], SHARED, Selection()) == reason


async def test_annotations_that_cannot_be_used_are_reported(client: Client) -> None:
    (problem,) = (await foresee(client, pod("p", strategy="best")))["problems"]

    assert (problem["annotation"], problem["value"]) == ("idlegpu.io/strategy", "best")
    assert problem["allowed"] == "auto, spread or pack"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "is not JSON"),
        ([], 400, "is not a pod"),
        ({"spec": {}}, 400, "is not a pod"),
        (pod("p", gpus=None), 400, "requests no GPU"),
        (pod("p", enabled="false"), 400, "left to kube-scheduler"),
        (b" " * (1 << 20) + b"xx", 413, "larger than"),
        ({"spec": {"containers": [{}] * 1001}}, 400, "1001 containers: must be at most 1000"),
        (
            {
                "spec": {
                    "containers": [
                        {"resources": {"limits": dict.fromkeys(map(str, range(5001)), 1)}}
                    ]
                }
            },
            400,
            "5001 limits and requests: must be at most 5000",
        ),
    ],
)
async def test_pod_without_gpus_is_refused(
    client: Client, body: object, status: int, words: str
) -> None:
    assert words in (await foresee(client, body, status))["error"]


async def test_an_explanation_states_that_no_node_is_suitable(client: Client) -> None:
    answer = await foresee(client, pod("p", gpus=4))

    assert (answer["state"], answer["decision"]["node"], answer["nodes"]) == (
        "unplaceable",
        None,
        [],
    )
    assert answer["closed"][0]["reason"].startswith("node(s) had too few free GPUs")
    assert GPU in answer["decision"]["request"]["resources"]
