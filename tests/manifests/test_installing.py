"""Install and remove every variant on a real API server."""

from pathlib import Path

import pytest

from testkit.controlplane.client import ApiError
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import (
    MANIFESTS,
    OVERLAYS,
    SECOND_SCHEDULER,
    address_of,
    built,
    with_components,
)
from tests.manifests.variants import EVERY_COMPONENT, VARIANTS

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]


async def exists(installation: Installation, item: Object) -> bool:
    try:
        await installation.admin.request("GET", address_of(item))
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


@pytest.mark.parametrize("folder", VARIANTS, ids=lambda folder: folder.name)
async def test_a_variant_passes_a_dry_run_and_is_created(
    installation: Installation, folder: Path
) -> None:
    await installation.add_kinds_of_others()

    await installation.dry_run(folder)
    items = await installation.apply_with_kubectl(folder)

    assert [item for item in items if not await exists(installation, item)] == []


async def versions(installation: Installation, items: list[Object]) -> dict[str, str]:
    return {
        path: (await installation.admin.request("GET", path))["metadata"]["resourceVersion"]
        for path in map(address_of, items)
    }


async def test_all_components_go_together_and_are_removed_without_rest(
    installation: Installation, tmp_path: Path
) -> None:
    await installation.add_kinds_of_others()
    folder = with_components(tmp_path, EVERY_COMPONENT)
    await installation.dry_run(folder)
    items = [
        *await installation.apply_with_kubectl(folder),
        *await installation.apply_with_kubectl(SECOND_SCHEDULER),
    ]

    before = await versions(installation, items)
    await installation.apply_with_kubectl(folder)
    assert await versions(installation, items) == before
    await installation.remove()

    left = [item for item in items if await exists(installation, item)]
    assert {item["kind"] for item in left} == {"Namespace"}


async def test_the_api_server_refuses_a_placeholder(installation: Installation) -> None:
    await installation.apply(MANIFESTS)
    for component, refusal in (
        ("fixed-address", '"FIXED_ADDRESS": must be a valid IP'),
        ("api-proxy", '"API_SERVER_NETWORK": must be a valid CIDR'),
        ("kubelet-root", r"hostPath.path: .* must not contain '\.\.'"),
    ):
        folder = with_components(installation.plane.folder, [component])

        with pytest.raises(RuntimeError, match=refusal):
            await installation.plane.kubectl("apply", "--dry-run=server", "-k", str(folder))


def test_every_component_is_in_some_variant_or_says_how_to_use_it() -> None:
    guide = (MANIFESTS.parent / "docs" / "install.md").read_text()

    assert [name for name in EVERY_COMPONENT if f"`{name}`" not in guide] == []
    assert [path.name for path in OVERLAYS.iterdir() if f"`{path.name}`" not in guide] == []


@pytest.mark.parametrize(
    "folder", [*VARIANTS, SECOND_SCHEDULER], ids=lambda folder: folder.name or "manifests"
)
def test_no_right_waits_for_an_account_that_another_party_creates(folder: Path) -> None:
    items = built(folder)
    accounts = {
        ("ServiceAccount", item["metadata"]["namespace"], item["metadata"]["name"])
        for item in items
        if item["kind"] == "ServiceAccount"
    }

    bound = {
        (subject["kind"], subject.get("namespace", ""), subject["name"])
        for item in items
        for subject in item.get("subjects", [])
    }

    assert bound <= accounts


def test_the_variant_without_agents_has_nothing_of_them() -> None:
    names = {item["metadata"]["name"] for item in built(OVERLAYS / "without-agent")}

    assert not {name for name in names if name.startswith("idlegpu-agent") and name[-1] != "s"}
    assert {item["kind"] for item in built(OVERLAYS / "without-agent")}.isdisjoint({"DaemonSet"})
