"""The Topology Manager's policy, from the command line of the host's kubelet."""

from pathlib import Path

import pytest

from agent.tenants.kubelet_flags import AGAIN_SECONDS, UNKNOWN, KubeletFlags, read_topology
from testkit.agent.fake_machine import FakeMachine, pod_cgroup

SINGLE = "--topology-manager-policy=single-numa-node"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def start(
    machine: FakeMachine, *arguments: str, cgroup: str = "0::/system.slice/kubelet.service"
) -> None:
    machine.run(900, cgroup, name="kubelet")
    command = "\0".join(["/usr/bin/kubelet", *arguments, ""])
    (machine.proc / "900" / "cmdline").write_text(command)


@pytest.mark.parametrize(
    ("arguments", "topology"),
    [
        pytest.param([SINGLE], ("single-numa-node", ""), id="flag with ="),
        pytest.param(
            ["--topology-manager-policy", "restricted"], ("restricted", ""), id="two words"
        ),
        pytest.param(
            [SINGLE, "--topology-manager-scope=pod"], ("single-numa-node", "pod"), id="pod"
        ),
        pytest.param(["--config=/no/such/file"], UNKNOWN, id="a file that is not mounted"),
        pytest.param(["--topology-manager-scope=pod"], UNKNOWN, id="no policy"),
    ],
)
def test_flags_of_the_kubelet_are_read(
    machine: FakeMachine, arguments: list[str], topology: tuple[str, str]
) -> None:
    start(machine, *arguments)

    assert read_topology(machine.proc) == topology


@pytest.mark.parametrize(
    "text",
    [
        "kind: Kubelet\ntopologyManagerPolicy: restricted\ntopologyManagerScope: pod\n",
        '{\n  "topologyManagerPolicy": "restricted",\n  "topologyManagerScope": "pod"\n}',
    ],
)
def test_kubelet_flag_overrides_its_mounted_configuration_file(
    machine: FakeMachine, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    start(machine, f"--config={file}")
    assert read_topology(machine.proc) == ("restricted", "pod")

    start(machine, "--config", str(file), SINGLE)
    assert read_topology(machine.proc) == ("single-numa-node", "pod")


def test_a_process_in_a_pod_is_not_the_kubelet(machine: FakeMachine) -> None:
    start(machine, SINGLE, cgroup=pod_cgroup("0f6b1c2d-0000-4000-8000-00000000000a"))
    machine.run(901)

    assert read_topology(machine.proc) == UNKNOWN


def test_another_policy_is_seen_after_some_minutes(machine: FakeMachine) -> None:
    now = 0.0
    flags = KubeletFlags(machine.proc, lambda: now)
    assert flags.topology() == UNKNOWN

    start(machine, SINGLE)
    now = AGAIN_SECONDS - 1
    assert flags.topology() == UNKNOWN
    now = AGAIN_SECONDS
    assert flags.topology() == ("single-numa-node", "")
    assert KubeletFlags(None, lambda: now).topology() == UNKNOWN
    assert read_topology(machine.proc / "gone") == UNKNOWN
