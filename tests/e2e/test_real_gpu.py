"""A real GPU in a real cluster, read by an agent, with a real process outside Kubernetes.

The cluster's node with the GPUs of this machine is called `a-real`; no kubelet runs on it.
"""

import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from agent.report.contract import Foreign
from simulation.models import GIB
from testkit.agent.fake_kubelet import FakeKubelet, container
from testkit.agent.fake_kubelet import pod as held
from testkit.agent.json_report import decode_report
from testkit.agent.loads import load, pod_cgroup, uuids, why_no_gpu
from testkit.controlplane.agents import Tokens, agents_on, tokens_of
from testkit.controlplane.deployed import merged
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import SETTINGS, World

WHY_NOT = why_no_gpu()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.timeout(240),
]

GPUS: Final = "nvidia.com/gpu"
PATIENT: Final = {"idlegpu.io/require-idle": "true"}
DUTY: Final = 0.8
HELD_GIB: Final = 20.0


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(tmp_path / "kubelet.sock") as running:
        logs_of(running).mkdir()
        running.allocatable = [{"resource_name": GPUS, "device_ids": uuids()}]
        yield running


def hold(kubelet: FakeKubelet, item: Object) -> None:
    """Let the kubelet report that a bound pod holds all GPUs."""
    metadata = item["metadata"]
    (logs_of(kubelet) / "_".join(metadata[name] for name in ("namespace", "name", "uid"))).mkdir()
    kubelet.pods = [held(metadata["name"], container("main", *uuids()))]


def logs_of(kubelet: FakeKubelet) -> Path:
    """Return the directory whose entries name the node's pods."""
    return kubelet.socket.with_name("logs")


