import asyncio
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from grpc_tools import protoc

from agent.tenants import kubelet as module
from agent.tenants.kubelet import (
    _TOPOLOGY_SECONDS,
    UNKNOWN_TOPOLOGY,
    Allocation,
    DeviceClaim,
    KubeletFlags,
    PodResourcesClient,
    PodResourcesError,
    _read_topology,
)
from testkit.agent.fake_kubelet import FakeKubelet, container, pod
from testkit.agent.fake_machine import FakeMachine, pod_cgroup
from tests.files import ROOT

SINGLE = "--topology-manager-policy=single-numa-node"


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(tmp_path / "kubelet.sock") as started:
        yield started


@pytest.fixture
async def client(kubelet: FakeKubelet) -> AsyncIterator[PodResourcesClient]:
    async with asking(kubelet.socket) as client:
        yield client


@asynccontextmanager
async def asking(path: Path, *, deadline_seconds: float = 30) -> AsyncIterator[PodResourcesClient]:
    client = PodResourcesClient(path, deadline_seconds=deadline_seconds)
    try:
        yield client
    finally:
        client.close()
        await asyncio.sleep(0)  # a closed transport is released in the next loop iteration


async def test_allocations_list_devices_and_shares_of_every_container(
    kubelet: FakeKubelet, client: PodResourcesClient
) -> None:
    kubelet.pods = [
        pod(
            "trainer",
            container("main", "GPU-1", "GPU-2"),
            container("side", "GPU-3::1", resource="nvidia.com/gpu.shared"),
            namespace="llm",
        ),
        pod("web", container("nginx")),
    ]

    held = await client.list()

    assert [(one.namespace, one.pod, one.container) for one in held] == [
        ("llm", "trainer", "main"),
        ("llm", "trainer", "main"),
        ("llm", "trainer", "side"),
    ]
    assert [one.device_id for one in held] == ["GPU-1", "GPU-2", "GPU-3::1"]


async def test_a_resource_claim_has_the_names_of_its_device(
    kubelet: FakeKubelet, client: PodResourcesClient
) -> None:
    claimed = container("main") | {
        "dynamic_resources": [
            {
                "class_name": "",
                "claim_name": "trainer-gpu",
                "claim_namespace": "llm",
                "claim_resources": [
                    {
                        "cdi_devices": [{"name": "k8s.gpu.nvidia.com/device=gpu-0"}],
                        "driver_name": "gpu.nvidia.com",
                        "pool_name": "node-a",
                        "device_name": "gpu-0",
                        "share_id": "a671734a",
                    }
                ],
            }
        ]
    }
    kubelet.pods = [pod("trainer", claimed, namespace="llm")]

    held = await client.list()

    assert held == (
        Allocation(
            namespace="llm",
            pod="trainer",
            container="main",
            device_id="gpu-0",
            claim=DeviceClaim(device="gpu-0", cdi_devices=("k8s.gpu.nvidia.com/device=gpu-0",)),
        ),
    )


async def test_allocatable_lists_devices_and_shares_by_id(
    kubelet: FakeKubelet, client: PodResourcesClient
) -> None:
    kubelet.allocatable = [
        {"resource_name": "nvidia.com/gpu", "device_ids": ["GPU-1::0", "GPU-1::1"]},
        {
            "resource_name": "nvidia.com/gpu",
            "device_ids": ["GPU-2::0"],
            "topology": {"nodes": [{"ID": 0}, {"ID": 1}]},
        },
    ]

    assert await client.allocatable() == ("GPU-1::0", "GPU-1::1", "GPU-2::0")


async def test_a_missing_socket_names_the_directory_to_mount(tmp_path: Path) -> None:
    client = PodResourcesClient(tmp_path / "absent.sock")

    with pytest.raises(PodResourcesError, match=r"absent\.sock.*No such file.*mounted\?"):
        await client.list()


async def test_a_socket_without_server_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    with pytest.raises(PodResourcesError, match=r"left\.sock.*refused.*is it restarting\?"):
        await PodResourcesClient(path).list()


async def test_a_restarted_kubelet_is_called_over_its_new_socket(
    kubelet: FakeKubelet, client: PodResourcesClient
) -> None:
    kubelet.pods = [pod("first", container("main", "GPU-1"))]
    await client.list()
    kubelet.stop()
    with pytest.raises(PodResourcesError):
        await client.list()

    kubelet.pods = [pod("second", container("main", "GPU-1"))]
    kubelet.start()

    assert [one.pod for one in await client.list()] == ["second"]


