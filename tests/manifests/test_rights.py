"""Rights of every service account: those that it needs, and no others."""

import time
from itertools import count
from pathlib import Path

import pytest

from extender.core.request.request import GATE
from extender.effects.waker import _POD_ANNOTATION
from testkit.controlplane.installing import Installation, rights, wait_authorized
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.shipped import (
    AGENT_NAMESPACE,
    EXTENDER_NAMESPACE,
    MANIFESTS,
    SECOND_SCHEDULER,
    built,
    find,
    with_components,
)
from testkit.controlplane.waiting import wait_for
from tests.manifests.rights import COORDINATION, EVENTS, STORAGE, everybody, patch, refused

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

EXTENDER = (EXTENDER_NAMESPACE, "idlegpu-extender")
AGENT = (AGENT_NAMESPACE, "idlegpu-agent")
SCHEDULER = (EXTENDER_NAMESPACE, "idlegpu-scheduler")
CERTS = (EXTENDER_NAMESPACE, "idlegpu-certs")

RESOURCE = "resource.k8s.io"
AUTHENTICATION, AUTHORIZATION = "authentication.k8s.io", "authorization.k8s.io"

IN_CLUSTER = {
    ("", "nodes", "list", ""),
    ("", "nodes", "watch", ""),
    ("", "pods", "list", ""),
    ("", "pods", "watch", ""),
    (RESOURCE, "resourceclaims", "list", ""),
    (RESOURCE, "resourceclaims", "watch", ""),
    (RESOURCE, "resourceslices", "list", ""),
    (RESOURCE, "resourceslices", "watch", ""),
    (EVENTS, "events", "create", ""),
    (EVENTS, "events", "patch", ""),
    (AUTHENTICATION, "tokenreviews", "create", ""),
    (AUTHORIZATION, "subjectaccessreviews", "create", ""),
}
IN_OWN_NAMESPACE = {
    (STORAGE, "csistoragecapacities", "create", ""),
    (STORAGE, "csistoragecapacities", "patch", "idlegpu-state"),
    (COORDINATION, "leases", "create", ""),
    (COORDINATION, "leases", "get", "idlegpu-wake"),
    (COORDINATION, "leases", "patch", "idlegpu-wake"),
}


def capacity(name: str) -> Object:
    return {
        "apiVersion": f"{STORAGE}/v1",
        "kind": "CSIStorageCapacity",
        "metadata": {"name": name},
        "storageClassName": "idlegpu.io-no-storage",
    }


def event(name: str) -> Object:
    return {
        "apiVersion": f"{EVENTS}/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "default"},
        "type": "Warning",
        "reason": "InvalidAnnotation",
        "action": "Scheduling",
        "note": "a note",
        "eventTime": time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime()),
        "reportingController": "idlegpu.io/extender",
        "reportingInstance": "a",
        "regarding": {"kind": "Pod", "name": "a", "namespace": "default"},
    }


async def test_the_extender_has_exactly_the_rights_that_it_uses(installation: Installation) -> None:
    await installation.apply(MANIFESTS)
    own, others = EXTENDER_NAMESPACE, "default"
    async with await installation.client(*EXTENDER) as client:
        await wait_authorized(client, "list", "nodes")
        await wait_authorized(client, "create", "leases", group=COORDINATION, namespace=own)

        in_own = await rights(client, own) - await everybody(installation, own)
        elsewhere = await rights(client, others) - await everybody(installation, others)

    assert elsewhere == IN_CLUSTER
    assert in_own == IN_CLUSTER | IN_OWN_NAMESPACE


async def test_waking_by_nodes_adds_the_right_to_patch_them_and_no_other(
    installation: Installation, tmp_path: Path
) -> None:
    await installation.apply(with_components(tmp_path, ["wake-nodes"]))
    await installation.admin.create(node("a"))
    async with await installation.client(*EXTENDER) as client:
        await wait_authorized(client, "list", "nodes")
        await wait_authorized(client, "patch", "nodes")

        await patch(client, "/api/v1/nodes/a", {"metadata": {"annotations": {"a": "b"}}})

        found = await rights(client, "default") - await everybody(installation, "default")
        assert found == IN_CLUSTER | {("", "nodes", "patch", "")}


