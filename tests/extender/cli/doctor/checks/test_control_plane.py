"""Checks of kube-scheduler's address for the extender, and of its version."""

from typing import Any

import pytest

from extender.cli.commands.doctor import CHECKS
from extender.cli.doctor.facts import Facts
from extender.cli.doctor.findings import examine
from tests.extender.cli.doctor.described import second_scheduler, service
from tests.extender.cli.doctor.things import (
    NOW,
    entry,
    evidence,
    found,
    kube_scheduler,
    scheduler,
    severities,
)

ADDRESS = "10.96.0.88"


def calling(prefix: str, *, known: bool = True) -> Facts:
    configured = (scheduler(entry(urlPrefix=prefix)),)
    return Facts(at=NOW, schedulers=configured, services=(service(ADDRESS),) if known else None)


@pytest.mark.parametrize("host", ["FIXED_ADDRESS", "192.0.2.7", "[2001:db8::1]", "10.96.0.3"])
def test_an_address_that_is_not_the_services_is_found(host: str) -> None:
    facts = calling(f"https://{host}:8888")

    assert severities("IG010", facts) == ["error"]
    wrong = "another address than" if host == "10.96.0.3" else "a placeholder instead of"
    assert f"kube-scheduler calls {wrong}" in found("IG010", facts)[0].what
    assert host in evidence("IG010", facts)
    assert f"clusterIP: {ADDRESS}" in evidence("IG010", facts)


@pytest.mark.parametrize("host", [ADDRESS, "idlegpu-extender.idlegpu.svc", "[", "localhost"])
def test_service_address_and_names_are_no_placeholders(host: str) -> None:
    assert found("IG010", calling(f"https://{host}:8888")) == []


def not_run(facts: Facts) -> dict[str, str]:
    return {one.code: one.why for one in examine(facts, CHECKS).not_run}


def test_placeholder_is_found_without_the_service() -> None:
    placeholder = calling("https://FIXED_ADDRESS:8888", known=False)
    address = calling(f"https://{ADDRESS}:8888", known=False)
    name = calling("https://idlegpu-extender.idlegpu.svc:8888", known=False)

    assert severities("IG010", placeholder) == ["error"]
    assert "clusterIP: unknown" in evidence("IG010", placeholder)
    assert "Services of the extender" in not_run(address)["IG010"]
    assert "IG010" not in not_run(name)
    assert "IG010" not in not_run(Facts(at=NOW, schedulers=(scheduler(),)))
    both = Facts(at=NOW, schedulers=(address.schedulers or ()) + (name.schedulers or ()))
    assert "IG010" in not_run(both)


@pytest.mark.parametrize(
    ("version", "server", "severity"),
    [
        ("v1.37.0", "v1.36.4", ["error"]),
        ("v1.34.9", "v1.36.4+k3s1", ["warning"]),
        ("v1.36.9", "v1.36.4-eks-1a2b", []),
        ("v1.35.1", "v1.36.4", []),
        ("latest", "v1.36.4", []),
    ],
)
def test_versions_that_kubernetes_does_not_support_are_found(
    version: str, server: str, severity: list[str]
) -> None:
    facts = Facts(at=NOW, pods=(second_scheduler(version),), version=server)

    assert severities("IG011", facts) == severity
    relation = {
        "error": "newer than the API server",
        "warning": "more than one minor version older",
    }
    for finding in found("IG011", facts):
        assert relation[str(finding.severity)] in finding.what


def test_a_pod_that_ended_does_not_count() -> None:
    ended = second_scheduler("v1.37.0", phase="Succeeded")

    assert found("IG011", Facts(at=NOW, pods=(ended,), version="v1.36.4")) == []


# --- IG012 --------------------------------------------------------------------------------------


def at(**facts: Any) -> Facts:
    return Facts(at=NOW, schedulers=(scheduler(entry()),), **facts)


def test_an_extender_of_the_scheduler_of_all_pods_turns_batching_off() -> None:
    facts = at(pods=(kube_scheduler("v1.35.0"),))

    assert severities("IG012", facts) == ["info"]
    assert "kube-scheduler:v1.35.0" in evidence("IG012", facts)


@pytest.mark.parametrize(
    ("version", "options"),
    [("v1.34.9", ()), ("v1.37.2", ("--feature-gates=OpportunisticBatching=false",))],
    ids=["before it was on", "off anyway"],
)
def test_a_scheduler_that_does_not_batch_loses_nothing(version: str, options: tuple[str]) -> None:
    assert found("IG012", at(pods=(kube_scheduler(version, *options),))) == []


def test_a_second_scheduler_leaves_the_batching_of_the_first_on() -> None:
    second = scheduler(entry(), profiles=["idlegpu-scheduler"])
    first = scheduler(source="b.yaml")
    facts = Facts(at=NOW, schedulers=(second, first), pods=(kube_scheduler("v1.37.2"),))

    assert found("IG012", facts) == []


@pytest.mark.parametrize("pods", [(), (kube_scheduler("v1.36.2-rke2r1-build20260601"),)])
@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("v1.36.2+k3s1", ["info"]),
        ("v1.35.0+rke2r1", ["info"]),
        ("v1.34.9+rke2r1", []),
        ("v1.37.2", []),
    ],
)
def test_the_kube_scheduler_of_k3s_and_rke2_has_the_api_servers_version(
    pods: tuple[Any, ...], version: str, severity: list[str]
) -> None:
    for pod in pods:  # RKE2's static pods
        pod["spec"]["containers"][0]["image"] = "rancher/hardened-kubernetes:v1.36.2-rke2r1"
    facts = at(pods=pods, version=version)

    assert severities("IG012", facts) == severity
    assert (f"API server: {version}" in evidence("IG012", facts)) == bool(severity)


@pytest.mark.parametrize("profiles", [[], [{}], ["other", "default-scheduler"]])
def test_a_profile_without_a_name_is_the_default_schedulers(profiles: list[object]) -> None:
    one = scheduler(entry(), profiles=profiles)
    facts = Facts(at=NOW, schedulers=(one,), pods=(kube_scheduler("v1.37.2"),))

    assert severities("IG012", facts) == ["info"]


def test_a_second_schedulers_version_and_options_do_not_count() -> None:
    off = "--feature-gates=OpportunisticBatching=false"
    second = second_scheduler("v1.37.2", command=[off])
    rke2 = kube_scheduler("v1.36.2", off)
    rke2["spec"]["containers"][0]["image"] = "rancher/hardened-kubernetes:v1.36.2-rke2r1"

    assert found("IG012", at(pods=(second_scheduler("v1.37.2"),), version="v1.37.2")) == []
    assert severities("IG012", at(pods=(second,), version="v1.36.2+k3s1")) == ["info"]
    assert found("IG012", at(pods=(rke2,), version="v1.36.2+rke2r1")) == []
    both = (rke2, kube_scheduler("v1.36.2"))
    both[1]["spec"]["containers"][0]["image"] = "rancher/hardened-kubernetes:v1.36.2-rke2r1"
    assert found("IG012", at(pods=both, version="v1.36.2+rke2r1")) == []