async def test_a_call_without_answer_times_out_and_the_next_one_works(kubelet: FakeKubelet) -> None:
    kubelet.before = kubelet.wait_until_released
    async with asking(kubelet.socket, deadline_seconds=0.1) as client:
        with pytest.raises(PodResourcesError, match=r"no answer in 0\.1 s"):
            await client.list()

    kubelet.released.set()
    async with asking(kubelet.socket) as patient:
        assert await patient.list() == ()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        pytest.param(grpc.StatusCode.UNIMPLEMENTED, "does not support the call", id="switched-off"),
        pytest.param(grpc.StatusCode.RESOURCE_EXHAUSTED, "100 a second", id="rate-limit"),
        pytest.param(grpc.StatusCode.INTERNAL, "internal: no", id="fault"),
    ],
)
async def test_a_grpc_error_keeps_the_kubelets_message(
    kubelet: FakeKubelet, client: PodResourcesClient, status: grpc.StatusCode, said: str
) -> None:
    kubelet.before = lambda context: context.abort(status, "no")

    with pytest.raises(PodResourcesError, match=said):
        await client.allocatable()

    kubelet.before = lambda _: None
    assert await client.allocatable() == ()


async def test_an_answer_of_megabytes_is_decoded(
    kubelet: FakeKubelet, client: PodResourcesClient
) -> None:
    kubelet.pods = [
        pod(f"pod-{number:06}", container("main", f"GPU-{number}" * 20)) for number in range(20_000)
    ]

    held = await client.list()

    assert len(held) == 20_000
    assert held[-1].pod == "pod-019999"


async def test_an_answer_above_the_size_limit_is_rejected(kubelet: FakeKubelet) -> None:
    kubelet.pods = [pod("wide", container("main", "GPU-1" * 1_000))]
    client = PodResourcesClient(kubelet.socket, deadline_seconds=30, max_answer_bytes=4_096)

    with pytest.raises(PodResourcesError, match="must be at most 4096 bytes"):
        await client.list()

    kubelet.pods = []
    assert await client.list() == ()
    client.close()
    await asyncio.sleep(0)


async def test_an_answer_with_too_many_devices_is_rejected(
    kubelet: FakeKubelet, client: PodResourcesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_DEVICE_IDS", 2)
    kubelet.pods = [pod("wide", container("main", "GPU-1", "GPU-1", "GPU-1"))]
    kubelet.allocatable = [{"resource_name": "nvidia.com/gpu", "device_ids": ["a", "b", "c"]}]

    with pytest.raises(PodResourcesError, match=r"List.*more than 2 devices"):
        await client.list()
    with pytest.raises(PodResourcesError, match=r"GetAllocatable.*more than 2 devices"):
        await client.allocatable()


def half_an_answer(connection: h2.connection.H2Connection, stream: int) -> None:
    connection.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    connection.send_data(stream, struct.pack(">?I", False, 1_000) + b"only the start")


def not_a_message(connection: h2.connection.H2Connection, stream: int) -> None:
    connection.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    connection.send_data(stream, struct.pack(">?I", False, 4) + b"\xff\xff\xff\xff")
    connection.send_headers(stream, [("grpc-status", "0")], end_stream=True)


def compressed(connection: h2.connection.H2Connection, stream: int) -> None:
    connection.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    connection.send_data(stream, struct.pack(">?I", True, 4) + b"\x1f\x8b\x00\x00")
    connection.send_headers(stream, [("grpc-status", "0")], end_stream=True)


def a_web_page(connection: h2.connection.H2Connection, stream: int) -> None:
    connection.send_headers(stream, [(":status", "404"), ("content-type", "text/html")])
    connection.send_data(stream, b"<html>", end_stream=True)


def half_a_message(connection: h2.connection.H2Connection, stream: int) -> None:
    connection.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
    connection.send_data(stream, b"\0\0")
    connection.send_headers(stream, [("grpc-status", "0")], end_stream=True)


def silence(connection: h2.connection.H2Connection, stream: int) -> None:
    """Close the connection without an answer."""


COMPLETE = (not_a_message, compressed, a_web_page, half_a_message)


@contextmanager
def one_answer(
    path: Path, answer: Callable[[h2.connection.H2Connection, int], None]
) -> Iterator[None]:
    """Serve one HTTP/2 connection and send `answer` to its first request.

    Then close: at once, or after the client has read a complete answer and closed.
    """

    def serve() -> None:
        peer, _ = listening.accept()
        with peer:
            connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
            connection.initiate_connection()
            peer.sendall(connection.data_to_send())
            while True:
                for event in connection.receive_data(peer.recv(65_536)):
                    if isinstance(event, h2.events.StreamEnded):
                        answer(connection, event.stream_id)
                        peer.sendall(connection.data_to_send())
                        while answer in COMPLETE and peer.recv(65_536):
                            pass
                        return

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(10)


@pytest.mark.parametrize(
    "answer", [half_an_answer, half_a_message, not_a_message, compressed, a_web_page, silence]
)
async def test_a_malformed_answer_is_a_clear_error(
    tmp_path: Path, answer: Callable[[h2.connection.H2Connection, int], None]
) -> None:
    with one_answer(tmp_path / "kubelet.sock", answer):
        async with asking(tmp_path / "kubelet.sock") as client:
            with pytest.raises(PodResourcesError, match=r"cannot call the kubelet \(List"):
                await client.list()


async def test_a_kubelet_that_dies_during_a_call_is_a_clear_error(
    kubelet: FakeKubelet, client: PodResourcesClient
) -> None:
    kubelet.before = lambda _: threading.Thread(target=kubelet.stop).start()

    async def ask_until_it_is_gone() -> None:
        while True:  # the server may still have sent its answer
            await client.list()

    with pytest.raises(PodResourcesError):
        await ask_until_it_is_gone()


def test_the_compiled_messages_match_the_proto_file(tmp_path: Path) -> None:
    arguments = ["protoc", f"-I{ROOT}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    assert protoc.main([*arguments, "agent/tenants/podresources_v1.proto"]) == 0

    for suffix in ("py", "pyi"):
        name = f"agent/tenants/podresources_v1_pb2.{suffix}"
        assert (ROOT / name).read_text() == (tmp_path / name).read_text()


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def start(
    machine: FakeMachine,
    *arguments: str,
    cgroup: str = "0::/system.slice/kubelet.service",
    uid: int = 0,
) -> None:
    machine.run(900, cgroup, name="kubelet", uid=uid)
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
        pytest.param(["--config=/no/such/file"], UNKNOWN_TOPOLOGY, id="a file that is not mounted"),
        pytest.param(["--topology-manager-scope=pod"], UNKNOWN_TOPOLOGY, id="no policy"),
    ],
)
def test_flags_of_the_kubelet_are_read(
    machine: FakeMachine, arguments: list[str], topology: tuple[str, str]
) -> None:
    start(machine, *arguments)

    assert _read_topology(machine.proc) == topology


