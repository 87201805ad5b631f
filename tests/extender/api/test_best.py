from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extender.api import json_routes
from extender.core.decision.verdicts import NodeVerdict
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import Taint
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import GpuRequest
from extender.core.steps import Steps
from extender.insight.what_if import NO_ROOM, STRANDED, TAINTED
from testkit.api_requests import decide, get, strict
from testkit.builders import GPU
from testkit.cards import IDLE
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

# --- best -----------------------------------------------------------------------------------------


async def test_best_is_the_ranking_that_a_pod_would_get_with_reasons(client: Client) -> None:
    answer = await get(client, "/v1/best", gpus="2")

    assert [entry["node"] for entry in answer["best"]] == ["idle"]
    assert answer["best"][0]["rejection"] is None
    assert answer["best"][0]["idle"] >= 2
    assert answer["rejected"] == {
        "busy": "node(s) had too few free GPUs by kube-scheduler's count",
        "dead": "node(s) had too few working GPUs",
        "full": "node(s) had too few free GPUs by kube-scheduler's count",
    }
    assert answer["feasible"] == 1


async def test_best_takes_the_annotations_of_pods(world: World, client: Client) -> None:
    # A foreign process uses a GPU of the node that is called idle.
    world.add({"sure": [IDLE]})
    query = {
        "gpus": "1",
        "memory": "70Gi",
        "model": "H100,A100",
        "strategy": "pack",
        "max_utilization": "25",
        "max_memory": "40%",
        "require_idle": "true",
        "limit": "1",
    }

    answer = await get(client, "/v1/best", 200, **query)

    assert [entry["node"] for entry in answer["best"]] == ["sure"]
    assert answer["feasible"] == 1


async def test_best_counts_gpus_of_each_requested_model(world: World, client: Client) -> None:
    world.add({"other": [IDLE, IDLE]})
    world.add_pod("tenant", "other", gpus=2)
    cards = sum(record.allocatable.get(GPU, 0) for record in world.fleet.nodes.values())

    answer = await get(client, "/v1/best", model="H100,T4")
    held = sum(node["resources"][GPU]["held"] for node in (await get(client, "/v1/nodes"))["nodes"])

    assert answer["models"] == {
        "H100": {"gpus": cards, "held": held, "free": cards - held, "stranded": 0},
        "T4": {"gpus": 0, "held": 0, "free": 0, "stranded": 0},
    }
    assert cards > held > 2


async def test_best_counts_pods_that_were_just_placed(client: Client) -> None:
    assert (await get(client, "/v1/best", gpus="2"))["feasible"] == 1

    await decide(client, "idle", name="just-placed", gpus=2)

    assert (await get(client, "/v1/best", gpus="2"))["rejected"]["idle"] == NO_ROOM
    assert [one["node"] for one in (await get(client, "/v1/best", gpus="1"))["best"]] == ["idle"]


