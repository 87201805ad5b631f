"""Reports of agents as shipped: over TLS, with their own tokens, and with the extender's rights."""

import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from agent.config import load as load_agent_settings
from agent.options import ReportOptions
from simulation.agents import REPORTS, run_agents
from testkit.agent.report_server import NAMES, two_nodes
from testkit.controlplane.agents import Tokens
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import node
from testkit.controlplane.process import free_port
from testkit.controlplane.running import CA_PATH, RunningExtender, running_extender
from testkit.controlplane.shipped import (
    AGENT_NAMESPACE,
    MANIFESTS,
    OVERLAYS,
    ROOT,
    built,
    find,
    with_components,
)
from testkit.controlplane.waiting import wait_for
from tests.manifests.issuers import secrets_of_ones_own
from tests.manifests.issuing import ONES_OWN, create

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

AGENT: Final = "idlegpu-agent"
LISTEN, REPORTS_TO = "IDLEGPU_AGENTS_LISTEN", "IDLEGPU_AGENT_REPORTS_SERVICE"


def variables(folder: Path, kind: str, name: str) -> dict[str, str]:
    """Return the environment variables of a workload, except those that the API server fills in."""
    spec = find(built(folder), kind, name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


@pytest.mark.parametrize(
    "folder", [MANIFESTS, *sorted(OVERLAYS.iterdir())], ids=lambda folder: folder.name
)
def test_agents_report_where_a_config_map_has_the_ca_that_they_trust(folder: Path) -> None:
    items = built(folder)
    writers = {
        (item["metadata"]["namespace"], subject["name"])
        for item in items
        if item["kind"] == "RoleBinding"
        for subject in item["subjects"]
    }

    listens = LISTEN in variables(folder, "Deployment", "idlegpu-extender")
    reports = [
        REPORTS_TO in variables(folder, "DaemonSet", item["metadata"]["name"])
        for item in items
        if item["kind"] == "DaemonSet"
    ]

    has_ca = (AGENT_NAMESPACE, "idlegpu-certs") in writers
    assert listens == has_ca
    assert reports == [has_ca] * len(reports)


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """Extender that receives reports as shipped.

    Attributes:
        extender: extender with the rights of its account.
        reports: the agents' options as in the DaemonSet, except for addresses and files.
        tokens: issuer of tokens of the agents' account.
        address: address at which the extender receives reports.
    """

    extender: RunningExtender
    reports: ReportOptions
    tokens: Tokens
    address: str

    async def metrics(self, name: str) -> dict[str, float]:
        """Return the nonzero series of one of the extender's metrics, by labels as written."""
        async with self.extender.server.session() as session, session.get("/metrics") as answer:
            pairs = (line.rpartition(" ") for line in (await answer.text()).splitlines())
            return {
                series.removeprefix(name): float(value)
                for series, _, value in pairs
                if series.partition("{")[0] == name and float(value)
            }


async def with_ones_own(folder: Path, installation: Installation) -> None:
    """Install an organization's certificates, and give agents the CA by the guide's commands."""
    await create(installation, secrets_of_ones_own(ONES_OWN))
    guide = [line.strip() for line in (ROOT / "docs" / "install.md").read_text().splitlines()]
    (reading,) = (line for line in guide if line.endswith("> ca.crt"))
    (writing,) = (line for line in guide if "create configmap" in line)
    program, *words = shlex.split(reading.removesuffix("> ca.crt"))
    (folder / "ca.crt").write_text(await installation.plane.kubectl(*words))
    other, *words = shlex.split(writing.replace("=ca.crt", f"={folder / 'ca.crt'}"))
    await installation.plane.kubectl(*words)
    assert (program, other) == ("kubectl", "kubectl")


@pytest_asyncio.fixture(params=["as shipped", "with certificates of others"])
async def reporting(
    request: pytest.FixtureRequest, installation: Installation, tmp_path: Path
) -> AsyncIterator[Reporting]:
    folder, certify = MANIFESTS, None
    if request.param != "as shipped":
        (tmp_path / "overlay").mkdir()
        folder = with_components(tmp_path / "overlay", ["agent-reports"])
        certify = partial(with_ones_own, tmp_path)
    await installation.apply(folder)
    address = f"127.0.0.1:{free_port()}"
    async with running_extender(installation, tmp_path, {LISTEN: address}, certify) as extender:
        shipped = load_agent_settings(None, variables(folder, "DaemonSet", AGENT)).settings.reports
        assert shipped.ca_file
        ca = await installation.admin.request("GET", CA_PATH)
        ca_file = tmp_path / "trusted.crt"
        ca_file.write_text(ca["data"][shipped.ca_file.name])
        await installation.admin.create_all([node(name, 2) for name in NAMES])
        tokens = Tokens(installation.admin, tmp_path)
        await tokens.prepare()
        await tokens.issue_all(NAMES)
        reports = replace(REPORTS, ca_file=str(ca_file), server_name=shipped.server_name)
        yield Reporting(extender=extender, reports=reports, tokens=tokens, address=address)


async def test_agents_alone_report_their_gpus_to_the_extender(reporting: Reporting) -> None:
    stranger = await reporting.tokens.issue(NAMES[0], account="other")
    own = reporting.tokens.file(NAMES[0]).read_text()
    reporting.tokens.file(NAMES[0]).write_text(stranger)

    async def is_refused() -> bool:
        refused = await reporting.metrics("idlegpu_agent_refusals_total")
        return refused.keys() == {'{reason="wrong-account"}'}

    async with run_agents(
        two_nodes(), NAMES[:1], reporting.address, reporting.tokens.file, reports=reporting.reports
    ):
        await wait_for(is_refused, "another account is refused")
        assert await reporting.metrics("idlegpu_agents") == {}
    reporting.tokens.file(NAMES[0]).write_text(own)

    async def all_report() -> bool:
        gpus = (await reporting.extender.server.get("/v1/gpus"))["gpus"]
        sources = {(gpu["node"], gpu["source"]) for gpu in gpus}
        return sources == {(name, "agent") for name in NAMES}

    async with run_agents(
        two_nodes(), NAMES, reporting.address, reporting.tokens.file, reports=reporting.reports
    ):
        await wait_for(all_report, "each node's GPUs come from its agent")

        assert await is_refused(), "no other reason came"