@pytest.mark.parametrize(
    "text",
    [
        "kind: Kubelet\ntopologyManagerPolicy: restricted\ntopologyManagerScope: pod\n",
        '{\n  "topologyManagerPolicy": "restricted",\n  "topologyManagerScope": "pod"\n}',
        '{"kind":"Kubelet","topologyManagerPolicy":"restricted","topologyManagerScope":"pod"}',
    ],
)
def test_kubelet_flag_overrides_its_mounted_configuration_file(
    machine: FakeMachine, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    start(machine, f"--config={file}")
    assert _read_topology(machine.proc) == ("restricted", "pod")

    start(machine, "--config", str(file), SINGLE)
    assert _read_topology(machine.proc) == ("single-numa-node", "pod")


def test_the_last_file_of_the_configuration_directory_counts(
    machine: FakeMachine, tmp_path: Path
) -> None:
    file, folder = tmp_path / "config.json", tmp_path / "config.json.d"
    file.write_text('{"topologyManagerPolicy": "restricted", "topologyManagerScope": "pod"}')
    folder.mkdir()
    for name, policy in (("10-a.conf", "best-effort"), ("20-b.conf", "none"), ("30.yaml", "x")):
        (folder / name).write_text(f"topologyManagerPolicy: {policy}\n")
    start(machine, f"--config={file}", f"--config-dir={folder}")
    assert _read_topology(machine.proc) == ("none", "pod")

    start(machine, f"--config={file}", "--config-dir", str(tmp_path / "not-mounted"))
    assert _read_topology(machine.proc) == ("restricted", "pod")

    start(machine, "--config", str(file), "--config-dir", str(folder), SINGLE)
    assert _read_topology(machine.proc) == ("single-numa-node", "pod")


def test_a_process_in_a_pod_is_not_the_kubelet(machine: FakeMachine) -> None:
    start(machine, SINGLE, cgroup=pod_cgroup("0f6b1c2d-0000-4000-8000-00000000000a"))
    machine.run(901)

    assert _read_topology(machine.proc) == UNKNOWN_TOPOLOGY


def test_a_process_of_another_user_is_not_the_kubelet(machine: FakeMachine) -> None:
    start(machine, SINGLE, uid=1000)

    assert _read_topology(machine.proc) == UNKNOWN_TOPOLOGY


def test_a_pipe_as_configuration_file_is_not_waited_for(
    machine: FakeMachine, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    start(machine, f"--config={tmp_path / 'config.yaml'}", SINGLE)

    assert _read_topology(machine.proc) == ("single-numa-node", "")


@pytest.mark.parametrize("name", ["/" + "a" * 4_000 * 2, "/dev/null", ""])
def test_a_configuration_directory_that_cannot_be_read_counts_as_empty(
    machine: FakeMachine, name: str
) -> None:
    start(machine, f"--config-dir={name}", SINGLE)

    assert _read_topology(machine.proc) == ("single-numa-node", "")


def test_another_policy_is_seen_after_some_minutes(machine: FakeMachine) -> None:
    now = 0.0
    flags = KubeletFlags(machine.proc, lambda: now)
    assert flags.topology() == UNKNOWN_TOPOLOGY

    start(machine, SINGLE)
    now = _TOPOLOGY_SECONDS - 1
    assert flags.topology() == UNKNOWN_TOPOLOGY
    now = _TOPOLOGY_SECONDS
    assert flags.topology() == ("single-numa-node", "")
    assert KubeletFlags(None, lambda: now).topology() == UNKNOWN_TOPOLOGY
    assert _read_topology(machine.proc / "gone") == UNKNOWN_TOPOLOGY