@asynccontextmanager
async def agent_of(
    world: World, tokens: Tokens, node: str, kubelet: FakeKubelet
) -> AsyncIterator[str]:
    """Run this machine's agent as that of a node; yield its URL."""
    await world.register()
    await tokens.issue_all([node])
    port = free_port()
    process = ServerProcess(
        name="agent",
        command=[sys.executable, "-m", "agent"],
        folder=kubelet.socket.parent,
        ready_url=f"http://127.0.0.1:{port}/healthz",
        environment={
            "IDLEGPU_AGENT_LISTEN": f"127.0.0.1:{port}",
            "IDLEGPU_AGENT_NODE": node,
            "IDLEGPU_AGENT_KUBELET_SOCKET": str(kubelet.socket),
            "IDLEGPU_AGENT_POD_LOGS": str(logs_of(kubelet)),
            "IDLEGPU_AGENT_REPORTS__SERVICE": tokens.address,
            "IDLEGPU_AGENT_REPORTS__TOKEN_FILE": str(tokens.file(node)),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
    )
    try:
        await process.start()
        yield f"http://127.0.0.1:{port}"
    finally:
        await process.stop()


async def start(world: World, tokens: Tokens) -> None:
    """Run extender and kube-scheduler with agents as the only source."""
    services = world.services
    settings: Object = {
        "prometheus": {"url": ""},
        "agents": {**tokens.settings, "hold_seconds": 25, "silence_seconds": 35},
    }
    await services.extender.ensure(merged(SETTINGS, settings))
    await services.ensure_scheduler(
        {**services.scheduler_config(), "podInitialBackoffSeconds": 1, "podMaxBackoffSeconds": 1}
    )


async def first_gpu(world: World, node: str) -> Object | None:
    """Return the extender's view of a node's first GPU."""
    found = [gpu for key, gpu in (await world.gpus()).items() if key[0] == node]
    return next((gpu for gpu in found if gpu["index"] == 0), None)


async def waited_for(world: World, node: str, holds: Callable[[Object], bool]) -> float:
    """Wait until a node's first GPU meets a condition; return the seconds that it took."""
    started = time.monotonic()
    gpu: Object | None = None

    async def does_hold() -> bool:
        nonlocal gpu
        gpu = await first_gpu(world, node)
        return gpu is not None and holds(gpu)

    try:
        await wait_for(does_hold, f"the first GPU of {node} is so")
    except TimeoutError as error:
        raise TimeoutError(f"{error}: it is {gpu}") from error
    return time.monotonic() - started


def is_idle(gpu: Object) -> bool:
    return bool(gpu["state"] == "idle" and gpu["source"] == "agent")


def is_foreign(gpu: Object) -> bool:
    return bool(gpu["state"] == "foreign")


async def foreign_use(agent: str) -> Foreign | None:
    """Return the use of the GPU that its agent attributes to no pod."""
    async with aiohttp.ClientSession() as session, session.get(f"{agent}/v1/report") as response:
        device = decode_report(await response.read()).devices[0]
    return device.foreign if device.foreign and device.foreign.memory_bytes else None


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")


@asynccontextmanager
async def cluster_with(
    world: World, tmp_path: Path, kubelet: FakeKubelet
) -> AsyncIterator[tuple[str, str, str]]:
    """Create a cluster of this machine and a simulated node of the same size.

    Yields both names, and the URL of this machine's agent.
    """
    real, other = (world.add(name, cards=len(uuids())) for name in ("a-real", "b-other"))
    # High enough thresholds for idle GPUs of this machine, without foreign use.
    for index in range(len(uuids())):
        world.fleet.set_utilization(other, index, 0.05)
    async with AsyncExitStack() as stack:
        tokens = await stack.enter_async_context(tokens_of(world, tmp_path))
        await stack.enter_async_context(agents_on(world, tokens, other))
        agent = await stack.enter_async_context(agent_of(world, tokens, real, kubelet))
        await start(world, tokens)
        await waited_for(world, other, is_idle)
        await waited_for(world, real, is_idle)
        yield real, other, agent


async def test_a_real_gpu_that_turns_busy_outside_kubernetes_is_avoided(
    world: World, tmp_path: Path, kubelet: FakeKubelet
) -> None:
    async with cluster_with(world, tmp_path, kubelet) as (real, other, _):
        before = pod("before", len(uuids()))
        assert await world.place(before) == real
        hold(kubelet, await world.client.wait_pod(before, lambda _: True, "is there"))
        await waited_for(world, real, lambda gpu: gpu["tenants"] == ["default/before"])
        await world.client.delete(before)
        kubelet.pods = []
        await waited_for(world, real, lambda gpu: not gpu["tenants"])

        with load(DUTY, HELD_GIB):
            seen = await waited_for(world, real, is_foreign)
            placed = await world.place(pod("after", len(uuids())))
        gone = await waited_for(world, real, is_idle)

    say(f"a foreign process was seen after {seen:.2f} s, and its end after {gone:.2f} s")
    assert placed == other


async def test_a_pod_that_waits_for_a_real_gpu_is_bound_once_it_is_idle(
    world: World, tmp_path: Path, kubelet: FakeKubelet
) -> None:
    async with cluster_with(world, tmp_path, kubelet) as (real, other, _):
        world.fleet.set_utilization(other, 0, 0.9)  # so not all of it is idle
        await waited_for(world, other, is_foreign)
        patient = pod("patient", len(uuids()), annotations=PATIENT)
        with load(DUTY, HELD_GIB):
            await waited_for(world, real, is_foreign)
            await world.client.create(patient)
            why = await world.client.wait_unschedulable(patient)
        seen = await waited_for(world, real, is_idle)
        started = time.monotonic()
        (placed,) = await world.bound([patient])
        took = seen + time.monotonic() - started

    say(f"the end was seen after {seen:.2f} s, the pod bound after {took:.2f} s: {why}")
    assert placed == real


async def test_use_of_a_real_gpu_by_its_holder_is_not_foreign(
    world: World, tmp_path: Path, kubelet: FakeKubelet
) -> None:
    async with cluster_with(world, tmp_path, kubelet) as (real, _, agent):
        mine = pod("mine", len(uuids()))
        assert await world.place(mine) == real
        mine = await world.client.wait_pod(mine, lambda _: True, "is there")
        hold(kubelet, mine)
        held_after = await waited_for(world, real, lambda gpu: gpu["tenants"] == ["default/mine"])
        with pod_cgroup(mine["metadata"]["uid"]) as enter, load(DUTY) as pid:
            enter(pid)
            busy_after = await waited_for(world, real, lambda gpu: gpu["state"] == "busy")
            with load(0.0, HELD_GIB):
                foreign = await wait_for(
                    partial(foreign_use, agent), "foreign use is distinguished"
                )
            gpu = await first_gpu(world, real)

    say(f"its pod was known after {held_after:.2f} s, its use after {busy_after:.2f} s: {foreign}")
    assert gpu is not None
    assert gpu["state"] == "busy"
    assert foreign.memory_bytes is not None
    assert HELD_GIB * GIB <= foreign.memory_bytes < (HELD_GIB + 1) * GIB
