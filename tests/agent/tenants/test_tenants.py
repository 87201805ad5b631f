import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.report.contract import Foreign, Place, Process, Tenant
from agent.tenants.attribution import DeviceTenants
from agent.tenants.device_holders import DeviceIds
from testkit.agent.fake_kubelet import FakeKubelet, container, pod
from testkit.agent.fake_machine import HOST_CGROUP, pod_cgroup
from testkit.agent.fake_node import GIB, GPU, NOTEBOOK, TRAINER, World, used


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with FakeKubelet(tmp_path / "kubelet.sock") as kubelet:
        yield World(tmp_path, kubelet)


@pytest.fixture(autouse=True)
async def closed(world: World) -> object:
    yield
    world.tenants.close()
    world.client.close()


async def test_a_device_has_its_holders_and_processes(world: World) -> None:
    world.hold("trainer")
    world.machine.log("default", "trainer", TRAINER)
    world.machine.run(4242, pod_cgroup(TRAINER), name="python3")

    seen = await world.second(memory=10 * GIB, busy=0.5, processes=(used(4242),))

    assert seen.allocated_to == (
        Tenant(namespace="default", pod="trainer", container="main", uid=TRAINER),
    )
    assert seen.used_by == (
        Process(
            pid=4242,
            name="python3",
            memory_bytes=10 * GIB,
            utilization_ratio=0.5,
            place=Place.POD,
            uid=TRAINER,
            namespace="default",
            pod="trainer",
            container="main",
        ),
    )
    assert seen.foreign == Foreign()


async def test_a_process_outside_of_kubernetes_is_foreign_at_once(world: World) -> None:
    world.hold("trainer")
    world.machine.run(77, HOST_CGROUP)

    seen = await world.second(memory=10 * GIB, busy=0.9, processes=(used(77, 3 * GIB, 0.9),))

    assert seen.foreign == Foreign(memory_bytes=3 * GIB, utilization_ratio=0.9, pids=(77,))
    assert seen.used_by is not None
    assert seen.used_by[0].place is Place.HOST


async def test_a_pod_on_another_pods_device_is_foreign_after_a_kubelet_call(world: World) -> None:
    world.hold("trainer")
    world.machine.log("default", "trainer", TRAINER)
    world.machine.log("lab", "notebook", NOTEBOOK)
    world.machine.run(1, pod_cgroup(TRAINER))
    world.machine.run(3, pod_cgroup(NOTEBOOK))
    both = (used(1), used(3, 2 * GIB, 0.1))

    first = await world.second(memory=12 * GIB, busy=0.6, processes=both)
    second = await world.second(memory=12 * GIB, busy=0.6, processes=both)

    assert first.foreign is None
    assert second.foreign == Foreign(memory_bytes=2 * GIB, utilization_ratio=0.1, pids=(3,))
    assert second.used_by is not None
    assert (second.used_by[1].namespace, second.used_by[1].pod) == ("lab", "notebook")


async def test_a_pod_newer_than_the_kubelets_answer_is_not_foreign(world: World) -> None:
    await world.second()
    world.hold("trainer")
    world.machine.log("default", "trainer", TRAINER)
    world.machine.run(5, pod_cgroup(TRAINER))

    seen = [await world.second(memory=10 * GIB, busy=0.9, processes=(used(5),)) for _ in range(8)]

    assert seen[0].foreign is None
    assert [one.foreign for one in seen[1:]] == [Foreign()] * 7
    assert world.kubelet.calls.count("List") <= 4


async def test_use_of_a_free_device_is_foreign_even_without_process_data(world: World) -> None:
    world.machine.hide_machine()

    first = await world.second(memory=40 * GIB, busy=0.7, processes=(used(77),))
    second = await world.second(memory=40 * GIB, busy=0.7, processes=(used(77),))

    assert first.foreign is None
    assert second.foreign == Foreign(memory_bytes=40 * GIB, utilization_ratio=0.7)
    assert second.allocated_to == ()


