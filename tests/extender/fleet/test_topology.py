"""Positions of GPUs in their nodes, from agents' reports and labels to the decision."""

from dataclasses import replace

import pytest

from extender.core.decision.filtering import Code
from extender.core.devices.topology import POLICY_LABEL, Alignment, Place
from extender.core.policy import Strategy
from testkit.agent.fleet_reports import Agents
from testkit.builders import request
from testkit.world import World

NODES = ("a-apart", "b-near", "c-joined")
SINGLE = {POLICY_LABEL: "single-numa-node"}


def place(world: World, node: str, index: int, **changes: object) -> Place:
    """Return the position of a card; NVLink joins all cards of the last node only."""
    uuids = [world.card(node, at).info.uuid for at in range(4)]
    peers = [uuid for uuid in uuids if uuid != uuids[index]] if node == "c-joined" else []
    numa_node = index % 2 if node == "a-apart" else 0
    made = Place(uuid=uuids[index], numa_node=numa_node, nvlink_peers=tuple(peers))
    return replace(made, **changes)  # type: ignore[arg-type]  # the caller names fields of a place


def fleet(*nodes: str, labels: dict[str, str] | None = None, **changes: object) -> World:
    world = World()
    agents = Agents(world)
    for node in nodes:
        world.add_node(node, 4, labels=labels or {})
        cards = [world.card(node, at).info for at in range(4)]
        agents.report(
            node,
            *(
                replace(card, place=place(world, node, at, **changes))
                for at, card in enumerate(cards)
            ),
        )
    return world


def test_gpu_order_of_agents_wins_over_prometheus() -> None:
    world = fleet(*NODES)
    for _ in range(2):
        decision = world.rank(request(4))
        ranked = [decision.candidates[at] for at in decision.order]
        assert ranked == ["c-joined", "b-near", "a-apart"]
        world.clock.now += 30
        world.read()  # its devices have no position


@pytest.mark.parametrize("strategy", list(Strategy))
def test_the_parts_of_a_score_include_the_devices_side_by_side(strategy: Strategy) -> None:
    world = fleet(*NODES)

    verdicts = world.placer.explain_nodes(request(4, strategy=strategy), list(NODES))

    for verdict in verdicts:
        assert sum(part.adds for part in verdict.parts) == pytest.approx(verdict.score)
    reasons = {verdict.node: verdict.reason for verdict in verdicts}
    assert "joined by NVLink" in reasons["c-joined"]
    assert "on one NUMA node" in reasons["b-near"]
    assert "NUMA" not in reasons["a-apart"]


@pytest.mark.parametrize(
    ("labels", "by_agent", "code"),
    [
        pytest.param({}, None, Code.PASSES, id="unknown"),
        pytest.param({}, Alignment.SINGLE, Code.MISALIGNED, id="the agent reads it"),
        pytest.param(SINGLE, None, Code.MISALIGNED, id="a label names it"),
        pytest.param(
            {POLICY_LABEL: "none"}, Alignment.SINGLE, Code.PASSES, id="a label counts before"
        ),
    ],
)
def test_the_kubelets_policy_comes_from_a_label_or_the_agent(
    labels: dict[str, str], by_agent: Alignment | None, code: Code
) -> None:
    world = fleet("a-apart", labels=labels, alignment=by_agent)

    assert world.rank(request(3)).codes.tolist() == [code]
    assert world.rank(request(2)).codes.tolist() == [Code.PASSES]
