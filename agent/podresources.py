"""Asks the kubelet which container of which pod holds which device (pod-resources API, v1).

Needs the directory of the kubelet's socket mounted, not the socket: a restarted kubelet makes a
new one. No process namespace, no API server and no permission is needed.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from h2.exceptions import H2Error
from typing_extensions import override

from agent import podresources_v1_pb2 as v1

DEFAULT_SOCKET: Final = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
DEFAULT_DEADLINE_SECONDS: Final = 2.0
LARGEST_ANSWER_BYTES: Final = 64 << 20
"""A full node of 250 pods answers about 50 KiB; this much is a fault, or somebody else's socket."""

_REMEDIES: Final = MappingProxyType(
    {
        FileNotFoundError: "is the kubelet's directory /var/lib/kubelet/pod-resources mounted?",
        ConnectionRefusedError: "the kubelet that made it is gone: is it starting?",
        PermissionError: "the agent needs to run as root to open it",
    }
)
_STATUS_REMEDIES: Final = MappingProxyType(
    {
        Status.UNIMPLEMENTED: "this kubelet does not offer it",
        Status.RESOURCE_EXHAUSTED: "the kubelet limits calls to 100 a second",
    }
)


class PodResourcesError(Exception):
    """The kubelet did not answer: the message names the call, the socket, cause and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClaim:
    """What a ResourceClaim (Dynamic Resource Allocation) gave a container.

    Attributes:
        driver: such as `gpu.nvidia.com`.
        pool: usually the node's name.
        device: the driver's name for it, such as `gpu-0`.
        cdi_devices: such as `k8s.gpu.nvidia.com/device=gpu-0`.
        claim: `namespace/name` of the ResourceClaim.
    """

    driver: str
    pool: str
    device: str
    cdi_devices: tuple[str, ...]
    claim: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One device, or share of one, that the kubelet gave to one container.

    Attributes:
        namespace, pod, container: who holds it; the kubelet does not say the pod's UID.
        resource: such as `nvidia.com/gpu`; for a claim, the driver's name.
        device_id: as the device plugin calls it (`GPU-…`, `GPU-…::3`, `MIG-…`, `nvidia0/gi1`),
            or the claim's device.
        claim: set where a ResourceClaim gave it.
    """

    namespace: str
    pod: str
    container: str
    resource: str
    device_id: str
    claim: DeviceClaim | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One device, or share of one, that the kubelet may hand out, held or not.

    Attributes:
        numa_nodes: where it is attached, as the device plugin says; empty where it does not.
    """

    resource: str
    device_id: str
    numa_nodes: tuple[int, ...] = ()


class PodResources(Protocol):
    """What the tenants need of the kubelet."""

    async def list(self) -> tuple[Allocation, ...]:
        """Who holds what."""
        ...

    async def allocatable(self) -> tuple[Offer, ...]:
        """What may be handed out."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


_Answer = TypeVar("_Answer", bound=Message)


