from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.report.contract import Foreign, Process
from agent.tenants.foreign import Attribution, unaccounted_memory_bytes
from testkit.agent.fake_kubelet import FakeKubelet
from testkit.agent.fake_machine import HOST_CGROUP, pod_cgroup
from testkit.agent.fake_node import GIB, TRAINER, World, used


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with FakeKubelet(tmp_path / "kubelet.sock") as kubelet:
        yield World(tmp_path, kubelet)


@pytest.fixture(autouse=True)
async def closed(world: World) -> object:
    yield
    world.tenants.close()
    world.client.close()


async def test_memory_that_holders_processes_do_not_explain_becomes_foreign(world: World) -> None:
    world.hold("trainer")
    world.machine.log("default", "trainer", TRAINER)
    world.machine.run(5, pod_cgroup(TRAINER))
    own = (used(5, 2 * GIB),)
    explained = await world.seconds(3, memory=2 * GIB + GIB // 2, processes=own)

    seen = [(await world.second(memory=40 * GIB, processes=own)).foreign for _ in range(14)]

    assert explained.foreign == Foreign()
    assert seen[:12] == [None] * 12, "a process of graphics is listed later"
    assert seen[12:] == [Foreign(memory_bytes=38 * GIB)] * 2


def test_no_memory_is_foreign_where_processes_use_more_than_the_device_says() -> None:
    own = [(Process(pid=5, memory_bytes=3 * GIB), Attribution.ACCOUNTED)]

    assert unaccounted_memory_bytes(2 * GIB, own) == 0


@pytest.mark.parametrize("own", [(), (Process(pid=5, memory_bytes=None),)], ids=["none", "unknown"])
async def test_foreign_memory_of_a_held_device_is_unknown_without_process_memory(
    world: World, own: tuple[Process, ...]
) -> None:
    world.hold("trainer")
    world.machine.log("default", "trainer", TRAINER)
    world.machine.run(5, pod_cgroup(TRAINER))

    small = await world.second(memory=GIB // 2, busy=0.9, processes=own)
    seen = [(await world.second(memory=40 * GIB, processes=own)).foreign for _ in range(20)]

    assert small.foreign == Foreign()
    assert seen == [None] * 20


async def test_memory_of_system_programs_on_a_held_device_is_explained(world: World) -> None:
    world.hold("trainer")
    world.machine.log("default", "trainer", TRAINER)
    world.machine.run(5, pod_cgroup(TRAINER))
    world.machine.run(50, HOST_CGROUP, name="nvidia-cuda-mps")
    both = (used(5, 2 * GIB), used(50, 20 * GIB, 0.0))

    seen = await world.seconds(20, memory=22 * GIB, processes=both)

    assert seen.foreign == Foreign()