async def test_best_without_nodes_has_no_models(aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(World().build_app())

    assert (await get(client, "/v1/best", model="H100")) == {
        "best": [],
        "feasible": 0,
        "rejected": {},
        "models": {},
    }


async def test_a_node_that_is_removed_while_nodes_are_listed_has_no_stranded_gpus(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add({"sure": [IDLE] * 3})
    explain = world.placer.explain_nodes

    def explain_nodes(request: GpuRequest, nodes: list[str]) -> tuple[NodeVerdict, ...]:
        verdicts = explain(request, nodes)
        for node in nodes:
            world.fleet.remove_node(node)
        return verdicts

    monkeypatch.setattr(world.placer, "explain_nodes", explain_nodes)

    answer = await get(client, "/v1/best", gpus="1")

    assert {one["node"]: one["stranded"] for one in answer["best"]} == {"idle": 0, "sure": 0}


async def test_best_counts_stranded_gpus_apart_from_room(world: World, client: Client) -> None:
    world.add({"tight": [IDLE] * 4})
    world.add_pod("tenant", "tight")
    record = world.fleet.nodes["tight"]
    world.fleet.apply_node(replace(record, host=HostResources(16_000, 64 << 30)))
    world.fleet.apply_host_use("tight", HostResources(13_000, 0))
    world.live({"tight": [IDLE] * 4}, 60)

    one = await get(client, "/v1/best", gpus="1", model="H100")
    two = await get(client, "/v1/best", gpus="2")
    counts = one["models"]["H100"]

    assert {entry["node"]: entry["stranded"] for entry in one["best"]}["tight"] == 2
    assert two["rejected"]["tight"] == STRANDED
    assert counts["stranded"] == 2
    assert counts["held"] + counts["free"] + counts["stranded"] == counts["gpus"]


async def test_gpus_of_named_models_are_counted_in_steps(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    async def run_in_steps(steps: Steps[object]) -> object:
        for number in count():
            try:
                next(steps)
            except StopIteration as ended:
                counted.append(number)
                return ended.value
        return None

    world.add({f"n-{number}": [IDLE] for number in range(300)})
    monkeypatch.setattr(json_routes, "run_in_steps", run_in_steps)

    await get(client, "/v1/best", model="H100,T4")

    assert counted[-1] == 3  # 300 nodes have the first model, and none has the second


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_unschedulable": True}, "node(s) were unschedulable"),
        ({"is_ready": False}, "node(s) were not ready"),
        ({"taints": (Taint(key="team", value="a"),)}, TAINTED),
        ({"taints": (Taint(key="team", effect="NoExecute"),)}, TAINTED),
        (
            {"labels": {"nvidia.com/mig.config.state": "pending"}},
            "node(s) had GPUs that are being reconfigured",
        ),
    ],
)
async def test_best_leaves_out_nodes_that_kube_scheduler_would_not_use(
    world: World, client: Client, change: dict[str, object], reason: str
) -> None:
    world.register_node("idle", gpus=3, **change)

    answer = await get(client, "/v1/best")

    assert answer["rejected"]["idle"] == reason


@pytest.mark.parametrize(
    "taint",
    [
        Taint(key="nvidia.com/gpu", value="present"),
        Taint(key="nvidia.com/gpu", effect="NoExecute"),
        Taint(key="gpu-team", effect="PreferNoSchedule"),
        Taint(key="idlegpu.io/scheduler", value="idlegpu-scheduler"),
    ],
)
async def test_best_keeps_nodes_whose_taints_a_plain_gpu_pod_tolerates(
    world: World, client: Client, taint: Taint
) -> None:
    world.register_node("idle", gpus=3, taints=(taint,))

    answer = await get(client, "/v1/best")

    assert [entry["node"] for entry in answer["best"]] == ["idle"]


async def test_best_changes_nothing(world: World, client: Client) -> None:
    await get(client, "/v1/best", gpus="1")

    assert len(world.fleet.ledger) == 0
    assert len(world.history) == 0


async def test_best_uses_the_first_resource_by_default(
    world: World, aiohttp_client: MakeClient
) -> None:
    world.resources = ResourceNames(("example.com/gpu", GPU))
    world.register_node(
        "other", allocatable={"example.com/gpu": 1}, capacity={"example.com/gpu": 1}
    )
    client = await aiohttp_client(world.build_app())

    assert [entry["node"] for entry in (await get(client, "/v1/best"))["best"]] == ["other"]
    assert (await get(client, "/v1/best", resource=GPU))["feasible"] > 0


@pytest.mark.parametrize(
    ("query", "parts"),
    [
        ({"gpus": "0"}, ("gpus='0'", "a whole number from 1 to 1024")),
        ({"gpus": "-1"}, ("gpus='-1'", "a whole number")),
        ({"gpus": "1.5"}, ("gpus='1.5'", "a whole number")),
        ({"gpus": ""}, ("gpus=''", "a whole number")),
        ({"gpus": "٣"}, ("gpus='٣'", "a whole number")),
        ({"gpus": "9" * 5000}, ("gpus='9", "a whole number")),
        ({"memory": "lots"}, ("memory='lots'", "such as 20Gi")),
        ({"memory": "20"}, ("memory='20'", "from 1Mi to 16Ti")),
        ({"strategy": "best"}, ("strategy='best'", "spread or pack")),
        ({"model": ","}, ("model=','", "models separated by commas")),
        ({"max_utilization": "0"}, ("max_utilization='0'", "from 1 to 100")),
        ({"max_memory": "200"}, ("max_memory='200'", "from 1 to 100")),
        ({"require_idle": "yes"}, ("require_idle='yes'", "true or false")),
        ({"resource": "cpu"}, ("resource='cpu'", "nvidia.com/gpu")),
        ({"resource": "nvidia.com/mig-*"}, ("resource='nvidia.com/mig-*'", "must be")),
        ({"limit": "1001"}, ("limit='1001'", "from 1 to 1000")),
        ({"gpu": "1"}, ("gpu='1' is not a parameter", "gpus")),
    ],
)
async def test_bad_parameter_is_named_with_value_and_allowed_values(
    client: Client, query: dict[str, str], parts: tuple[str, ...]
) -> None:
    error = (await get(client, "/v1/best", 400, **query))["error"]

    assert all(part in error for part in parts), error
    assert len(error) < 400


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/best?gpus=1&gpus=2", "gpus='2' is given more than once"),
        ("/v1/nodes?x=1", "x='1' is not a parameter of this path: use none"),
        ("/v1/nodes/idle?gpus=1", "gpus='1' is not a parameter"),
        ("/v1/gpus?nodes=idle", "use node"),
        ("/v1/decisions?limit=0", "from 1 to 1000"),
        ("/v1/decisions?brief=maybe", "brief='maybe' must be true or false"),
    ],
)
async def test_a_parameter_that_means_nothing_is_400(client: Client, path: str, error: str) -> None:
    response = await client.get(path)

    assert response.status == 400
    assert error in (await response.json())["error"]


@given(
    st.dictionaries(
        st.sampled_from(["gpus", "memory", "model", "strategy", "max_utilization", "limit", "x"]),
        st.text(max_size=12) | st.sampled_from(["1", "20Gi", "pack", "50", "1e400", "NaN", "0x1"]),
        max_size=3,
    )
)
@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_any_parameters_are_answered_or_refused(
    client: Client, query: dict[str, str]
) -> None:
    response = await client.get("/v1/best", params=query)

    assert response.status in {200, 400}
    strict(await response.text())
