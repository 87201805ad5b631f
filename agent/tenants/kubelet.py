"""Read the kubelet's data: holders of devices, policy of its Topology Manager, names of pods.

- The pod-resources API (v1) lists the containers that hold each device. Mount the directory of the
  kubelet's socket, not the socket: a restarted kubelet creates a new one.
- No API returns the policy of the Topology Manager without further rights. A command line in
  `/proc` is readable by all processes, and so is the kubelet's configuration file if it is mounted
  under its own path.
- The kubelet's log directory has a directory `<namespace>_<name>_<uid>` for every pod of the node.
  Only the names of these directories are read, never a log file.

Nothing here needs access to the API server or an RBAC permission.
"""

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Protocol, TypeVar

from google.protobuf.message import Message
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from h2.exceptions import H2Error
from typing_extensions import override

from agent.report.contract import Place
from agent.tenants import podresources_v1_pb2 as v1
from agent.tenants.processes import parse_cgroup
from extender.runtime.decoding import MalformedError, decode_with
from worker_device.process_stat import process_stat, small_file

_DEFAULT_DEADLINE_SECONDS: Final = 2.0
_MAX_ANSWER_BYTES: Final = 8 << 20
_MAX_DEVICE_IDS: Final = 100_000
"""Limits of an answer: a node with 250 pods answers about 50 KiB, and 16 cards with a thousand
shares each have 16,000 ids. The agent may use 160 MiB."""

_REMEDIES: Final = {
    FileNotFoundError: "is the kubelet's directory /var/lib/kubelet/pod-resources mounted?",
    ConnectionRefusedError: "the kubelet that created it has stopped: is it restarting?",
    PermissionError: "the agent must run as root to open it",
}
_STATUS_REMEDIES: Final = {
    Status.UNIMPLEMENTED: "this kubelet does not support the call",
    Status.RESOURCE_EXHAUSTED: "the kubelet limits calls to 100 a second",
}

_Answer = TypeVar("_Answer", bound=Message)
_Item = TypeVar("_Item")

_KUBELET: Final = "kubelet"
_OF_ROOT: Final = re.compile(r"^Uid:\t0\t", re.MULTILINE)
"""Line of `/proc/<pid>/status` with the real uid. The folder's owner is root also for a process
that forbids core dumps."""
_TOPOLOGY_SECONDS: Final = 300.0
"""Interval of reads: the policy changes only when the kubelet restarts."""

_TOPOLOGY_FLAG: Final = re.compile(
    r"--(topology-manager-policy|topology-manager-scope|config|config-dir)(?:=(.*))?"
)
_TOPOLOGY_FIELD: Final = re.compile(
    r"""(?:^|[{,])\s*["']?topologyManager(Policy|Scope)["']?:\s*["']?([a-z-]+)""", re.MULTILINE
)

Topology = tuple[str, str]
"""Policy and scope of the Topology Manager in the kubelet's words; "" if unknown."""

UNKNOWN_TOPOLOGY: Final[Topology] = ("", "")

_POD_NAMES_SECONDS: Final = 1.0
_POD_UIDS_SECONDS: Final = 5.0  # the interval of kubelet calls; reading 250 pods takes 0.4 ms

_MANIFEST_HASH: Final = re.compile(r"[0-9a-f]{32}")
"""UID of a static pod on its node; its mirror pod in the API server has another UID."""


class PodResourcesError(Exception):
    """The kubelet did not answer; the message names call, socket, cause and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClaim:
    """A device that a ResourceClaim (Dynamic Resource Allocation) allocated to a container.

    Attributes:
        device: the DRA driver's name for the device, such as `gpu-0`.
        cdi_devices: CDI device names, such as `k8s.gpu.nvidia.com/device=gpu-0`.
    """

    device: str
    cdi_devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A device, or a share of a device, that the kubelet allocated to one container.

    Attributes:
        namespace, pod, container: the holder; the kubelet does not report the pod's UID.
        device_id: the device plugin's id (`GPU-…`, `GPU-…::3`, `MIG-…`, `nvidia0/gi1`), or the
            claim's device.
        claim: the ResourceClaim that allocated the device, None for a device plugin.
    """

    namespace: str
    pod: str
    container: str
    device_id: str
    claim: DeviceClaim | None = None


