"""Fake kubelet: a pod-resources server of gRPC's C core on a real unix socket."""

import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import Message
from grpc_tools import protoc

PROTO = Path(__file__).with_name("kubelet_v1.proto")


@cache
def messages() -> Mapping[str, Any]:
    """Compile the kubelet's proto file and return its message classes by name."""
    with tempfile.TemporaryDirectory() as directory:
        compiled = Path(directory) / "kubelet.pb"
        arguments = ["protoc", f"-I{PROTO.parent}", f"--descriptor_set_out={compiled}", PROTO.name]
        assert protoc.main(arguments) == 0
        found = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    return message_factory.GetMessages(found.file, pool=descriptor_pool.DescriptorPool())


def container(name: str, *device_ids: str, resource: str = "nvidia.com/gpu") -> dict[str, Any]:
    """Build a container as JSON, with one entry and a NUMA node for each device."""
    return {
        "name": name,
        "devices": [
            {
                "resource_name": resource,
                "device_ids": [device_id],
                "topology": {"nodes": [{"ID": 1}]},
            }
            for device_id in device_ids
        ],
        "cpu_ids": [2, 3],
        "memory": [{"memory_type": "memory", "size": 1 << 30}],
    }


def pod(name: str, *containers: dict[str, Any], namespace: str = "default") -> dict[str, Any]:
    return {"name": name, "namespace": namespace, "containers": list(containers)}


class FakeKubelet:
    """Pod-resources server that answers with `pods` and `allocatable`, after calling `before`."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.pods: list[dict[str, Any]] = []
        self.allocatable: list[dict[str, Any]] = []
        self.before: Callable[[grpc.ServicerContext], None] = lambda _: None
        self.calls: list[str] = []
        self.released = threading.Event()
        self._server: grpc.Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.stop()

    def start(self) -> None:
        """Start serving; replace the socket of an earlier server, as the kubelet does."""
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=4), options=[("grpc.max_send_message_length", -1)]
        )
        kinds = messages()
        handlers = {
            "List": self._handler("List", kinds["v1.ListPodResourcesResponse"], self._list),
            "GetAllocatableResources": self._handler(
                "GetAllocatableResources", kinds["v1.AllocatableResourcesResponse"], self._offers
            ),
        }
        service = grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers)
        self._server.add_generic_rpc_handlers((service,))
        assert self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(grace=None).wait()
            self._server = None

    def wait_until_released(self, _: grpc.ServicerContext) -> None:
        """Block the caller; for use as `before`."""
        self.released.wait()

    def _handler(
        self, name: str, kind: type[Message], content: Callable[[], dict[str, Any]]
    ) -> grpc.RpcMethodHandler:
        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            self.calls.append(name)
            self.before(context)
            return json_format.ParseDict(content(), kind()).SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)

    def _list(self) -> dict[str, Any]:
        return {"pod_resources": self.pods}

    def _offers(self) -> dict[str, Any]:
        return {"devices": self.allocatable}
