"""Sources of tenants: device ids, the kubelet's answers, pod names, processes."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.report.contract import Place
from agent.tenants import processes
from agent.tenants.attribution import Tenants
from agent.tenants.device_holders import DeviceHolders, DeviceIds, DeviceIndex, _DeviceMatch
from agent.tenants.kubelet import Allocation, DeviceClaim, PodName, PodNames, PodResourcesError
from agent.tenants.processes import ProcessFacts, ProcessTable
from testkit.agent.fake_machine import HOST_CGROUP, FakeMachine, pod_cgroup
from worker_device.process_stat import process_stat, small_file

UUIDS = [f"43202e14-7a41-4c0e-9d53-5e0b8c11000{number}" for number in range(3)]
CARD, PARENT = (f"GPU-{uuid}" for uuid in UUIDS[:2])
MIG = f"MIG-{UUIDS[2]}"
DEVICES = [
    DeviceIds(key=(CARD, ""), index=0),
    DeviceIds(key=(PARENT, "1"), mig_uuids=(MIG,), index=1),
    DeviceIds(key=(PARENT, "5"), mig_uuids=("MIG-other-a", "MIG-other-b"), index=1),
]
WHOLE = (CARD, "")
FIRST, SECOND = (PARENT, "1"), (PARENT, "5")


def claim(device: str, *cdi: str) -> DeviceClaim:
    return DeviceClaim(device=device, cdi_devices=cdi)


@pytest.mark.parametrize(
    ("device_id", "meant"),
    [
        pytest.param(CARD, _DeviceMatch(keys=(WHOLE,)), id="card"),
        pytest.param(CARD.lower(), _DeviceMatch(keys=(WHOLE,)), id="any-letter-case"),
        pytest.param(f"{CARD}::3", _DeviceMatch(keys=(WHOLE,), share="3"), id="share"),
        pytest.param(MIG, _DeviceMatch(keys=(FIRST,)), id="instance"),
        pytest.param(
            f"{MIG}::7", _DeviceMatch(keys=(FIRST,), share="7"), id="share-of-an-instance"
        ),
        pytest.param("MIG-other-b", _DeviceMatch(keys=(SECOND,)), id="second-compute-instance"),
        pytest.param(f"MIG-{PARENT}/5/0", _DeviceMatch(keys=(SECOND,)), id="before-driver-470"),
        pytest.param("nvidia0", _DeviceMatch(keys=(WHOLE,)), id="gke"),
        pytest.param("nvidia0/vgpu1", _DeviceMatch(keys=(WHOLE,), share="vgpu1"), id="gke-share"),
        pytest.param("nvidia1/gi5", _DeviceMatch(keys=(SECOND,)), id="gke-instance"),
        pytest.param(
            "nvidia1/gi5/vgpu2",
            _DeviceMatch(keys=(SECOND,), share="vgpu2"),
            id="gke-instance-share",
        ),
        pytest.param(PARENT, _DeviceMatch(keys=(FIRST, SECOND)), id="card-with-instances"),
        pytest.param(f"{CARD}-4", _DeviceMatch(keys=(WHOLE,), share="4"), id="others-suffix"),
        pytest.param(
            f"{CARD}-_-4", _DeviceMatch(keys=(WHOLE,), share="4"), id="others-longer-suffix"
        ),
        pytest.param("nvidia7", None, id="no-such-card"),
        pytest.param("nvidia" + "1" * 5000, None, id="too-long-for-a-number"),
        pytest.param("nvidia1/gi9", None, id="no-such-instance"),
        pytest.param("GPU-unknown", None, id="unknown-uuid"),
        pytest.param("rdma0", None, id="no-gpu"),
        pytest.param("", None, id="nothing"),
        pytest.param("::", None, id="only-a-separator"),
    ],
)
def test_device_ids_of_all_plugins_are_resolved(device_id: str, meant: _DeviceMatch | None) -> None:
    assert DeviceIndex(DEVICES).find(device_id) == meant


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        pytest.param(claim("gpu-0"), (WHOLE,), id="card"),
        pytest.param(claim("gpu-1-mig-1g.10gb-19-0"), (FIRST, SECOND), id="one-of-the-instances"),
        pytest.param(claim("", "k8s.gpu.nvidia.com/device=gpu-0"), (WHOLE,), id="cdi-name-alone"),
        pytest.param(claim("", f"nvidia.com/gpu={CARD}"), (WHOLE,), id="cdi-name-by-uuid"),
        pytest.param(claim("gpu-1"), None, id="whole-card-that-has-instances-now"),
        pytest.param(claim("channel-0"), None, id="no-device"),
        pytest.param(claim("gpu-" + "1" * 5000), None, id="too-long-for-a-number"),
    ],
)
def test_the_device_of_a_claim_is_resolved(
    given: DeviceClaim, keys: tuple[tuple[str, str], ...] | None
) -> None:
    meant = DeviceIndex(DEVICES).find(given.device, given)

    assert (None if meant is None else meant.keys) == keys


class ScriptedKubelet:
    def __init__(self) -> None:
        self.allocations: tuple[Allocation, ...] | PodResourcesError = ()
        self.offers: tuple[str, ...] | PodResourcesError = ()
        self.calls: list[str] = []

    async def list(self) -> tuple[Allocation, ...]:
        self.calls.append("list")
        if isinstance(self.allocations, PodResourcesError):
            raise self.allocations
        return self.allocations

    async def allocatable(self) -> tuple[str, ...]:
        self.calls.append("allocatable")
        if isinstance(self.offers, PodResourcesError):
            raise self.offers
        return self.offers

    def close(self) -> None:
        self.calls.append("close")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def held_by(pod: str, device_id: str, given: DeviceClaim | None = None) -> Allocation:
    return Allocation(
        namespace="default", pod=pod, container="main", device_id=device_id, claim=given
    )


async def test_the_kubelet_is_called_periodically_and_sooner_on_request() -> None:
    kubelet, clock = ScriptedKubelet(), Clock()
    device_holders = DeviceHolders(kubelet, clock=clock)
    requested = []
    for tick in range(48):  # 12 seconds of 4 passes each
        clock.now = 100 + tick / 4
        if tick >= 30:
            device_holders.request_refresh()
        before = kubelet.calls.count("list")
        await device_holders.refresh()
        if kubelet.calls.count("list") > before:
            requested.append(clock.now - 100)

    assert requested == [0, 5, 7.5, 8.5, 9.5, 10.5, 11.5]
    assert kubelet.calls.count("allocatable") == 1


async def test_the_kubelet_is_called_after_the_clock_is_set_back() -> None:
    kubelet, clock = ScriptedKubelet(), Clock()
    device_holders = DeviceHolders(kubelet, clock=clock)
    await device_holders.refresh()

    clock.now -= 3_600
    await device_holders.refresh()
    device_holders.close()

    assert kubelet.calls == ["list", "allocatable", "list", "close"]


async def test_a_failing_kubelet_is_called_at_the_same_interval_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kubelet, clock = ScriptedKubelet(), Clock()
    kubelet.allocations = PodResourcesError("it is gone")
    device_holders = DeviceHolders(kubelet, clock=clock)
    with caplog.at_level(logging.INFO, "agent.tenants.device_holders"):
        for _ in range(50):
            clock.now += 1
            await device_holders.refresh()
        kubelet.allocations = ()
        for _ in range(2):
            clock.now += 10
            await device_holders.refresh()
        assert device_holders.problem is None
        kubelet.allocations = PodResourcesError("it is gone")
        clock.now += 10
        await device_holders.refresh()

    assert kubelet.calls.count("list") == 13
    assert [(record.message, vars(record)["failures"]) for record in caplog.records] == [
        ("cannot list device holders", 1),
        ("kubelet answers again", 10),
        ("cannot list device holders", 1),
    ]


async def test_held_free_and_unknown_devices_are_distinguished() -> None:
    kubelet, clock = ScriptedKubelet(), Clock()
    kubelet.allocations = (held_by("trainer", MIG),)
    kubelet.offers = (CARD,)
    device_holders = DeviceHolders(kubelet, clock=clock)
    assert device_holders.snapshot(DEVICES) is None
    await device_holders.refresh()

    held = device_holders.snapshot(DEVICES)

    assert held is not None
    assert [one.pod for one in held.holders[FIRST]] == ["trainer"]
    assert held.holders[WHOLE] == ()
    assert SECOND not in held.holders


async def test_the_kubelet_says_how_many_shares_of_each_device_it_offers() -> None:
    kubelet = ScriptedKubelet()
    kubelet.offers = (*(f"{CARD}::{number}" for number in range(4)), MIG, PARENT, "rdma0")
    device_holders = DeviceHolders(kubelet, clock=Clock())
    await device_holders.refresh()

    held = device_holders.snapshot(DEVICES)

    assert held is not None
    assert held.replicas == {WHOLE: 4, FIRST: 1}


async def test_with_claims_or_without_allocatable_every_device_is_known() -> None:
    for given in (claim("gpu-0"), None):
        kubelet = ScriptedKubelet()
        kubelet.allocations = (held_by("trainer", CARD if given is None else "gpu-0", given),)
        kubelet.offers = () if given else PodResourcesError("not offered")
        device_holders = DeviceHolders(kubelet, clock=Clock())
        await device_holders.refresh()

        held = device_holders.snapshot(DEVICES)

        assert held is not None
        assert set(held.holders) == {WHOLE, FIRST, SECOND}


async def test_an_ambiguous_claim_counts_on_every_instance() -> None:
    kubelet = ScriptedKubelet()
    kubelet.allocations = (held_by("trainer", "x", claim("gpu-1-mig-1g.10gb-19-0")),)
    device_holders = DeviceHolders(kubelet, clock=Clock())
    await device_holders.refresh()

    held = device_holders.snapshot(DEVICES)

    assert held is not None
    assert [one.pod for key in (FIRST, SECOND) for one in held.holders[key]] == ["trainer"] * 2
    assert held.holders[WHOLE] == ()


def test_pod_names_come_from_the_kubelets_log_directory(tmp_path: Path) -> None:
    machine, clock = FakeMachine(tmp_path), Clock()
    machine.log("llm", "trainer-0", "uid-1")
    (machine.logs / "lost+found").mkdir()
    names = PodNames(machine.logs, clock=clock)

    assert names.name("uid-1") == PodName(namespace="llm", pod="trainer-0")
    assert names.uid(PodName(namespace="llm", pod="trainer-0")) == "uid-1"

    machine.log("llm", "trainer-0", "uid-2")
    assert names.name("uid-2") is None  # read less than a second ago
    clock.now += 1
    assert names.name("uid-2") == PodName(namespace="llm", pod="trainer-0")
    assert names.uid(PodName(namespace="llm", pod="trainer-0")) == ""


def test_a_recreated_pod_gets_its_new_uid_in_time(tmp_path: Path) -> None:
    machine, clock = FakeMachine(tmp_path), Clock()
    trainer = PodName(namespace="llm", pod="trainer-0")
    machine.log("llm", "trainer-0", "uid-1")
    names = PodNames(machine.logs, clock=clock)
    assert names.uid(trainer) == "uid-1"

    machine.forget_log("llm", "trainer-0", "uid-1")
    machine.log("llm", "trainer-0", "uid-2")
    clock.now += 5

    assert names.uid(trainer) == "uid-2"


def test_the_manifest_hash_of_a_static_pod_is_not_its_api_uid(tmp_path: Path) -> None:
    machine, digest = FakeMachine(tmp_path), "1f0e" * 8
    machine.log("kube-system", "burn-in-gpu-1", digest)
    names = PodNames(machine.logs, clock=Clock())
    burn_in = PodName(namespace="kube-system", pod="burn-in-gpu-1")

    assert names.name(digest) == burn_in
    assert names.uid(burn_in) == ""


def test_without_the_directory_names_are_unknown(tmp_path: Path) -> None:
    for directory in (tmp_path / "absent", None):
        names = PodNames(directory, clock=Clock())

        assert names.name("uid-1") is None
        assert names.uid(PodName(namespace="a", pod="b")) == ""


def look_up(table: ProcessTable, *pids: int) -> dict[int, ProcessFacts]:
    found = table.look_up(pids)
    assert found is not None, "the machine's host processes are not visible"
    return found


def test_processes_are_cached_while_they_are_looked_up(tmp_path: Path) -> None:
    machine, clock = FakeMachine(tmp_path), Clock()
    machine.run(5, HOST_CGROUP)
    table = ProcessTable(machine.proc, clock=clock)

    first = look_up(table, 5, 6)[5]
    clock.now += 1
    again = look_up(table, 5)[5]
    look_up(table)
    forgotten = look_up(table, 5)[5]

    assert first is again
    assert (first.first_seen, forgotten.first_seen) == (100.0, 101.0)


def test_the_name_of_a_process_controls_no_terminal(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.run(5, HOST_CGROUP, name="a\x9b2J\u202eb")

    facts = look_up(ProcessTable(machine.proc, clock=Clock()), 5)[5]

    assert facts.name == "a\ufffd2J\ufffdb"


def test_the_start_of_a_process_is_counted_from_the_boot(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.run(5, HOST_CGROUP, started=1_000)
    ticks = os.sysconf("SC_CLK_TCK")

    def started_at(uptime: str) -> float | None:
        (machine.proc / "uptime").write_text(uptime)
        table = ProcessTable(machine.proc, clock=Clock(), now=lambda: 5000.0)
        return look_up(table, 5)[5].started_at

    assert started_at("300.25 1200.0\n") == round(5000 - 300.25 + 1000 / ticks)
    for odd in ("", "nonsense", "nan 0", "inf 0", "1e999 0"):
        assert started_at(odd) is None


@pytest.mark.parametrize(
    "stat",
    ["", "5", "5 (a) S", "5 (a) S " + "x " * 30, "5 (a) S 1" + "9" * 5000 + " 1" * 30],
    ids=["empty", "short", "cut", "no numbers", "long number"],
)
def test_a_process_whose_file_is_not_the_kernels_is_left_out(tmp_path: Path, stat: str) -> None:
    machine = FakeMachine(tmp_path)
    machine.run(5, HOST_CGROUP)
    (machine.proc / "5" / "stat").write_text(stat)

    assert look_up(ProcessTable(machine.proc, clock=Clock()), 5) == {}


def test_a_process_that_ends_during_the_read_is_left_out(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.run(5, HOST_CGROUP)
    (machine.proc / "5" / "cgroup").unlink()

    assert look_up(ProcessTable(machine.proc, clock=Clock()), 5) == {}


def test_a_pid_reused_during_the_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(tmp_path)
    machine.run(5, HOST_CGROUP, started=1_000)

    def read_late(path: str) -> str | None:
        text = small_file(path)
        if path.endswith("/5/cgroup"):
            machine.run(5, HOST_CGROUP, started=2_000)
        return text

    monkeypatch.setattr(processes, "small_file", read_late)

    assert look_up(ProcessTable(machine.proc, clock=Clock()), 5) == {}


def test_no_process_is_looked_up_if_host_processes_are_hidden(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.run(5, HOST_CGROUP)
    table = ProcessTable(machine.proc, clock=Clock())
    assert set(look_up(table, 5)) == {5}

    machine.hide_machine()

    assert table.look_up([5]) is None


def test_host_visibility_is_checked_once_per_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, clock = FakeMachine(tmp_path), Clock()
    table = ProcessTable(machine.proc, clock=clock)
    names = PodNames(None, clock=clock)
    tenants = Tenants(device_holders=None, processes=table, names=names, clock=clock)
    read: list[str] = []

    def counted(path: str) -> str | None:
        read.append(path)
        return small_file(path)

    monkeypatch.setattr(processes, "small_file", counted)
    tenants.attribute([])

    assert read == [f"{machine.proc}/2/status"]
    assert tenants.processes_problem is None


def test_the_agents_own_pod_is_unknown_in_a_private_namespace(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    (machine.proc / "self" / "cgroup").write_text("0::/\n")
    machine.run(5, "0::/../cri-containerd-ab.scope")
    machine.run(6, pod_cgroup("0f6b1c2d-1111-4222-8333-00000000000a"))

    found = look_up(ProcessTable(machine.proc, clock=Clock()), 5, 6)

    assert [found[pid].location.place for pid in (5, 6)] == [Place.UNKNOWN, Place.POD]


@pytest.mark.parametrize(
    ("name", "parent", "is_host"),
    [("kthreadd", 0, True), ("kthreadd", 1, False), ("sh", 0, False), ("sh", 1, False)],
)
def test_a_hosts_second_process_is_the_kernels_and_has_no_parent(
    tmp_path: Path, name: str, parent: int, *, is_host: bool
) -> None:
    machine = FakeMachine(tmp_path)
    (machine.proc / "2" / "status").write_text(f"Name:\t{name}\nPid:\t2\nPPid:\t{parent}\n")

    assert ProcessTable(machine.proc, clock=Clock()).sees_host() is is_host


def test_a_real_process_is_found_and_a_zombie_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started, own = process_stat(child.pid), process_stat(os.getpid())
        assert started is not None
        assert own is not None
        assert started.started_ticks >= own.started_ticks
        assert started.parent == os.getpid()
        table = ProcessTable(clock=Clock())
        if table.sees_host():
            assert look_up(table, child.pid)[child.pid].started_ticks == started.started_ticks

        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

        assert process_stat(child.pid) is None  # a zombie: ended and not yet waited for
    assert process_stat(child.pid) is None
