"""Test which sources run, what new settings restart, and what the sources report together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.insight.holders import Idleness
from extender.kube.client import KubeClient
from extender.runtime.supervision import Tasks
from extender.server.listener import Listener
from extender.server.readiness import SourceStatus
from extender.server.tls import TlsError
from extender.settings.config import Settings
from extender.sources.agents.source import AgentStatus
from extender.sources.prometheus.source import PrometheusStatus
from extender.sources.source_manager import (
    AGENTS,
    INVENTORY,
    PAST_USE,
    PROMETHEUS,
    SourceManager,
    _agents_state,
    _prometheus_state,
)
from testkit.builders import NOW
from testkit.certificates import issue
from testkit.fake_kube import FakeKube, eventually, running_kube
from testkit.kube_objects import node

PROMETHEUS_URL = {"url": "http://127.0.0.1:9"}
AGENTS_PORT = {"listen": "127.0.0.1:9401"}


class RecordedTasks(Tasks):
    """Records the names of background tasks, and runs none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @override
    def start(
        self, name: str, run: Callable[[], Awaitable[None]], fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        self.calls.append(f"start {name}")

    @override
    async def stop(self, name: str) -> None:
        self.calls.append(f"stop {name}")


class Sources:
    """Sources of a cluster, with their tasks and their fleet."""

    def __init__(self, settings: Settings, client: KubeClient) -> None:
        self.tasks = RecordedTasks()
        self.fleet = Fleet(settings.policy(), lambda: NOW)
        self.manager = SourceManager(
            settings, client, self.fleet, fleet=self.fleet, tasks=self.tasks, clock=lambda: NOW
        )


def settings_of(**changes: Any) -> Settings:
    return Settings.model_validate(changes)


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with running_kube() as server:
        yield server


@pytest.fixture
async def client(kube: FakeKube, tmp_path: Path) -> AsyncIterator[KubeClient]:
    client = await KubeClient.connect(kube.write_kubeconfig(tmp_path / "kubeconfig"))
    yield client
    await client.close()


@contextlib.asynccontextmanager
async def synced(sources: Sources) -> AsyncIterator[SourceManager]:
    """Watch the cluster while the context is open."""
    task = asyncio.create_task(sources.manager.cluster.run(), name="cluster")
    await eventually(lambda: sources.manager.cluster.is_synced)
    yield sources.manager
    task.cancel()
    await asyncio.wait([task])


async def test_agents_report_over_tls_with_a_certificate(
    client: KubeClient, tmp_path: Path
) -> None:
    issue(tmp_path / "tls")
    own = tmp_path / "tls" / "extender"
    files = {"cert_file": own / "tls.crt", "key_file": own / "tls.key"}

    def port_of(**agents: Any) -> Listener:
        source = Sources(settings_of(agents=agents), client).manager.agents
        assert source is not None
        return source.port

    assert port_of(**AGENTS_PORT, **files).is_tls
    assert not port_of(**AGENTS_PORT).is_tls
    absent = dict.fromkeys(files, tmp_path / "absent")
    with pytest.raises(TlsError, match="absent"):
        port_of(**AGENTS_PORT, **absent)
    assert Sources(settings_of(agents=absent), client).manager.agents is None


@pytest.mark.parametrize(
    ("changes", "names", "missing", "ports"),
    [
        ({}, [INVENTORY, PAST_USE], [PROMETHEUS, AGENTS], 0),
        ({"prometheus": PROMETHEUS_URL}, [INVENTORY, PROMETHEUS, PAST_USE], [AGENTS], 0),
        ({"agents": AGENTS_PORT}, [INVENTORY, AGENTS, PAST_USE], [PROMETHEUS], 1),
    ],
    ids=["none", "prometheus", "agents"],
)
async def test_each_source_that_is_set_has_a_task(
    client: KubeClient, changes: dict[str, Any], names: list[str], missing: list[str], ports: int
) -> None:
    sources = Sources(settings_of(**changes), client)

    sources.manager.start(Idleness(sources.fleet, lambda: NOW))

    assert sources.tasks.calls == [f"start {name}" for name in names]
    assert list(sources.manager.unconfigured()) == missing
    assert len(sources.manager.ports) == ports
    assert (sources.manager.agent_status() is None) is (AGENTS in missing)
    assert ("telemetry" in sources.manager.degraded()) is (len(missing) == 2)


BASE: dict[str, Any] = {"prometheus": PROMETHEUS_URL, "agents": AGENTS_PORT}


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({}, []),
        ({"drain_seconds": 1}, []),
        ({"resources": ["a.b/c"]}, [f"stop {INVENTORY}", f"start {INVENTORY}"]),
        ({"cluster": {"group_objects": True}}, [f"stop {INVENTORY}", f"start {INVENTORY}"]),
        ({"agents": {**AGENTS_PORT, "hold_seconds": 7}}, []),
        (
            {"prometheus": {**PROMETHEUS_URL, "interval_seconds": 7}},
            [f"stop {PROMETHEUS}", f"start {PROMETHEUS}"],
        ),
        ({"prometheus": {}}, [f"stop {PROMETHEUS}"]),
    ],
    ids=["nothing", "another", "resources", "cluster", "agents", "prometheus", "no prometheus"],
)
async def test_only_a_source_with_other_settings_is_restarted(
    client: KubeClient, changes: dict[str, Any], calls: list[str]
) -> None:
    sources = Sources(settings_of(**BASE), client)
    before = sources.manager.prometheus

    await sources.manager.adopt(settings_of(**{**BASE, **changes}))

    assert sources.tasks.calls == calls
    url = {**BASE, **changes}["prometheus"].get("url")
    assert sources.manager.prometheus is (before if url else None)


