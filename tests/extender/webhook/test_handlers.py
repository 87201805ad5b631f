import logging

import pytest

from extender.core.decision.filtering import Code
from testkit.webhook_requests import (
    VERBS,
    Client,
    MakeClient,
    call,
    meta,
    names_request,
    objects_request,
    pod,
    scores_of,
)
from testkit.world import World

# --- filter ---------------------------------------------------------------------------------------


async def test_filter_keeps_the_order_of_the_request(client: Client) -> None:
    answer = await call(client, "filter", names_request("busy", "idle-b", "dead", "idle-a"))

    assert answer["NodeNames"] == ["busy", "idle-b", "idle-a"]
    assert answer["Nodes"] is None
    assert answer["Error"] == ""


async def test_filter_gives_a_reason_for_each_refused_node(client: Client) -> None:
    answer = await call(client, "filter", names_request("dead", "foreign", "idle-a"))

    assert answer["NodeNames"] == ["idle-a"]
    assert answer["FailedNodes"] == {}
    assert answer["FailedAndUnresolvableNodes"] == {
        "dead": "node(s) had too few working GPUs (idlegpu)",
        "foreign": "node(s) had GPUs in use by processes outside Kubernetes (idlegpu)",
    }


async def test_filter_answers_whole_nodes_with_whole_nodes(client: Client) -> None:
    nodes = [
        {"metadata": {"name": name, "labels": {"a/b": "c"}}, "status": {"big": 2**64 + 1}}
        for name in ("dead", "idle-b", "idle-a")
    ]
    body = {"Pod": pod(), "Nodes": {"items": nodes}, "NodeNames": None}

    answer = await call(client, "filter", body)

    assert answer["Nodes"] == {"items": nodes[1:]}
    assert answer["NodeNames"] is None


async def test_filter_answers_with_an_empty_list_if_no_node_passes(client: Client) -> None:
    by_name = await call(client, "filter", names_request("dead"))
    whole = await call(client, "filter", objects_request("dead"))

    assert by_name["NodeNames"] == []
    assert whole["Nodes"] == {"items": []}


@pytest.mark.parametrize(
    "requester",
    [
        pytest.param(None, id="null"),
        pytest.param({}, id="empty"),
        pytest.param(pod(gpus=None), id="no-gpu"),
        pytest.param(pod(enabled="false"), id="disabled"),
    ],
)
async def test_filter_passes_all_nodes_for_a_pod_without_gpus(
    client: Client, requester: object
) -> None:
    request = names_request("dead", "idle-a") | {"Pod": requester}

    assert (await call(client, "filter", request))["NodeNames"] == ["dead", "idle-a"]
    assert scores_of(await call(client, "prioritize", request)) == {"dead": 0, "idle-a": 0}


async def test_everything_passes_until_the_inventory_is_complete(
    world: World, client: Client
) -> None:
    world.is_ready = False

    answer = await call(client, "filter", names_request("dead", "idle-a"))

    preempted = await call(client, "preempt", {"Pod": pod(), **meta("dead")})

    assert answer["NodeNames"] == ["dead", "idle-a"]
    assert list(preempted["NodeNameToMetaVictims"]) == ["dead"]
    for verb in ("filter", "preempt"):
        assert world.count("idlegpu_requests_total", verb=verb, outcome="not-ready") == 1


async def test_a_pod_that_requires_idle_nodes_waits_for_the_inventory(
    world: World, client: Client
) -> None:
    world.is_ready = False
    requester = pod(require_idle="true")

    answer = await call(client, "filter", names_request("not-listed-yet", requester=requester))
    preemption = await call(client, "preempt", {"Pod": requester, **meta("not-listed-yet")})

    assert answer["NodeNames"] == []
    assert list(answer["FailedAndUnresolvableNodes"]) == ["not-listed-yet"]
    assert preemption == {"NodeNameToMetaVictims": {}}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"NodeNames":7}', b"\xff", b"100%"])
async def test_a_malformed_filter_request_is_answered_200_with_an_error(
    world: World, client: Client, body: bytes
) -> None:
    response = await client.post("/filter", data=body)

    answer = await response.json()
    assert response.status == 200
    assert answer["Error"].startswith("cannot read ExtenderArgs: $")
    assert "%" not in answer["Error"]
    assert answer["NodeNames"] is None
    assert answer["Nodes"] is None
    assert world.count("idlegpu_requests_total", verb="filter", outcome="malformed") == 1


@pytest.mark.parametrize("verb", ["prioritize", "preempt"])
async def test_other_malformed_requests_are_answered_400_with_an_error(
    client: Client, verb: str
) -> None:
    response = await client.post(f"/{verb}", data=b"{")

    assert response.status == 400
    assert (await response.json())["Error"].startswith("cannot read Extender")