async def test_use_below_the_threshold_on_a_free_device_is_ignored(world: World) -> None:
    for _ in range(3):
        seen = await world.second(memory=GIB // 2, busy=0.02)

        assert seen.foreign == Foreign()


async def test_activity_of_one_signal_is_foreign_only_with_a_foreign_process(world: World) -> None:
    alone = await world.seconds(3, memory=GIB // 2, busy=1.0, is_agreed=False)
    agreed = await world.seconds(3, memory=GIB // 2, busy=1.0)
    world.machine.run(77, HOST_CGROUP)
    process = (used(77, GIB // 4),)
    seen = await world.seconds(3, memory=GIB // 2, busy=1.0, is_agreed=False, processes=process)

    assert alone.foreign == Foreign()
    assert agreed.foreign == Foreign(memory_bytes=GIB // 2, utilization_ratio=1.0)
    assert seen.foreign is not None
    assert seen.foreign.pids == (77,)


async def test_leftovers_of_an_ended_holder_are_not_foreign_at_once(world: World) -> None:
    world.hold("trainer")
    world.machine.log("default", "trainer", TRAINER)
    world.machine.run(5, pod_cgroup(TRAINER))
    busy: dict[str, Any] = {"memory": 10 * GIB, "busy": 0.5, "processes": (used(5),)}
    for _ in range(6):
        await world.second(**busy)

    world.kubelet.pods = []
    seen = [(await world.second(**busy)).foreign for _ in range(12)]

    freed = seen.index(None)
    assert set(seen[:freed]) <= {Foreign()}
    assert seen[freed + 1] is None
    assert seen[-1] == Foreign(memory_bytes=10 * GIB, utilization_ratio=0.5, pids=(5,))


async def test_without_hostpid_processes_are_unknown_and_never_foreign(world: World) -> None:
    world.machine.hide_machine()
    world.machine.run(77, HOST_CGROUP)  # another process with the same pid
    world.hold("trainer")

    seen = await world.seconds(3, memory=10 * GIB, busy=0.5, processes=(used(77),))

    assert seen.foreign is None
    assert seen.used_by == (used(77),)
    assert seen.used_by[0].place is Place.UNKNOWN
    problem = world.tenants.processes_problem
    assert problem is not None
    assert "hostPID: true" in problem.text


async def test_without_the_kubelet_only_host_processes_are_foreign(world: World) -> None:
    world.watch(kubelet=False)
    world.machine.run(1, pod_cgroup(TRAINER))
    world.machine.run(77, HOST_CGROUP)

    in_pod = await world.second(memory=10 * GIB, busy=0.5, processes=(used(1),))
    outside = await world.second(memory=20 * GIB, busy=0.5, processes=(used(1), used(77)))
    unused = await world.second(memory=0, busy=0.0)

    assert (in_pod.allocated_to, in_pod.foreign) == (None, None)
    assert outside.foreign is not None
    assert outside.foreign.pids == (77,)
    assert unused.foreign == Foreign()


async def test_without_both_sources_everything_is_unknown(world: World) -> None:
    world.watch(kubelet=False, processes=False)

    seen = await world.second(memory=10 * GIB, busy=0.5, processes=(used(1),))

    assert seen == DeviceTenants(allocated_to=None, used_by=(used(1),), foreign=None)


async def test_unreadable_memory_of_a_free_device_is_unknown_use(world: World) -> None:
    seen = await world.seconds(3, memory=None, busy=None, processes=None)

    assert (seen.used_by, seen.foreign) == (None, None)


async def test_a_stale_kubelet_answer_is_not_used(world: World) -> None:
    world.hold("trainer")
    assert (await world.second()).allocated_to
    world.kubelet.stop()

    world.now += 30
    shortly = await world.second()
    problem = world.tenants.holders_problem
    world.now += 40
    later = await world.second()

    assert shortly.allocated_to
    assert problem is not None
    assert str(world.kubelet.socket) in problem.text
    assert later.allocated_to is None


async def test_a_device_that_is_not_allocatable_has_unknown_holders(world: World) -> None:
    world.offer("some-plugins-own-name-7")

    seen = await world.seconds(3, memory=40 * GIB, busy=0.9)

    assert (seen.allocated_to, seen.foreign) == (None, None)


async def test_shares_of_one_container_are_one_tenant(world: World) -> None:
    world.kubelet.pods = [
        pod("wide", container("main", f"{GPU}::3", f"{GPU}::0")),
        pod("side", container("init", f"{GPU}::1"), container("main", f"{GPU}::2")),
    ]

    seen = await world.second()

    assert seen.allocated_to is not None
    assert {(one.pod, one.container): one.replicas for one in seen.allocated_to} == {
        ("wide", "main"): ("0", "3"),
        ("side", "init"): ("1",),
        ("side", "main"): ("2",),
    }


async def test_an_unnamed_pod_on_a_held_device_may_be_its_holder(world: World) -> None:
    world.hold("trainer")
    world.machine.run(5, pod_cgroup(TRAINER))  # without a log directory that names the pod

    seen = await world.seconds(3, memory=10 * GIB, busy=0.5, processes=(used(5),))

    assert seen.foreign is None
    assert seen.used_by is not None
    assert (seen.used_by[0].uid, seen.used_by[0].pod) == (TRAINER, "")


async def test_a_process_that_ended_after_being_listed_is_accounted(world: World) -> None:
    world.hold("trainer")

    seen = await world.second(memory=10 * GIB, busy=0.5, processes=(used(999),))

    assert seen.foreign == Foreign()
    assert seen.used_by == (used(999),)


async def test_a_reused_pid_is_looked_up_again(world: World) -> None:
    world.hold("trainer")
    world.machine.log("default", "trainer", TRAINER)
    world.machine.run(5, pod_cgroup(TRAINER), started=1_000)
    before = await world.second(memory=10 * GIB, busy=0.5, processes=(used(5),))

    world.machine.run(5, HOST_CGROUP, started=2_000)
    after = await world.second(memory=10 * GIB, busy=0.5, processes=(used(5),))

    assert before.foreign == Foreign()
    assert after.foreign is not None
    assert after.foreign.pids == (5,)


async def test_a_zombie_is_not_foreign(world: World) -> None:
    world.hold("trainer")
    world.machine.run(77, HOST_CGROUP)
    world.machine.become_zombie(77)

    seen = await world.second(memory=10 * GIB, busy=0.5, processes=(used(77),))

    assert seen.foreign == Foreign()


@pytest.mark.parametrize("command", ["nvidia-cuda-mps", "nv-hostengine"])
async def test_system_programs_are_not_foreign(world: World, command: str) -> None:
    world.machine.run(50, HOST_CGROUP, name=command)

    seen = await world.seconds(3, memory=GIB + GIB // 2, busy=0.0, processes=(used(50, GIB, 0.0),))

    assert seen.foreign == Foreign()


async def test_a_command_may_contain_any_characters(world: World) -> None:
    world.machine.run(50, HOST_CGROUP, name=") Z 1 (a b")

    seen = await world.second(memory=2 * GIB, processes=(used(50, 2 * GIB),))

    assert seen.used_by is not None
    assert seen.used_by[0].name == ") Z 1 (a b"
    assert seen.foreign is not None
    assert seen.foreign.pids == (50,)


async def test_an_instance_is_matched_by_its_mig_uuid(world: World) -> None:
    mig = "MIG-11111111-2222-3333-4444-555555555555"
    world.offer(mig)
    world.device = DeviceIds(key=(GPU, "7"), mig_uuids=(mig,), index=0)
    world.hold("trainer", device_id=f"{mig}::0")

    seen = await world.second()

    assert seen.allocated_to is not None
    assert [(one.pod, one.replicas) for one in seen.allocated_to] == [("trainer", ("0",))]


async def test_random_processes_never_raise(world: World) -> None:
    rng = random.Random(7)
    world.hold("trainer")
    world.machine.log("default", "trainer", TRAINER)
    running: set[int] = set()
    for _ in range(60):
        for pid in rng.sample(range(100, 140), 6):
            if pid in running and rng.random() < 0.5:
                world.machine.end(pid)
                running.discard(pid)
            else:
                cgroup = rng.choice([HOST_CGROUP, pod_cgroup(TRAINER), pod_cgroup(NOTEBOOK)])
                world.machine.run(pid, cgroup, started=rng.randrange(10_000))
                running.add(pid)
        listed = tuple(used(pid, GIB) for pid in rng.sample(range(100, 140), 20))

        seen = await world.second(memory=40 * GIB, busy=0.5, processes=listed)

        assert seen.used_by is not None
        foreign = set() if seen.foreign is None else set(seen.foreign.pids)
        assert foreign >= {one.pid for one in seen.used_by if one.place is Place.HOST}
        assert foreign <= running