class PodResources(Protocol):
    """The calls of the pod-resources API that the agent makes."""

    async def list(self) -> tuple[Allocation, ...]:
        """Return the current allocations."""
        ...

    async def allocatable(self) -> tuple[str, ...]:
        """Return the ids of the devices that the kubelet can allocate, held or free."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class PodResourcesClient:
    """Client of one kubelet; connects on the first call, and again after every failure.

    Args:
        deadline_seconds: time limit of a call.
        max_answer_bytes: larger answers are rejected.

    Example:
        client = PodResourcesClient(Path("/var/lib/kubelet/pod-resources/kubelet.sock"))
        allocations = await client.list()
    """

    def __init__(
        self,
        socket: Path,
        *,
        deadline_seconds: float = _DEFAULT_DEADLINE_SECONDS,
        max_answer_bytes: int = _MAX_ANSWER_BYTES,
    ) -> None:
        self._socket = socket
        self._deadline_seconds = deadline_seconds
        self._codec = _BoundedCodec(max_answer_bytes)
        self._channel: Channel | None = None

    async def list(self) -> tuple[Allocation, ...]:
        """Return every device that a container of this node holds.

        Kubelets before Kubernetes 1.34 also list devices of ended pods until the pods are removed.

        Raises:
            PodResourcesError: no answer within the deadline, or an answer that cannot be decoded.
        """
        answer = await self._call("List", v1.ListPodResourcesRequest(), v1.ListPodResourcesResponse)
        return self._bounded("List", _allocations(answer))

    async def allocatable(self) -> tuple[str, ...]:
        """Return the ids of all healthy devices and shares that device plugins have registered.

        Raises:
            PodResourcesError: as for `list`.
        """
        answer = await self._call(
            "GetAllocatableResources",
            v1.AllocatableResourcesRequest(),
            v1.AllocatableResourcesResponse,
        )
        device_ids = (one for devices in answer.devices for one in devices.device_ids)
        return self._bounded("GetAllocatableResources", device_ids)

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _bounded(self, call: str, items: Iterable[_Item]) -> tuple[_Item, ...]:
        """Return the items of an answer.

        Raises:
            PodResourcesError: there are too many.
        """
        found = tuple(islice(items, _MAX_DEVICE_IDS + 1))
        if len(found) > _MAX_DEVICE_IDS:
            raise self._failed(call, f"more than {_MAX_DEVICE_IDS} devices", None)
        return found

    async def _call(self, call: str, request: Message, kind: type[_Answer]) -> _Answer:
        if self._channel is None:
            self._channel = Channel(path=str(self._socket), codec=self._codec)
        method = UnaryUnaryMethod(
            self._channel, f"/v1.PodResourcesLister/{call}", type(request), kind
        )
        is_answered = False
        try:
            async with asyncio.timeout(self._deadline_seconds):
                answer = await method(request)
            is_answered = True
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
        # grpclib asserts that a server keeps to the protocol.
        except (MalformedError, _TooLargeError, NotImplementedError, AssertionError) as error:
            cause = str(error) or "half a message"
            raise self._failed(call, f"unreadable answer: {cause}", None) from error
        finally:
            if not is_answered:
                self.close()  # the rest of a broken or late answer must not reach the next call

    def _failed(self, call: str, cause: str, remedy: str | None) -> PodResourcesError:
        message = f"cannot call the kubelet ({call}, {self._socket}): {cause}"
        return PodResourcesError(f"{message}: {remedy}" if remedy else message)


class _TooLargeError(Exception):
    """An answer exceeds the size limit."""


class _BoundedCodec(CodecBase):
    """Protocol Buffers codec that rejects large messages before decoding multiplies their size."""

    __content_subtype__ = "proto"

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes

    @override
    def encode(self, message: Message, message_type: type[Message]) -> bytes:
        return message.SerializeToString()

    @override
    def decode(self, data: bytes, message_type: type[Message]) -> Message:
        if len(data) > self._largest_bytes:
            raise _TooLargeError(f"{len(data)} bytes: must be at most {self._largest_bytes} bytes")
        return decode_with(message_type.FromString, data)


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
                        device_id=device_id,
                    )
            for claim in _claims(container):
                yield Allocation(
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=container.name,
                    device_id=claim.device,
                    claim=claim,
                )


def _claims(container: v1.ContainerResources) -> Iterable[DeviceClaim]:
    for dynamic in container.dynamic_resources:
        for resource in dynamic.claim_resources:
            yield DeviceClaim(
                device=resource.device_name,
                cdi_devices=tuple(device.name for device in resource.cdi_devices),
            )


class KubeletFlags:
    """Reads the kubelet's policy periodically.

    Args:
        proc: mount point of the host's `/proc`, None if it is not read.
        clock: monotonic time in seconds.
    """

    def __init__(self, proc: Path | None, clock: Callable[[], float]) -> None:
        self._proc = proc
        self._clock = clock
        self._read_at: float | None = None
        self._topology = UNKNOWN_TOPOLOGY

    def topology(self) -> Topology:
        """Return the policy and scope as last read."""
        now = self._clock()
        if self._proc is not None and (
            self._read_at is None or now - self._read_at >= _TOPOLOGY_SECONDS
        ):
            self._read_at, self._topology = now, _read_topology(self._proc)
        return self._topology


def _read_topology(proc: Path) -> Topology:
    """Return the policy and scope of the host's kubelet, `UNKNOWN_TOPOLOGY` if none is named.

    Args:
        proc: mount point of the host's `/proc`.
    """
    arguments = next(_command_lines(proc), ("",))
    flags: dict[str, str] = {}
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=True):
        found = _TOPOLOGY_FLAG.fullmatch(argument)
        if found is not None:
            flags[found[1]] = found[2] or following
    # Flags count before the files of `--config-dir`, and of these the last one.
    files = [flags["config"]] if "config" in flags else []
    files += _config_files(flags["config-dir"]) if "config-dir" in flags else []
    fields: dict[str, str] = {}
    for file in files:
        fields |= _TOPOLOGY_FIELD.findall(small_file(file) or "")
    policy = flags.get("topology-manager-policy") or fields.get("Policy", "")
    scope = flags.get("topology-manager-scope") or fields.get("Scope", "")
    return (policy, scope) if policy else UNKNOWN_TOPOLOGY


def _config_files(directory: str) -> list[str]:
    """Return the paths of a directory's configuration files, [] if it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.path for entry in entries if entry.name.endswith(".conf"))
    except OSError:
        return []


