"""The doctor checks the rights that the manifests grant."""

from pathlib import Path

import yaml

from extender.cli.doctor.rights import _NEEDS

ROOT = Path(__file__).parents[4]
BASE = "manifests/rbac"
Right = tuple[str, str, str, str, bool]


def granted(file: str, *, is_own: bool) -> set[Right]:
    role = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    return {
        (group, resource, verb, name, is_own)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def needed(manifest: str) -> set[Right]:
    return {
        (need.group, need.resource, verb, need.name, need.is_own)
        for need in _NEEDS
        if need.manifest == manifest
        for verb in need.verbs
    }


def test_the_rights_are_those_of_the_manifests() -> None:
    everywhere = granted(f"{BASE}/cluster-role.yaml", is_own=False)
    here = granted(f"{BASE}/role.yaml", is_own=True)

    assert needed(BASE) == everywhere | here
    for name in ("group-sizes", "wake-nodes", "wake-pods"):
        component = f"manifests/components/{name}"
        assert needed(component) == granted(f"{component}/cluster-role.yaml", is_own=False)


def requested(**settings: object) -> set[str]:
    return {f"{need.resource} {need.name}".strip() for need in _NEEDS if need.when(settings)}


def test_rights_for_disabled_features_are_not_required() -> None:
    assert "csistoragecapacities idlegpu-state" in requested()
    assert "leases idlegpu-wake" in requested(wake={"target": "node"})
    assert "csistoragecapacities idlegpu-state" not in requested(wake={"target": "node"})
    assert "csistoragecapacities idlegpu-state" not in requested(wake={"target": "pod"})
    assert "leases idlegpu-wake" not in requested(wake={"enabled": False})
    assert "jobsets" in requested(cluster={"group_objects": True})
    assert "jobsets" not in requested()
    assert "events" not in requested(events={"enabled": False})
    assert "tokenreviews" not in requested(api={"access": "open"})