class PodResourcesClient:
    """A client of one kubelet; connects when first asked, and anew after every failure.

    Example:
        client = PodResourcesClient(DEFAULT_SOCKET)
        allocations = await client.list()
    """

    def __init__(
        self,
        socket: Path = DEFAULT_SOCKET,
        *,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
        largest_answer_bytes: int = LARGEST_ANSWER_BYTES,
    ) -> None:
        self._socket = socket
        self._deadline_seconds = deadline_seconds
        self._codec = _BoundedCodec(largest_answer_bytes)
        self._channel: Channel | None = None

    async def list(self) -> tuple[Allocation, ...]:
        """Every device that a container of this node holds.

        Kubelets before Kubernetes 1.34 name the devices of ended pods too, until they are removed.

        Raises:
            PodResourcesError: no answer within the deadline, or none that can be read.
        """
        answer = await self._ask("List", v1.ListPodResourcesRequest(), v1.ListPodResourcesResponse)
        return tuple(_allocations(answer))

    async def allocatable(self) -> tuple[Offer, ...]:
        """Every healthy device, or share of one, that device plugins registered at the kubelet.

        Raises:
            PodResourcesError: as for `list`.
        """
        answer = await self._ask(
            "GetAllocatableResources",
            v1.AllocatableResourcesRequest(),
            v1.AllocatableResourcesResponse,
        )
        return tuple(
            Offer(
                resource=devices.resource_name,
                device_id=device_id,
                numa_nodes=tuple(node.ID for node in devices.topology.nodes),
            )
            for devices in answer.devices
            for device_id in devices.device_ids
        )

    def close(self) -> None:
        """End the connection; the next question opens another."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def _ask(self, call: str, question: Message, kind: type[_Answer]) -> _Answer:
        if self._channel is None:
            self._channel = Channel(path=str(self._socket), codec=self._codec)
        method = UnaryUnaryMethod(
            self._channel, f"/v1.PodResourcesLister/{call}", type(question), kind
        )
        answered = False
        try:
            async with asyncio.timeout(self._deadline_seconds):
                answer = await method(question)
            answered = True
            return answer
        except GRPCError as error:
            remedy = _STATUS_REMEDIES.get(error.status)
            cause = f"{error.status.name.lower()}: {error.message}"
            raise self._failed(call, cause, remedy) from error
        except TimeoutError as error:
            raise self._failed(call, f"no answer in {self._deadline_seconds:g} s", None) from error
        except OSError as error:
            raise self._failed(call, error.strerror or str(error), _remedy(error)) from error
        except (StreamTerminatedError, H2Error, ProtocolError) as error:
            raise self._failed(call, f"connection lost: {error}", None) from error
        except (DecodeError, _TooLargeError, NotImplementedError) as error:
            raise self._failed(call, f"unreadable answer: {error}", None) from error
        finally:
            if not answered:
                self.close()  # what is left of a broken or late call must not reach the next one

    def _failed(self, call: str, cause: str, remedy: str | None) -> PodResourcesError:
        said = f"cannot ask the kubelet ({call}, {self._socket}): {cause}"
        return PodResourcesError(f"{said}: {remedy}" if remedy else said)


class _TooLargeError(Exception):
    """An answer beyond all sense."""


class _BoundedCodec(CodecBase):
    """Protocol buffers, refused above a size before they are unpacked to many times as much."""

    __content_subtype__ = "proto"

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes

    @override
    def encode(self, message: Message, message_type: type[Message]) -> bytes:
        return message.SerializeToString()

    @override
    def decode(self, data: bytes, message_type: type[Message]) -> Message:
        if len(data) > self._largest_bytes:
            raise _TooLargeError(f"{len(data)} bytes, at most {self._largest_bytes} are read")
        return message_type.FromString(data)


def _remedy(error: OSError) -> str | None:
    for kind, remedy in _REMEDIES.items():
        if isinstance(error, kind):
            return remedy
    return None


def _allocations(answer: v1.ListPodResourcesResponse) -> Iterable[Allocation]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                for device_id in devices.device_ids:
                    yield Allocation(
                        namespace=pod.namespace,
                        pod=pod.name,
                        container=container.name,
                        resource=devices.resource_name,
                        device_id=device_id,
                    )
            for claim in _claims(container):
                yield Allocation(
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=container.name,
                    resource=claim.driver,
                    device_id=claim.device,
                    claim=claim,
                )


def _claims(container: v1.ContainerResources) -> Iterable[DeviceClaim]:
    for dynamic in container.dynamic_resources:
        for resource in dynamic.claim_resources:
            yield DeviceClaim(
                driver=resource.driver_name,
                pool=resource.pool_name,
                device=resource.device_name,
                cdi_devices=tuple(device.name for device in resource.cdi_devices),
                claim=f"{dynamic.claim_namespace}/{dynamic.claim_name}",
            )
