"""Reports of real agents to the real source, over real sockets."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from agent.report.contract import LENGTH_BYTES, VERSION, Layout, LayoutDevice, frame
from agent.report.contract import ForeignProcess as ReportedProcess
from extender.core.devices.readings import ForeignProcess, Signal
from extender.sources.agents.refusal import AgentRefusal
from simulation.agents import REPORTS, run_agents
from simulation.devices import PodRef
from simulation.fleet import SimulatedFleet
from testkit.agent.report_server import (
    FLEET_CLOCK,
    NAMES,
    connected,
    eventually,
    farewell,
    report_server,
    two_nodes,
    update,
)
from testkit.agent.reviews import token


@pytest.fixture
def fleet() -> SimulatedFleet:
    return two_nodes()


async def test_readings_of_every_device_arrive(tmp_path: Path, fleet: SimulatedFleet) -> None:
    fleet.set_utilization("gpu-2", 1, 0.75)
    async with (
        report_server(tmp_path) as server,
        run_agents(fleet, NAMES, server.service, server.token_file),
    ):
        await eventually(lambda: all(server.readings_of(name) for name in NAMES))

        assert server.values("gpu-2", Signal.GRAPHICS_ACTIVE) == [0.0, 0.75]
        assert server.values("gpu-1", Signal.GRAPHICS_ACTIVE) == [0.0, 0.0]
        (info, _) = (
            info for info in server.readings_of("gpu-1")[-1].devices if info.node == "gpu-1"
        )
        assert (info.uuid, info.index) == (fleet.card("gpu-1", 0).uuid, 0)


async def test_a_change_is_delivered_at_once_and_unchanged_values_periodically(
    tmp_path: Path, fleet: SimulatedFleet
) -> None:
    slow = replace(REPORTS, heartbeat_seconds=600.0)
    async with (
        report_server(tmp_path) as server,
        run_agents(fleet, ["gpu-1"], server.service, server.token_file, reports=slow),
    ):
        await eventually(lambda: server.readings_of("gpu-1"))
        before = server.source.status().reports
        fleet.set_utilization("gpu-1", 0, 0.9)
        await eventually(lambda: server.values("gpu-1", Signal.GRAPHICS_ACTIVE) == [0.9, 0.0])

        last = server.readings_of("gpu-1")[-1].own
        assert last is not None
        assert "gpu-1" in last.news
        # The second report still has use on a device that no pod holds.
        await eventually(lambda: server.source.status().reports == before + 2)


async def test_pods_that_hold_a_device_arrive_with_their_uids(
    tmp_path: Path, fleet: SimulatedFleet
) -> None:
    fleet.place(PodRef(namespace="ml", name="a", uid="u-1"), "gpu-1", "nvidia.com/gpu")
    async with (
        report_server(tmp_path) as server,
        run_agents(fleet, ["gpu-1"], server.service, server.token_file),
    ):
        await eventually(lambda: server.readings_of("gpu-1"))

        own = server.readings_of("gpu-1")[-1].own
        assert own is not None
        holders = own.holders["gpu-1"]
        assert holders is not None
        assert list(holders.pods.values()) == [("ml/a",)]
        assert holders.uids == {"ml/a": "u-1"}


async def test_reports_of_an_unknown_node_count_once_the_node_is_known(
    tmp_path: Path, fleet: SimulatedFleet
) -> None:
    async with report_server(tmp_path) as server:
        server.known.clear()
        async with run_agents(fleet, ["gpu-1"], server.service, server.token_file):
            await eventually(lambda: server.source.status().unknown_nodes == 1)
            assert server.readings == []
            server.known.add("gpu-1")
            await eventually(lambda: server.readings_of("gpu-1"))
            assert server.source.status().unknown_nodes == 0


async def test_a_token_is_reviewed_once_and_read_again_for_each_connection(
    tmp_path: Path, fleet: SimulatedFleet
) -> None:
    async with report_server(tmp_path, silence_seconds=2) as server:  # noqa: SIM117 - one needs the other
        async with run_agents(fleet, ["gpu-1"], server.service, server.token_file) as agents:
            await eventually(lambda: server.readings_of("gpu-1"))
            agents["gpu-1"].is_dumb = True
            await eventually(lambda: server.refused(AgentRefusal.SILENT) >= 1)
            agents["gpu-1"].is_dumb = False
            before = len(server.readings)
            await eventually(lambda: len(server.readings) > before)
            assert len(server.reviews.requested) == 1

            new = token("gpu-1", expires_at=FLEET_CLOCK() + 7200)
            server.token_file("gpu-1", new)
            agents["gpu-1"].is_dumb = True
            await eventually(lambda: server.refused(AgentRefusal.SILENT) >= 2)
            agents["gpu-1"].is_dumb = False
            await eventually(lambda: server.reviews.requested[1:] == [new])


async def test_a_connection_is_replaced_before_its_token_expires(
    tmp_path: Path, fleet: SimulatedFleet
) -> None:
    async with report_server(tmp_path) as server:
        short = token("gpu-1", expires_at=FLEET_CLOCK() + 3)
        async with run_agents(
            fleet, ["gpu-1"], server.service, lambda node: server.token_file(node, short)
        ):
            await eventually(lambda: server.readings_of("gpu-1"))
            server.token_file("gpu-1")
            await eventually(lambda: len(server.reviews.requested) == 2)

        assert server.refused(AgentRefusal.EXPIRED) == 0


async def test_a_newer_connection_of_a_node_replaces_the_older_one(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        first, _ = await connected(server)
        _, writer = await connected(server)

        assert "another connection" in await farewell(first)
        writer.write(frame(update()))
        await eventually(lambda: server.source.status().reports == 1)
        assert server.source.status().agents == 1


async def test_memory_that_pods_use_on_shared_devices_is_delivered(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        _, writer = await connected(server)

        writer.write(frame(update()))
        writer.write(frame(update(shares=((0, "uid-a", 5), (0, "uid-b", 7)))))
        await eventually(lambda: server.source.status().reports == 2)

        key = ("GPU-1", "")
        assert server.shares == [("gpu-1", ((key, "uid-a", 5), (key, "uid-b", 7)))]


async def test_shares_that_kubelets_offer_are_delivered(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        _, writer = await connected(server)

        def offered() -> list[dict[str, int]]:
            owns = (one.own for one in server.readings_of("gpu-1"))
            return [dict(own.replicas["gpu-1"]) for own in owns if own and own.replicas]

        parts = (LayoutDevice(uuid="GPU-1", replicas=4), LayoutDevice(uuid="GPU-2", replicas=-1))
        writer.write(frame(update(layout=Layout(devices=parts, rows=()), values=b"", is_news=True)))
        await eventually(lambda: offered() == [{"": 4}])


@pytest.mark.parametrize("share", [(1, "uid", 5), (-1, "uid", 5), (0, "uid", -5)])
async def test_invalid_shares_are_refused(tmp_path: Path, share: tuple[int, str, int]) -> None:
    async with report_server(tmp_path) as server:
        reader, writer = await connected(server)

        writer.write(frame(update(shares=(share,))))

        assert "1 shares of memory: must be at most" in await farewell(reader)
        assert server.refused(AgentRefusal.BAD_REPORT) == 1


STRANGER = ReportedProcess(
    device=0, pid=4711, name="python3\x1b", memory_bytes=5, started_at=60.0, container="x.scope"
)


async def test_foreign_processes_count_while_their_agent_is_connected(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        _, writer = await connected(server)

        def shown() -> object:
            return server.foreign.get("gpu-1")

        writer.write(frame(update(foreign=(STRANGER,), is_news=True)))
        process = ForeignProcess(
            pid=4711,
            name="python3\ufffd",
            memory_bytes=5,
            started_at=60.0,
            pod="",
            container="x.scope",
        )
        await eventually(lambda: shown() == {("GPU-1", ""): (process,)})
        writer.write(frame(update(layout=None, is_news=True)))  # unchanged
        await eventually(lambda: server.source.status().reports == 2)
        assert shown() == {("GPU-1", ""): (process,)}
        writer.write(frame(update(is_news=True)))  # a layout without them, as of an older agent
        await eventually(lambda: shown() == {})

        writer.write(frame(update(foreign=(STRANGER,), is_news=True)))
        await eventually(lambda: shown() == {("GPU-1", ""): (process,)})
        writer.transport.abort()
        await eventually(lambda: shown() == {})


@pytest.mark.parametrize(
    "change",
    [{"device": 1}, {"device": -1}, {"pid": 0}, {"pid": 1 << 40}, {"memory_bytes": -1}],
    ids=str,
)
async def test_invalid_foreign_processes_are_refused(
    tmp_path: Path, change: dict[str, int]
) -> None:
    async with report_server(tmp_path) as server:
        reader, writer = await connected(server)

        writer.write(frame(update(foreign=(msgspec.structs.replace(STRANGER, **change),))))

        assert "1 foreign processes: must be at most" in await farewell(reader)
        assert server.refused(AgentRefusal.BAD_REPORT) == 1


def test_old_extender_reads_reports_without_foreign_processes() -> None:
    class Before(msgspec.Struct, kw_only=True, tag_field="version", tag=VERSION):
        """Fields of an update that an extender without process lists needs."""

        node: str
        at: float
        values: bytes = b""

    said = frame(update(foreign=(STRANGER,)))[LENGTH_BYTES:]

    assert msgspec.msgpack.decode(said, type=Before).values == bytes(8)
