"""A release is installed, upgraded, rolled back and uninstalled on a real API server."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from tests.controlplane.client import ApiClient, ApiError
from tests.controlplane.controllers import WORKLOADS, kube_controller_manager
from tests.controlplane.objects import Object
from tests.controlplane.plane import ControlPlane
from tests.controlplane.waiting import wait_for
from tests.manifests.chart import CHART, RELEASE, HelmError, Values, helm, rendered, values_file
from tests.manifests.shipped import address_of, find

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

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
OURS: Final = "idlegpu"


class Release:
    """The chart's release on one API server."""

    def __init__(self, plane: ControlPlane, admin: ApiClient, folder: Path) -> None:
        self.plane = plane
        self.admin = admin
        self.folder = folder

    async def helm(self, *arguments: str) -> str:
        """Run helm against the API server."""
        kubeconfig = self.plane.kubeconfig()
        run = partial(helm, *arguments, folder=self.folder, kubeconfig=kubeconfig)
        return await asyncio.to_thread(run)

    async def apply(self, verb: str, values: Values) -> str:
        """Install or upgrade with values; return the notes."""
        path = str(values_file(self.folder, values))
        return await self.helm(verb, RELEASE, str(CHART), "--values", path)

    async def get(self, item: Object) -> Object | None:
        """Return an object as the API server has it, None where there is none."""
        try:
            return await self.admin.request("GET", address_of(item))
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def spec(self, kind: str, name: str) -> Object:
        """Return the spec of one of the chart's objects."""
        item = await self.get(find(rendered({}, self.folder), kind, name))
        assert item is not None
        spec: Object = item["spec"]
        return spec

    async def left(self) -> list[str]:
        """Return the names of all objects of ours, of every kind that can be listed."""
        everywhere = await self._names(await self._kinds(), "-A")
        namespaced = await self._kinds("--namespaced=true")
        inside = [await self._names(namespaced, "-n", each) for each in (OURS, f"{OURS}-agent")]
        return [*(name for name in everywhere if OURS in name), *inside[0], *inside[1]]

    async def _kinds(self, *choice: str) -> list[str]:
        kinds = await self.plane.kubectl("api-resources", "--verbs=list", "-o", "name", *choice)
        # Events tell of what was, and go by themselves.
        return [kind for kind in kinds.split() if not kind.startswith("events")]

    async def _names(self, kinds: list[str], *where: str) -> list[str]:
        return (await self.plane.kubectl("get", ",".join(kinds), *where, "-o", "name")).split()


@pytest_asyncio.fixture
async def release(tmp_path: Path) -> AsyncIterator[Release]:
    """A cluster of its own, with the controllers that delete what hangs on other objects."""
    plane = ControlPlane(tmp_path)
    controllers = kube_controller_manager(plane, (*WORKLOADS, "namespace-controller"))
    try:
        await plane.start()
        await controllers.start()
        async with plane.client() as admin:
            yield Release(plane, admin, tmp_path)
    finally:
        controllers.kill()
        plane.stop()


async def test_a_release_goes_its_way_and_leaves_nothing_behind(release: Release) -> None:
    assert await release.left() == []
    notes = await release.apply("install", {})
    assert "kubectl -n idlegpu get pods" in notes
    shipped = rendered({}, release.folder)
    assert [item for item in shipped if not await release.get(item)] == []
    await release.admin.request("POST", "/api/v1/namespaces/idlegpu/secrets", SECRET)
    installed = await release.spec("Deployment", "idlegpu-extender")
    kept = {name: await identity(release, name) for name in ("Deployment", "Service")}

    # Twice at once, and with another image: a Job that is still there must not be in the way.
    await release.apply("upgrade", CHANGED)
    await release.apply("upgrade", {**CHANGED, "images": {"extender": {"tag": "0.3.0"}}})

    upgraded = await release.spec("Deployment", "idlegpu-extender")
    assert upgraded["replicas"] == 3
    assert upgraded["template"]["spec"]["containers"][0]["image"] == "idlegpu-extender:0.3.0"
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
    """Return the objects of the second scheduler, those in other namespaces too."""
    found = [item for item in items if item["metadata"]["name"].startswith("idlegpu-scheduler")]
    assert {"Deployment", "ConfigMap", "ClusterRoleBinding"} <= {item["kind"] for item in found}
    return found


async def gone(release: Release, item: Object) -> bool:
    async def is_gone() -> bool:
        return await release.get(item) is None

    return await wait_for(is_gone, f"{item['kind']} {item['metadata']['name']} is gone")


async def identity(release: Release, kind: str) -> str:
    """Return what would differ if the extender's object of a kind had been made anew."""
    item = await release.get(find(rendered({}, release.folder), kind, "idlegpu-extender"))
    assert item is not None
    return json.dumps([item["metadata"]["uid"], item["spec"].get("clusterIP")])


async def jobs(release: Release) -> set[str]:
    """Return the names of the Jobs that are not on their way out."""
    path = "/apis/batch/v1/namespaces/idlegpu/jobs"
    items = (await release.admin.request("GET", path))["items"]
    return {
        item["metadata"]["name"] for item in items if not item["metadata"].get("deletionTimestamp")
    }


async def secret_value(release: Release) -> str | None:
    item = await release.get(SECRET)
    return str(item["data"]["tls.key"]) if item else None