async def test_a_prometheus_that_is_set_later_is_queried(client: KubeClient) -> None:
    sources = Sources(settings_of(), client)

    await sources.manager.adopt(settings_of(prometheus=PROMETHEUS_URL))

    assert sources.manager.prometheus is not None
    assert list(sources.manager.unconfigured()) == [AGENTS]
    assert sources.tasks.calls == [f"stop {PROMETHEUS}", f"start {PROMETHEUS}"]


async def test_agents_are_preferred_for_as_long_as_is_set_now(
    client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    preferred: list[tuple[str, float]] = []
    monkeypatch.setattr(Fleet, "prefer", lambda _, *how: preferred.append(how))
    sources = Sources(settings_of(agents=AGENTS_PORT), client)

    await sources.manager.adopt(settings_of(agents={**AGENTS_PORT, "hold_seconds": 7}))

    assert preferred == [("agent", 25.0), ("agent", 7.0)]


async def test_a_policy_is_applied_once_and_again_after_a_fault(
    client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Sources(settings_of(), client)
    applied: list[float] = []
    is_broken = False
    adopt = Fleet.adopt_in_steps

    def counted(fleet: Fleet, policy: Any) -> Steps[None]:
        applied.append(policy.recent_seconds)
        if is_broken:
            raise ValueError("broken")
        return adopt(fleet, policy)

    monkeypatch.setattr(Fleet, "adopt_in_steps", counted)
    first = settings_of().policy()
    second = replace(first, recent_seconds=60.0)

    await sources.manager.adopt_policy(first)
    await sources.manager.adopt_policy(second)
    await sources.manager.adopt_policy(second)
    assert applied == [60.0]
    is_broken = True
    with pytest.raises(ValueError, match="broken"):
        await sources.manager.adopt_policy(first)
    is_broken = False
    await sources.manager.adopt_policy(second)

    assert applied == [60.0, first.recent_seconds, 60.0]
    assert sources.fleet.policy == second


async def test_first_readings_are_pending_from_prometheus_and_from_nodes_with_gpus(
    kube: FakeKube, client: KubeClient
) -> None:
    kube.put("nodes", node("with"))
    kube.put("nodes", node("without", gpus=0))
    sources = Sources(settings_of(**BASE), client)
    assert list(sources.manager.pending_sources()) == [PROMETHEUS]

    async with synced(sources) as manager:
        assert manager.agents is not None
        assert list(manager.pending_sources()) == [PROMETHEUS, AGENTS]
        assert manager.degraded()["agents"] == "no agent reports"
        manager.agents._by_node["with"] = None  # type: ignore[assignment] # only its name counts

        assert list(manager.pending_sources()) == [PROMETHEUS]


async def test_nodes_are_identified_once_the_cluster_is_known(
    kube: FakeKube, client: KubeClient
) -> None:
    kube.put("nodes", node("n"))
    sources = Sources(settings_of(), client)
    assert sources.manager._node_identity().names == frozenset()

    async with synced(sources) as manager:
        found = manager._node_identity()

        assert set(found.names) == {"n"}
        assert found.addresses == {"10.0.0.1": "n"}
        assert manager._node_identity() is found


async def test_objects_that_cannot_be_read_degrade_their_source(client: KubeClient) -> None:
    manager = Sources(settings_of(**BASE), client).manager
    status = manager.cluster.status["pods"]
    status.last_error = "forbidden"
    status.unreadable_since_list, status.unreadable_names = 1, (("ns", "odd"),)

    assert manager.unreadable() == {"pods": (("ns", "odd"),)}
    degraded = manager.degraded()
    assert degraded["apiserver/pods"] == "forbidden"
    assert "cannot be read" in degraded["apiserver/pods objects"]
    assert degraded["prometheus"] == "no request sent yet"
    assert {"apiserver/nodes objects", "telemetry"}.isdisjoint(degraded)
    assert [one.name for one in manager.states()][-2:] == ["prometheus", "agents"]


@pytest.mark.parametrize(
    ("status", "error", "is_partial", "restarts"),
    [
        (PrometheusStatus(), "no request sent yet", False, 0),
        (PrometheusStatus(rounds=1, worker_starts=1), "", False, 0),
        (PrometheusStatus(rounds=1, last_error="down", worker_starts=3), "down", False, 2),
        (
            PrometheusStatus(rounds=1, failed_queries={"a": "bad", "b": "worse"}),
            "2 queries fail, the signals are missing: a: bad",
            True,
            0,
        ),
        (
            PrometheusStatus(rounds=1, last_error="down", failed_queries={"a": "bad"}),
            "down",
            False,
            0,
        ),
    ],
    ids=["not yet", "good", "failed", "in part", "failed and in part"],
)
def test_the_state_of_prometheus_is_its_last_round(
    status: PrometheusStatus, error: str, is_partial: bool, restarts: int
) -> None:
    status = replace(status, last_success_at=NOW, failures=4, partial_answers=5)

    assert _prometheus_state(status) == SourceStatus(
        name="prometheus",
        last_success_at=NOW,
        failures=4,
        error=error,
        failed_queries=len(status.failed_queries),
        partial_answers=5,
        restarts=restarts,
        is_partial=is_partial,
    )


@pytest.mark.parametrize(
    ("agents", "are_expected", "error"),
    [(0, True, "no agent reports"), (0, False, ""), (1, True, "")],
)
def test_that_no_agent_reports_is_a_problem_where_nodes_have_gpus(
    agents: int, are_expected: bool, error: str
) -> None:
    status = AgentStatus(
        connections=0,
        agents=agents,
        devices=0,
        reports=0,
        unknown_nodes=0,
        refused={"busy": 1, "silent": 2},
        reviews=0,
        contested=0,
        last_at=NOW,
    )

    assert _agents_state(status, are_expected=are_expected) == SourceStatus(
        name="agents", last_success_at=NOW, failures=3, error=error
    )
