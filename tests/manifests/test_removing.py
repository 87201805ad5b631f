"""The commands of docs/install.md for removing idlegpu leave no object, on a real API server."""

import json
import re
from collections.abc import Iterable
from typing import Final

import pytest

from extender.effects.waker import _ANNOTATION, _LEASE_NAME, _OBJECT_NAME
from extender.server.certificates.storing import CA_CONFIG_MAP, CA_SECRET, SECRETS
from extender.server.certificates.storing import LEASE_NAME as CERTS_LEASE
from testkit.controlplane.objects import Object, node
from testkit.controlplane.shipped import (
    AGENT_NAMESPACE,
    EXTENDER_NAMESPACE,
    MANIFESTS,
    OVERLAYS,
    ROOT,
    SECOND_SCHEDULER,
    collection_of,
)
from testkit.controlplane.waiting import wait_for
from tests.manifests.chart import RELEASE, Values, rendered
from tests.manifests.releases import Release, guide, guides_commands

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(180)]

INTO_NAMESPACES: Final[Values] = {
    "namespaces": {"create": False},
    "components": ["certs-job", "agent-reports", "wake-nodes"],
    "scheduler": {"enabled": True},
}


def made_by_programs() -> Iterable[Object]:
    """Return all objects that extender, Job and second scheduler create themselves."""
    own, of_agents = EXTENDER_NAMESPACE, AGENT_NAMESPACE
    storage = {"storageClassName": "idlegpu.io-no-storage"}
    for version, kind, namespace, name, more in (
        ("storage.k8s.io/v1", "CSIStorageCapacity", own, _OBJECT_NAME, storage),
        ("coordination.k8s.io/v1", "Lease", own, _LEASE_NAME, {}),
        ("coordination.k8s.io/v1", "Lease", own, CERTS_LEASE, {}),
        ("coordination.k8s.io/v1", "Lease", own, "idlegpu-scheduler", {}),
        ("v1", "Secret", own, CA_SECRET, {}),
        *(("v1", "Secret", own, name, {}) for name in SECRETS.values()),
        ("v1", "ConfigMap", of_agents, CA_CONFIG_MAP, {}),
    ):
        metadata = {"name": name, "namespace": namespace}
        yield {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


async def annotated(release: Release) -> list[str]:
    """Return the nodes with an annotation of idlegpu."""
    nodes = (await release.admin.request("GET", "/api/v1/nodes"))["items"]
    return [
        each["metadata"]["name"]
        for each in nodes
        if any("idlegpu" in name for name in each["metadata"].get("annotations", {}))
    ]


async def is_empty(release: Release) -> None:
    """Wait until no object of idlegpu is left."""

    async def nothing_is_left() -> bool:
        return await release.left() == []

    await wait_for(nothing_is_left, "nothing of idlegpu is left", deadline_seconds=60)


async def test_guide_removes_all_that_an_uninstallation_leaves(release: Release) -> None:
    for item in rendered({}, release.folder):
        if item["kind"] == "Namespace":
            await release.admin.create(item)
    gpu_node = node("gpu-1")
    gpu_node["metadata"]["annotations"] = {_ANNOTATION: "2"}
    await release.admin.create(gpu_node)
    await release.apply("install", INTO_NAMESPACES)
    made = list(made_by_programs())
    for item in made:
        await release.admin.request("POST", collection_of(item), item)
    names = {item["metadata"]["name"] for item in made}

    await release.helm("uninstall", RELEASE)

    async def only_that_stays() -> bool:
        """Return whether only namespaces are left, with the objects that every namespace has."""
        left = [name.partition("/")[2] for name in await release.left()]
        return {name for name in left if name.startswith("idlegpu-")} == {*names, AGENT_NAMESPACE}

    await wait_for(only_that_stays, "what programs have made is left alone", deadline_seconds=60)
    assert await annotated(release) == ["gpu-1"]

    for _, *words in guides_commands("### What stays"):
        await release.plane.kubectl(*words)

    left = {name for name in await release.left() if "idlegpu" in name}
    assert left == {f"namespace/{name}" for name in (EXTENDER_NAMESPACE, AGENT_NAMESPACE)}
    assert await annotated(release) == []


async def test_an_overlay_is_removed_without_rest_and_its_webhook_first(release: Release) -> None:
    overlay = OVERLAYS / "admission"
    for folder in (overlay, SECOND_SCHEDULER):
        await release.plane.kubectl("apply", "-k", str(folder))
    first, *others = guides_commands("## Remove")

    await release.plane.kubectl(*first[1:])

    assert "mutatingwebhookconfiguration" not in json.dumps(await release.left())
    for _, *words in others:
        here = (word.replace("NAME", overlay.name) for word in words)
        await release.plane.kubectl(*(str(ROOT / word) if "/" in word else word for word in here))
    await is_empty(release)


async def test_objects_of_a_wrong_overlay_are_found_by_label(release: Release) -> None:
    await release.plane.kubectl("apply", "-k", str(OVERLAYS / "admission"))
    await release.plane.kubectl("delete", "-k", str(MANIFESTS))
    left = await release.left()
    assert any(name.startswith("mutatingwebhookconfiguration") for name in left)
    (command,) = re.findall(r"`kubectl (delete [^`]*part-of=idlegpu)`", guide())

    await release.plane.kubectl(*command.split())

    await is_empty(release)