async def test_equal_malformed_requests_are_logged_once(
    world: World, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        for verb in ("filter", "prioritize"):
            await client.post(f"/{verb}", data=b"{")

    logged = [vars(line) for line in caplog.records if line.message == "malformed request"]
    assert [line["verb"] for line in logged] == ["filter", "prioritize"]
    assert all(line["error"].startswith("cannot read ExtenderArgs: $") for line in logged)
    assert world.count("idlegpu_requests_total", verb="filter", outcome="malformed") == 5


async def test_an_invalid_annotation_is_logged_and_rejects_no_node(
    world: World, client: Client
) -> None:
    request = names_request("idle-a", requester=pod(gpu_memory="lots", max_utilisation="20"))

    answer = await call(client, "filter", request)

    assert answer["NodeNames"] == ["idle-a"]
    assert [problem.annotation for problem in world.problems] == [
        "idlegpu.io/gpu-memory",
        "idlegpu.io/max-utilisation",
    ]
    name = "idlegpu_annotation_problems_total"
    assert world.count(name, annotation="idlegpu.io/gpu-memory") == 1
    assert world.count(name, annotation="unknown") == 1


# --- prioritize -----------------------------------------------------------------------------------


async def test_prioritize_ranks_idle_before_busy_and_one_node_highest(client: Client) -> None:
    request = names_request("busy", "idle-b", "idle-a", "dead", "unknown")

    scores = scores_of(await call(client, "prioritize", request))

    assert list(scores) == ["busy", "idle-b", "idle-a", "dead", "unknown"]
    assert scores["idle-a"] == 400
    assert scores["idle-b"] == 398
    assert 1 <= scores["busy"] <= scores["unknown"] <= 240
    assert scores["dead"] == 0


@pytest.mark.parametrize("max_score", [1, 100, 1000])
async def test_the_highest_score_is_a_setting(
    world: World, aiohttp_client: MakeClient, max_score: int
) -> None:
    world.max_score = max_score
    client = await aiohttp_client(world.build_app())

    scores = scores_of(await call(client, "prioritize", objects_request("busy", "idle-a")))

    assert scores["idle-a"] == max_score
    assert 0 <= scores["busy"] < max_score


# --- preempt --------------------------------------------------------------------------------------


async def test_preempt_keeps_acceptable_candidates_and_returns_victims_unchanged(
    client: Client,
) -> None:
    request = {"Pod": pod(), **meta("busy", "dead", "idle-a", "unknown")}

    answer = await call(client, "preempt", request)

    expected = {"Pods": [{"UID": "uid-holder-0"}], "NumPDBViolations": 1}
    assert answer == {
        "NodeNameToMetaVictims": dict.fromkeys(["busy", "idle-a", "unknown"], expected)
    }


async def test_preempt_answers_whole_pods_with_uids(client: Client) -> None:
    victims = {"Pods": [{"metadata": {"uid": "uid-holder-1", "name": "x"}}], "NumPDBViolations": 0}

    answer = await call(
        client, "preempt", {"Pod": pod(), "NodeNameToVictims": {"busy": victims, "dead": victims}}
    )

    assert answer == {
        "NodeNameToMetaVictims": {
            "busy": {"Pods": [{"UID": "uid-holder-1"}], "NumPDBViolations": 0}
        }
    }


@pytest.mark.parametrize(
    "requester",
    [pod(), pod(gpus=None), pod(enabled="false"), None],
    ids=["gpu", "no-gpu", "disabled", "null"],
)
async def test_preempt_never_returns_a_candidate_without_victims(
    client: Client, requester: object
) -> None:
    with_victims = meta("busy")["NodeNameToMetaVictims"]
    assert isinstance(with_victims, dict)
    request = {
        "Pod": requester,
        "NodeNameToMetaVictims": {"idle-a": {"Pods": []}, "idle-b": None, **with_victims},
    }

    answer = await call(client, "preempt", request)

    assert list(answer["NodeNameToMetaVictims"]) == ["busy"]


@pytest.mark.parametrize("requester", [pod(gpus=None), pod(enabled="false"), None])
async def test_preempt_keeps_all_candidates_for_a_pod_without_gpus(
    client: Client, requester: object
) -> None:
    answer = await call(client, "preempt", {"Pod": requester, **meta("dead", "busy")})

    assert list(answer["NodeNameToMetaVictims"]) == ["dead", "busy"]


async def test_requests_are_counted_and_timed_by_verb_and_outcome(
    world: World, client: Client
) -> None:
    await call(client, "filter", names_request("idle-a", "idle-b", "dead"))
    await call(client, "prioritize", names_request("idle-a", "idle-b"))
    await call(client, "filter", names_request("idle-a", requester=pod(gpus=None)))
    await call(client, "preempt", {"Pod": pod(), **meta("busy")})

    seconds = "idlegpu_request_duration_seconds_count"
    for verb, outcome in [
        ("filter", "answered"),
        ("prioritize", "answered"),
        ("filter", "no-gpu"),
        ("preempt", "answered"),
    ]:
        assert world.count("idlegpu_requests_total", verb=verb, outcome=outcome) == 1
        assert world.count(seconds, verb=verb, outcome=outcome) == 1
    assert world.count("idlegpu_candidates_sum", verb="filter") == 4
    assert world.count("idlegpu_candidates_sum", verb="preempt") == 1
    assert world.count("idlegpu_feasible_sum") == 2
    assert world.count("idlegpu_rejections_total", reason="unhealthy") == 1


@pytest.mark.usefixtures("client")
def test_series_exist_before_the_first_request(world: World) -> None:
    reasons = {
        sample.labels["reason"]
        for sample in next(iter(world.metrics.rejections.collect())).samples
        if sample.name == "idlegpu_rejections_total"
    }

    assert reasons == {code.name.lower() for code in Code} - {"passes"}
    for verb in VERBS:
        labels = {"verb": verb}
        assert world.metrics.registry.get_sample_value("idlegpu_candidates_count", labels) == 0
    unknown = {"annotation": "unknown"}
    name = "idlegpu_annotation_problems_total"
    assert world.metrics.registry.get_sample_value(name, unknown) == 0


async def test_every_decision_is_one_line(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="extender")

    await call(client, "prioritize", names_request("idle-b", "idle-a", "dead"))

    (line,) = [record for record in caplog.records if record.message == "decision"]
    said = vars(line)
    assert said["pod"] == "team/requester"
    assert (said["node"], said["runner_up"]) == ("idle-a", "idle-b")
    assert (said["candidates"], said["feasible"]) == (3, 2)
