"""Node agents with and without Prometheus: real protocol and tokens, simulated GPUs."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from extender.sources.agents.tokens import NODE_NAME, POD_NAME
from simulation.agents import REPORTS, SimulatedAgent, run_agents
from simulation.devices import Load
from simulation.models import GIB
from testkit.certificates import issue
from testkit.controlplane.agents import POD_RIGHTS, Tokens, agents_on, tokens_of
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

HOLD_SECONDS = 3.0

ONLY_NEWS = replace(REPORTS, heartbeat_seconds=300.0)
"""No heartbeat comes during a test: every observed change was reported as an update."""
PATIENT: Object = {"hold_seconds": 600, "silence_seconds": 600}
"""Settings with which an extender accepts agents that are silent for so long."""

REFUSALS = "idlegpu_agent_refusals_total{"


def taking(tokens: Tokens, **changes: object) -> Object:
    """Return settings of an extender that receives agents' reports."""
    return {
        "agents": {**tokens.settings, "hold_seconds": HOLD_SECONDS, "silence_seconds": 5, **changes}
    }


WITHOUT_PROMETHEUS: Object = {"prometheus": {"url": ""}}


async def sources(world: World) -> set[str]:
    return {gpu["source"] for gpu in (await world.gpus()).values()}


async def wait_source(world: World, source: str) -> None:
    """Wait until a source is the origin of every GPU's data."""

    async def is_so() -> bool:
        return await sources(world) == {source}

    await wait_for(is_so, f"{source} is the source of every GPU")


async def refusals(world: World) -> dict[str, float]:
    """Return the number of refused agents by reason."""
    async with world.services.extender.session() as session, session.get("/metrics") as response:
        shown = await response.text()
    pairs = (line.rpartition(" ") for line in shown.splitlines() if REFUSALS in line)
    return {
        name.partition('"')[2].rstrip('"}'): float(value)
        for name, _, value in pairs
        if name.startswith(REFUSALS) and float(value)
    }


def restarted_agents(
    world: World, tokens: Tokens, *nodes: str
) -> AbstractAsyncContextManager[Mapping[str, SimulatedAgent]]:
    """Run agents whose tokens exist already."""
    return run_agents(world.fleet, nodes, tokens.address, tokens.file, reports=tokens.reporting())


async def test_agents_alone_are_enough(world: World, tmp_path: Path) -> None:
    busy, idle = world.add("a-busy"), world.add("b-idle")
    for index in range(2):
        world.fleet.set_utilization(busy, index, 0.9)
    async with tokens_of(world, tmp_path) as tokens, agents_on(world, tokens, busy, idle):
        await world.start({**WITHOUT_PROMETHEUS, **taking(tokens)})
        assert await sources(world) == {"agent"}

        placed = await world.place(pod("wanted"))

        assert placed == idle
        await world.settled()  # with the pod on its GPU, as the agent reports


async def test_if_one_source_fails_the_other_continues(world: World, tmp_path: Path) -> None:
    first, second = world.add("a-first"), world.add("b-second")
    async with tokens_of(world, tmp_path) as tokens:
        async with agents_on(world, tokens, first, second):
            await world.start({**taking(tokens)})
            await wait_source(world, "agent")

            world.services.prometheus.process.kill()
            for index in range(2):
                world.fleet.set_utilization(first, index, 0.9)
            await world.settled()
            assert await world.place(pod("without-prometheus")) == second

            await world.services.ensure_prometheus()
        # From here on no agent runs.
        await wait_source(world, "prometheus")
        for index in range(2):
            world.fleet.set_utilization(first, index, 0.0)
            world.fleet.set_utilization(second, index, 0.9)
        for index in range(2):  # the former foreign use has ended
            await world.wait_state(first, index, "idle")
        await world.settled()
        assert await world.place(pod("without-agents")) == first

        async with restarted_agents(world, tokens, first, second):
            await wait_source(world, "agent")


