"""Reports over TLS, with certificates made by `extender.server.certificates`."""

import asyncio
import logging
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from agent.options import ReportOptions
from extender.server import tls as tls_module
from extender.server.tls import ServerContext, TlsError, follow_certificate
from extender.sources.agents.refusal import AgentRefusal
from simulation.agents import REPORTS, run_agents
from testkit.agent.report_server import NAMES, ReportServer, eventually, report_server, two_nodes
from testkit.certificates import issue, reissue
from testkit.controlplane.waiting import wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issue(tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture(autouse=True)
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "_POLL_SECONDS", 0.02)


def followed(folder: Path) -> ServerContext:
    return follow_certificate(folder / "extender" / "tls.crt", folder / "extender" / "tls.key")


def ca_of(folder: Path) -> str:
    return str(folder / "extender" / "ca.crt")


def over_tls(folder: Path, **changes: Any) -> ReportOptions:
    """Return options of an agent that trusts the CA of a folder."""
    return replace(REPORTS, ca_file=ca_of(folder), **changes)


@asynccontextmanager
async def taking(tmp_path: Path, folder: Path) -> AsyncIterator[ReportServer]:
    """Receive reports over TLS, with a certificate that is reloaded."""
    certificate = followed(folder)
    watched_cluster = asyncio.create_task(certificate.run(), name="certificate")
    try:
        async with report_server(tmp_path, tls=certificate.context) as server:
            yield server
    finally:
        watched_cluster.cancel()
        await asyncio.wait([watched_cluster])


def causes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the causes that agents logged for failed reports."""
    return [
        str(vars(record)["cause"])
        for record in caplog.records
        if record.message == "cannot report to the extender"
    ]


async def test_reports_arrive_over_tls(tmp_path: Path, folder: Path) -> None:
    async with (
        taking(tmp_path, folder) as server,
        run_agents(two_nodes(), NAMES, server.service, server.token_file, reports=over_tls(folder)),
    ):
        await eventually(lambda: all(server.readings_of(name) for name in NAMES))

        assert len(server.reviews.requested) == len(NAMES)


async def test_an_extender_with_another_ca_gets_no_token_and_the_agent_logs_why(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issue(tmp_path / "another")
    reports = over_tls(tmp_path / "another")
    async with (
        taking(tmp_path, folder) as server,
        run_agents(two_nodes(), ["gpu-1"], server.service, server.token_file, reports=reports),
    ):
        await eventually(lambda: causes(caplog))

        assert server.reviews.requested == []
        assert "certificate is not trusted" in causes(caplog)[0]
        assert f"reports.ca_file ({reports.ca_file}) must contain its CA" in causes(caplog)[0]


async def test_certificate_needs_the_service_name_or_the_configured_name(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = partial(run_agents, two_nodes(), ["gpu-1"])
    async with taking(tmp_path, folder) as server:
        stranger = over_tls(folder, server_name="idlegpu-agents.elsewhere.svc")
        async with start(server.service, server.token_file, reports=stranger):
            await eventually(lambda: causes(caplog))
        assert server.reviews.requested == []
        assert "reports.server_name (idlegpu-agents.elsewhere.svc)" in causes(caplog)[0]

        named = over_tls(folder, server_name="localhost")
        async with start(server.service, server.token_file, reports=named):
            await eventually(lambda: server.readings_of("gpu-1"))


async def test_a_ca_file_that_appears_later_is_used_for_the_next_connection(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = tmp_path / "later.crt"
    reports = replace(REPORTS, ca_file=str(later))
    async with (
        taking(tmp_path, folder) as server,
        run_agents(two_nodes(), ["gpu-1"], server.service, server.token_file, reports=reports),
    ):
        await eventually(lambda: causes(caplog))
        assert f"cannot use reports.ca_file {later}" in causes(caplog)[0]

        shutil.copy(ca_of(folder), later)
        await eventually(lambda: server.readings_of("gpu-1"))


async def test_an_agent_without_tls_cannot_report_to_a_tls_port(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        taking(tmp_path, folder) as server,
        run_agents(two_nodes(), ["gpu-1"], server.service, server.token_file),
    ):
        await eventually(lambda: causes(caplog))

        assert server.reviews.requested == []


async def test_an_agent_with_tls_logs_that_the_extender_has_none(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        report_server(tmp_path) as server,
        run_agents(
            two_nodes(), ["gpu-1"], server.service, server.token_file, reports=over_tls(folder)
        ),
    ):
        await eventually(lambda: causes(caplog))

        assert server.reviews.requested == []
        assert "does the extender serve reports over TLS (agents.cert_file)?" in causes(caplog)[0]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_agents_stay_connected_during_certificate_renewal(
    run: Callable[..., None], tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(replace_under_load(tmp_path, folder))

    taken = [record for record in caplog.records if record.message == "connected to the extender"]
    assert len(taken) == len(NAMES)  # each kept its first connection
    assert causes(caplog) == []


async def replace_under_load(tmp_path: Path, folder: Path) -> None:
    files = issue(folder)
    busy = over_tls(folder, heartbeat_seconds=0.0)
    async with (
        taking(tmp_path, folder) as server,
        run_agents(
            two_nodes(), NAMES, server.service, server.token_file, reports=busy, period_seconds=0.02
        ),
    ):
        await eventually(lambda: all(server.readings_of(name) for name in NAMES))
        seen = [await shown_by(server, folder)]
        for _ in range(5):
            reissue(folder, files)
            await wait_for(
                partial(is_another, server, folder, seen), "the new certificate is shown"
            )
            expected = server.source.status().reports + 20
            await eventually(lambda: server.source.status().reports >= expected)  # noqa: B023 - waited for

        assert len(set(seen)) == 6
        assert server.source.status().agents == len(NAMES)
        assert not any(server.source.status().refused.values())


async def is_another(server: ReportServer, folder: Path, seen: list[bytes]) -> bool:
    """Return whether a new connection gets another certificate than the last one."""
    shown = await shown_by(server, folder)
    if shown == seen[-1]:
        return False
    seen.append(shown)
    return True


async def shown_by(server: ReportServer, folder: Path) -> bytes:
    host, port = server.settings.address
    context = ssl.create_default_context(cafile=ca_of(folder))
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        shown: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return shown.getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()


async def test_an_invalid_certificate_is_logged_and_the_old_one_stays(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with taking(tmp_path, folder) as server:
        before = await shown_by(server, folder)
        (folder / "extender" / "tls.key").write_text("nonsense")
        await eventually(lambda: "cannot use new certificates" in caplog.messages)

        assert await shown_by(server, folder) == before
        async with run_agents(
            two_nodes(), ["gpu-1"], server.service, server.token_file, reports=over_tls(folder)
        ):
            await eventually(lambda: server.readings_of("gpu-1"))
        assert server.refused(AgentRefusal.BAD_REQUEST) == 0


def test_invalid_certificate_files_are_named_at_start(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"extender/tls\.crt and .*must be a certificate"):
        followed(tmp_path)
