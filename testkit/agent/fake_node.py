"""Fake node with one card: a gRPC kubelet, a `/proc` of files, and a clock."""

from pathlib import Path
from typing import Any

from agent.report.contract import Process
from agent.tenants.attribution import DeviceTenants, DeviceUsage, Tenants
from agent.tenants.device_holders import DeviceHolders, DeviceIds
from agent.tenants.kubelet import PodNames, PodResourcesClient
from agent.tenants.processes import ProcessTable
from testkit.agent.fake_kubelet import FakeKubelet, container, pod
from testkit.agent.fake_machine import FakeMachine

GIB = 1 << 30
TRAINER = "0f6b1c2d-1111-4222-8333-00000000000a"
NOTEBOOK = "9d2e7c51-5555-4666-8777-00000000000b"
GPU = "GPU-43202e14-7a41-4c0e-9d53-5e0b8c110004"


class World:
    """Fake node; each pass of the agent advances its clock by one second."""

    def __init__(self, directory: Path, kubelet: FakeKubelet) -> None:
        self.now = 1_000.0
        self.kubelet = kubelet
        self.machine = FakeMachine(directory)
        self.client = PodResourcesClient(kubelet.socket, deadline_seconds=10)
        self.device = DeviceIds(key=(GPU, ""), index=0)
        self.tenants = self.watch()
        self.offer(GPU)

    def watch(self, *, kubelet: bool = True, processes: bool = True) -> Tenants:
        self.tenants = Tenants(
            device_holders=DeviceHolders(self.client, clock=self.clock) if kubelet else None,
            processes=ProcessTable(self.machine.proc, clock=self.clock) if processes else None,
            names=PodNames(self.machine.logs, clock=self.clock),
            clock=self.clock,
        )
        return self.tenants

    def clock(self) -> float:
        return self.now

    def offer(self, *device_ids: str) -> None:
        self.kubelet.allocatable = [
            {"resource_name": "nvidia.com/gpu", "device_ids": [device_id]}
            for device_id in device_ids
        ]

    def hold(self, *names: str, device_id: str = GPU) -> None:
        self.kubelet.pods = [pod(name, container("main", device_id)) for name in names]

    async def second(
        self,
        *,
        memory: int | None = 0,
        busy: float | None = 0.0,
        is_agreed: bool = True,
        processes: tuple[Process, ...] | None = (),
    ) -> DeviceTenants:
        """Run one pass of the agent, a second after the previous one."""
        self.now += 1
        await self.tenants.refresh()
        use = DeviceUsage(
            device=self.device,
            memory_used_bytes=memory,
            utilization_ratio=busy,
            agreed_ratio=busy if is_agreed else None,
            processes=processes,
        )
        return self.tenants.attribute([use])[0]

    async def seconds(self, count: int, **seen: Any) -> DeviceTenants:
        """Run `count` passes and return the result of the last."""
        return [await self.second(**seen) for _ in range(count)][-1]


def used(pid: int, memory: int = 10 * GIB, busy: float | None = 0.5) -> Process:
    return Process(pid=pid, memory_bytes=memory, utilization_ratio=busy)