async def test_waking_pods_adds_the_right_to_change_their_gate_and_annotation_alone(
    installation: Installation, tmp_path: Path
) -> None:
    await installation.apply(with_components(tmp_path, ["wake-pods"]))
    keep = "example.com/keep"
    gates = [{"name": GATE}, {"name": "example.com/other"}]
    await installation.admin.create(pod("gated", annotations={"a": "b"}, schedulingGates=gates))
    await installation.admin.create(pod("plain", annotations={"a": "b"}, labels={keep: "1"}))
    woken: Object = {"metadata": {"annotations": {_POD_ANNOTATION: "now"}}}
    pods, numbers = "/api/v1/namespaces/default/pods", count()
    async with await installation.client(*EXTENDER) as client:
        await wait_authorized(client, "list", "nodes")
        await wait_authorized(client, "patch", "pods")
        found = await rights(client, "default") - await everybody(installation, "default")
        assert found == IN_CLUSTER | {("", "pods", "patch", "")}

        async def is_forbidden() -> bool:
            change = {"metadata": {"annotations": {"a": str(next(numbers))}}}
            return await refused(client, "PATCH", f"{pods}/plain", change, 422)

        await wait_for(is_forbidden, "the policy is in force")
        (container,) = (await installation.admin.get(pod("plain")))["spec"]["containers"]
        others: list[tuple[str, Object]] = [
            ("plain", {"metadata": {"annotations": {"a": None}}}),
            ("plain", {"metadata": {"labels": {keep: None}}}),
            ("plain", {"metadata": {"finalizers": ["example.com/stay"]}}),
            ("plain", {"spec": {"containers": [{**container, "image": "example.com/a:1"}]}}),
            ("plain", {"spec": {"activeDeadlineSeconds": 1}}),
            ("gated", {"spec": {"nodeSelector": {"a": "b"}}}),
            ("gated", {"spec": {"schedulingGates": []}}),
        ]
        for name, change in others:
            assert await refused(client, "PATCH", f"{pods}/{name}", change, 422), change

        await patch(client, f"{pods}/plain", woken)
        await patch(client, f"{pods}/gated", {**woken, "spec": {"schedulingGates": gates[1:]}})
    left = await installation.admin.get(pod("gated"))
    assert left["spec"]["schedulingGates"] == gates[1:]
    for name, change in others:  # valid objects, but from a wrong user
        await patch(installation.admin, f"{pods}/{name}", change)
    await patch(installation.admin, f"{pods}/plain", {"metadata": {"finalizers": None}})


async def test_certificate_job_may_read_only_its_secrets_and_lease(
    installation: Installation,
) -> None:
    await installation.apply(MANIFESTS)
    names = ("idlegpu-ca", "idlegpu-extender-tls", "idlegpu-kube-scheduler-tls")
    async with await installation.client(*CERTS) as client:
        await wait_authorized(client, "create", "secrets", namespace=EXTENDER_NAMESPACE)

        own = await rights(client, EXTENDER_NAMESPACE)
        elsewhere = await rights(client, "default")

        assert own - await everybody(installation, EXTENDER_NAMESPACE) == {
            ("", "secrets", "create", ""),
            *(("", "secrets", verb, name) for verb in ("get", "patch") for name in names),
            (COORDINATION, "leases", "create", ""),
            *((COORDINATION, "leases", verb, "idlegpu-certs") for verb in ("get", "patch")),
        }
        assert elsewhere == await everybody(installation, "default")
        assert await refused(client, "GET", f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/secrets")
        at_agents = await rights(client, AGENT_NAMESPACE)
        assert at_agents - await everybody(installation, AGENT_NAMESPACE) == {
            ("", "configmaps", "create", ""),
            *(("", "configmaps", verb, "idlegpu-ca") for verb in ("get", "patch")),
        }


async def test_an_agent_has_no_rights_at_all(installation: Installation) -> None:
    await installation.apply(MANIFESTS)
    async with await installation.client(*AGENT) as client:
        for namespace in (AGENT_NAMESPACE, EXTENDER_NAMESPACE, "default"):
            allowed = await rights(client, namespace)

            assert allowed == await everybody(installation, namespace)
        assert await refused(client, "GET", "/api/v1/nodes")
        assert await refused(client, "GET", f"/api/v1/namespaces/{AGENT_NAMESPACE}/pods")


async def test_an_agents_token_is_for_the_extender_alone(installation: Installation) -> None:
    daemon_set = find(await installation.apply(MANIFESTS), "DaemonSet", "idlegpu-agent")
    (audience,) = [
        source["serviceAccountToken"]["audience"]
        for volume in daemon_set["spec"]["template"]["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
    ]
    token = await installation.token(*AGENT, audience)
    review: Object = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token},
    }
    path = "/apis/authentication.k8s.io/v1/tokenreviews"

    for_api_server = await installation.admin.request("POST", path, review)
    review["spec"]["audiences"] = [audience]
    for_extender = await installation.admin.request("POST", path, review)

    assert not for_api_server["status"].get("authenticated")
    assert for_extender["status"]["authenticated"]
    assert (
        for_extender["status"]["user"]["username"]
        == "system:serviceaccount:idlegpu-agent:idlegpu-agent"
    )


def test_no_role_that_we_ship_has_a_wildcard_or_reads_secrets() -> None:
    roles = [
        item
        for item in (*built(MANIFESTS), *built(SECOND_SCHEDULER))
        if item["kind"] in {"Role", "ClusterRole"} and item["metadata"]["name"] != CERTS[1]
    ]

    named = [
        word
        for role in roles
        for rule in role["rules"]
        for words in rule.values()
        for word in words
    ]
    assert roles
    assert "*" not in named
    assert "secrets" not in named