async def test_gpu_busy_outside_kubernetes_is_avoided_before_a_heartbeat(
    world: World, tmp_path: Path
) -> None:
    preferred, other = world.add("a-preferred", cards=1), world.add("b-other", cards=1)
    async with (
        tokens_of(world, tmp_path) as tokens,
        agents_on(world, tokens, preferred, other, reports=ONLY_NEWS),
    ):
        await world.start({**WITHOUT_PROMETHEUS, **taking(tokens, **PATIENT)})
        before = pod("before")
        assert await world.place(before) == preferred
        await world.settled()  # the agent did not notice a pod that ended before its pass
        await world.end(before)

        world.fleet.set_foreign(preferred, 0, Load(utilization=0.8, memory_bytes=20 * GIB))
        await world.wait_state(preferred, 0, "foreign")
        placed = await world.place(pod("after"))

        assert placed == other
        assert (await world.gpu(preferred))["source"] == "agent"


async def test_the_api_server_says_whose_a_token_is(world: World, tmp_path: Path) -> None:
    mine, others = world.add("mine"), world.add("others")
    async with tokens_of(world, tmp_path) as tokens, agents_on(world, tokens, mine):
        await world.start(taking(tokens))
        await world.wait_gpu(mine, 0, lambda gpu: gpu["source"] == "agent", "comes from the agent")

        for reason, text in {
            "wrong-node": await tokens.issue(mine, name="second"),
            "wrong-audience": await tokens.issue(others, audience="vault"),
            "wrong-account": await tokens.issue(others, account="other"),
            "not-bound": await tokens.issue(others, bound=False),
            "bad-token": f"{tokens.file(mine).read_text()}x",
        }.items():
            tokens.file(others).write_text(text)
            async with restarted_agents(world, tokens, others):

                async def is_refused(reason: str = reason) -> bool:
                    return reason in await refusals(world)

                await wait_for(is_refused, f"the agent is refused: {reason}")

        assert (await world.gpu(others))["source"] == "prometheus"
        await world.wait_gpu(
            mine, 0, lambda gpu: gpu["source"] == "agent", "still comes from the agent"
        )


async def test_token_with_a_pod_only_belongs_to_the_pods_node(world: World, tmp_path: Path) -> None:
    node = world.add("node")
    async with tokens_of(world, tmp_path, POD_RIGHTS) as tokens:
        await world.register()
        text = await tokens.issue_before_binding(node)
        tokens.file(node).write_text(text)
        extra = (await tokens.review(text))["user"]["extra"]
        assert POD_NAME in extra
        assert NODE_NAME not in extra
        await world.start(taking(tokens))

        async with restarted_agents(world, tokens, node):
            await world.wait_gpu(
                node, 0, lambda gpu: gpu["source"] == "agent", "comes from the agent"
            )


async def test_agents_report_only_over_tls_to_the_extender_of_their_ca(
    world: World, tmp_path: Path
) -> None:
    node = world.add("node")
    issue(tmp_path / "own")
    issue(tmp_path / "another")
    own = tmp_path / "own" / "extender"
    tls = {"cert_file": str(own / "tls.crt"), "key_file": str(own / "tls.key")}
    async with tokens_of(world, tmp_path) as tokens:
        await world.register()
        await tokens.issue_all([node])
        await world.start(taking(tokens, **tls))

        stranger = replace(REPORTS, ca_file=str(tmp_path / "another" / "extender" / "ca.crt"))
        for how in (REPORTS, stranger):
            async with run_agents(
                world.fleet, [node], tokens.address, tokens.file, reports=how
            ) as agents:
                await wait_for(partial(has_looked, agents[node]), "the agent has tried")
                assert (await world.gpu(node))["source"] == "prometheus"

        known = replace(REPORTS, ca_file=str(own / "ca.crt"))
        async with run_agents(world.fleet, [node], tokens.address, tokens.file, reports=known):
            await world.wait_gpu(
                node, 0, lambda gpu: gpu["source"] == "agent", "comes from the agent"
            )


async def has_looked(agent: SimulatedAgent) -> bool:
    """Return whether an agent has had time for several attempts."""
    return agent.sequence >= 12


async def test_a_token_whose_pod_is_gone_is_refused(world: World, tmp_path: Path) -> None:
    node = world.add("node")
    async with tokens_of(world, tmp_path) as tokens:
        await world.register()
        tokens.file(node).write_text(await tokens.issue(node))
        await world.client.delete(pod(f"idlegpu-agent-{node}", 0, namespace="idlegpu-agent"))
        await world.start(taking(tokens))
        async with restarted_agents(world, tokens, node):

            async def is_refused() -> bool:
                return "bad-token" in await refusals(world)

            await wait_for(is_refused, "the agent is refused")

        assert (await world.gpu(node))["source"] == "prometheus"