def _command_lines(proc: Path) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of root's processes named kubelet that run in no pod.

    Any user of the node may give a process this name, and a command line names files to open.
    """
    try:
        pids = [int(path.name) for path in proc.iterdir() if path.name.isdecimal()]
    except OSError:
        return
    for pid in sorted(pids):
        stat = process_stat(pid, proc)
        if stat is None or stat.name != _KUBELET:
            continue
        if not _OF_ROOT.search(small_file(f"{proc}/{pid}/status") or ""):
            continue
        in_pod = parse_cgroup(small_file(f"{proc}/{pid}/cgroup") or "").place is Place.POD
        if not in_pod:
            yield tuple((small_file(f"{proc}/{pid}/cmdline") or "").split("\0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodName:
    """Namespace and name of a pod."""

    namespace: str
    pod: str


class PodNames:
    """Names of this node's pods by UID, and UIDs by name.

    An unknown UID or name triggers a new read of the directory. The name of a UID never changes.
    But a StatefulSet recreates pods under the same name, so UIDs are read again periodically.

    Args:
        directory: the kubelet's log directory; None to look up nothing.
        clock: monotonic time in seconds.
    """

    def __init__(self, directory: Path | None, *, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._names: dict[str, PodName] = {}
        self._uids: dict[PodName, list[str]] = {}
        self._read_at: float | None = None

    def name(self, uid: str) -> PodName | None:
        """Return the name of a pod; None if the directory is missing or does not list the UID."""
        if uid not in self._names:
            self._read_after(_POD_NAMES_SECONDS)
        return self._names.get(uid)

    def uid(self, name: PodName) -> str:
        """Return the UID of a pod in the API server.

        Returns "" if the UID is unknown, if several pods have had the name, or if the pod is
        static.
        """
        is_known = name in self._uids
        self._read_after(_POD_UIDS_SECONDS if is_known else _POD_NAMES_SECONDS)
        uids = self._uids.get(name, ())
        return uids[0] if len(uids) == 1 and not _MANIFEST_HASH.fullmatch(uids[0]) else ""

    def _read_after(self, seconds: float) -> None:
        """Read the directory if the last read is at least `seconds` ago."""
        now = self._clock()
        if self._directory is None or (self._read_at is not None and now - self._read_at < seconds):
            return
        self._read_at = now
        try:
            entries = [entry.name for entry in self._directory.iterdir()]
        except OSError:
            return
        self._names = {
            parts[2].lower(): PodName(namespace=parts[0], pod=parts[1])
            for entry in entries
            if len(parts := entry.split("_")) == 3  # noqa: PLR2004 - namespace, name and UID have no "_"
        }
        self._uids = {}
        for uid, name in self._names.items():
            self._uids.setdefault(name, []).append(uid)
