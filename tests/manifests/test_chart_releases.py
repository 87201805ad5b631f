"""Install, upgrade, roll back and uninstall a release on a real API server."""

import json
from typing import Final

import pytest

from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import find
from testkit.controlplane.waiting import wait_for
from tests.manifests.chart import REGISTRY, RELEASE, HelmError, Values, rendered
from tests.manifests.releases import Release

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(180)]

SECRET: Final[Object] = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "idlegpu-ca", "namespace": "idlegpu"},
    "stringData": {"tls.key": "what the Job made"},
}
CHANGED: Final[Values] = {
    "images": {"extender": {"tag": "0.2.0"}},
    "extender": {"replicas": 3, "settings": {"strategy": "pack"}},
    "components": ["certs-job", "wake-nodes"],
    "scheduler": {"enabled": True},
}


async def test_a_release_goes_its_way_and_leaves_nothing_behind(release: Release) -> None:
    assert await release.left() == []
    notes = await release.apply("install", {})
    assert "kubectl -n idlegpu get pods" in notes
    shipped = rendered({}, release.folder)
    assert [item for item in shipped if not await release.get(item)] == []
    await release.admin.request("POST", "/api/v1/namespaces/idlegpu/secrets", SECRET)
    installed = await release.spec("Deployment", "idlegpu-extender")
    kept = {name: await identity(release, name) for name in ("Deployment", "Service")}

    # Twice in quick succession, and with another image: an existing Job must not be in the way.
    await release.apply("upgrade", CHANGED)
    await release.apply("upgrade", {**CHANGED, "images": {"extender": {"tag": "0.3.0"}}})

    upgraded = await release.spec("Deployment", "idlegpu-extender")
    assert upgraded["replicas"] == 3
    assert (
        upgraded["template"]["spec"]["containers"][0]["image"]
        == f"{REGISTRY}/idlegpu-extender:0.3.0"
    )
    assert await jobs(release) == {"idlegpu-certs-3"}
    others = of_scheduler(rendered(CHANGED, release.folder))
    assert [item for item in others if not await release.get(item)] == []
    assert await secret_value(release) is not None

    await release.helm("rollback", RELEASE, "1")

    assert await release.spec("Deployment", "idlegpu-extender") == installed
    assert {name: await identity(release, name) for name in kept} == kept
    assert await jobs(release) == {"idlegpu-certs-1"}
    wake = {"kind": "ClusterRole", "apiVersion": "rbac.authorization.k8s.io/v1"}
    assert await release.get({**wake, "metadata": {"name": "idlegpu-extender-wake-nodes"}}) is None
    for item in others:
        assert await gone(release, item)
    assert await secret_value(release) is not None

    await release.helm("uninstall", RELEASE)

    async def is_empty() -> bool:
        return await release.left() == []

    await wait_for(is_empty, "nothing of idlegpu is left", deadline_seconds=90)


async def test_namespaces_that_are_there_already_stay_with_their_certificates(
    release: Release,
) -> None:
    for item in rendered({}, release.folder):
        if item["kind"] == "Namespace":
            await release.admin.create(item)
    await release.admin.request("POST", "/api/v1/namespaces/idlegpu/secrets", SECRET)
    with pytest.raises(HelmError, match="exists and cannot be imported"):
        await release.apply("install", {})

    await release.apply("install", {"namespaces": {"create": False}})
    await release.helm("uninstall", RELEASE)

    assert await secret_value(release) is not None
    for item in rendered({"namespaces": {"create": False}}, release.folder):
        assert await gone(release, item)


def of_scheduler(items: list[Object]) -> list[Object]:
    """Return the objects of the second scheduler, including those in other namespaces."""
    found = [item for item in items if item["metadata"]["name"].startswith("idlegpu-scheduler")]
    assert {"Deployment", "ConfigMap", "ClusterRoleBinding"} <= {item["kind"] for item in found}
    return found


async def gone(release: Release, item: Object) -> bool:
    async def is_gone() -> bool:
        return await release.get(item) is None

    return await wait_for(is_gone, f"{item['kind']} {item['metadata']['name']} is gone")


async def identity(release: Release, kind: str) -> str:
    """Return the UID of the extender's object of a kind, which a new object would not have."""
    item = await release.get(find(rendered({}, release.folder), kind, "idlegpu-extender"))
    assert item is not None
    return json.dumps([item["metadata"]["uid"], item["spec"].get("clusterIP")])


async def jobs(release: Release) -> set[str]:
    """Return the names of the Jobs that are not terminating."""
    path = "/apis/batch/v1/namespaces/idlegpu/jobs"
    items = (await release.admin.request("GET", path))["items"]
    return {
        item["metadata"]["name"] for item in items if not item["metadata"].get("deletionTimestamp")
    }


async def secret_value(release: Release) -> str | None:
    item = await release.get(SECRET)
    return str(item["data"]["tls.key"]) if item else None
