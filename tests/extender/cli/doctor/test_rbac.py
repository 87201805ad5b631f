"""Rights derived from RBAC objects, offline."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from extender.cli.doctor.fact_collector import FactCollector, add_files
from extender.cli.doctor.facts import Facts
from tests.extender.cli.doctor.things import NOW, evidence, found

RBAC: Final = Path(__file__).parents[4] / "manifests" / "rbac"
FILES: Final = ("cluster-role", "cluster-role-binding", "role", "role-binding")


def granted() -> list[dict[str, Any]]:
    """Return the RBAC objects of the manifests as a cluster has them."""
    return [yaml.safe_load((RBAC / f"{name}.yaml").read_text("utf-8")) for name in FILES]


def read(folder: Path, *items: dict[str, Any], account: str = "") -> Facts:
    path = folder / "rbac.json"
    path.write_text(json.dumps({"kind": "List", "items": list(items)}))
    pile = FactCollector()
    pile.account = account or pile.account
    add_files(pile, [str(path)])
    return pile.facts(NOW)


def test_rights_in_the_manifests_suffice(tmp_path: Path) -> None:
    assert found("IG403", read(tmp_path, *granted())) == []


def test_without_a_rule_or_a_binding_the_right_is_missing(tmp_path: Path) -> None:
    role, binding, *rest = granted()
    for rule in role["rules"]:
        rule["verbs"] = [verb for verb in rule["verbs"] if verb != "watch"]

    reported = evidence("IG403", read(tmp_path, role, binding, *rest))
    assert "idlegpu/idlegpu-extender may not watch pods in the whole cluster" in reported
    assert "may not list" not in reported

    binding["subjects"][0]["namespace"] = "elsewhere"
    reported = evidence("IG403", read(tmp_path, role, binding, *rest))
    assert "may not list nodes in the whole cluster" in reported
    assert "leases" not in reported


def test_role_applies_only_to_its_namespace_and_object(tmp_path: Path) -> None:
    first, second, role, binding = granted()
    other = deepcopy(binding)
    other["metadata"]["namespace"] = "elsewhere"
    reported = evidence("IG403", read(tmp_path, first, second, role, other))
    assert "may not create leases.coordination.k8s.io in idlegpu" in reported

    for rule in role["rules"]:
        if rule.get("resourceNames"):
            rule["resourceNames"] = ["another"]
    reported = evidence("IG403", read(tmp_path, first, second, role, binding))
    assert "may not patch leases.coordination.k8s.io idlegpu-wake in idlegpu" in reported


@pytest.mark.parametrize(
    "subject",
    [
        {"kind": "Group", "name": "system:serviceaccounts:idlegpu"},
        {"kind": "User", "name": "system:serviceaccount:idlegpu:idlegpu-extender"},
    ],
)
def test_wildcard_rights_suffice(tmp_path: Path, subject: dict[str, str]) -> None:
    _, binding, *rest = granted()
    binding["subjects"] = [subject]
    binding["roleRef"]["name"] = "everything"
    every = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    role = {"kind": "ClusterRole", "metadata": {"name": "everything"}, "rules": [every]}

    assert found("IG403", read(tmp_path, role, binding, *rest)) == []


def test_another_account_has_other_rights(tmp_path: Path) -> None:
    assert "other/name may not" in evidence(
        "IG403", read(tmp_path, *granted(), account="other/name")
    )


def test_some_of_the_kinds_are_not_enough(tmp_path: Path) -> None:
    facts = read(tmp_path, *granted()[:2])

    assert facts.rights is None
    assert "kubectl get clusterroles,clusterrolebindings" in facts.why_missing("rights")
