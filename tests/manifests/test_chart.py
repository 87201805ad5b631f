"""The Helm chart renders the same objects as kustomize, and its values change them."""

import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from extender.settings.config import Settings, load_settings
from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import (
    COMPONENTS,
    FILLED_IN,
    MANIFESTS,
    OVERLAYS,
    SECOND_SCHEDULER,
    built,
    find,
    with_components,
)
from tests.manifests.chart import CHART, REGISTRY, HelmError, Values, helm, rendered

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e]

EVERY_COMPONENT: Final = sorted(folder.name for folder in COMPONENTS.iterdir())
CERTS_JOB: Final = "idlegpu-certs"
EXTENDER: Final = "idlegpu-extender"
SCHEDULER: Final = "idlegpu-scheduler"
SCHEDULER_CONFIG: Final = "idlegpu-scheduler-config"
KUBELET_ROOT: Final = FILLED_IN["KUBELET_ROOT"]
NEEDED: Final[Values] = {
    "fixed-address": {"fixedAddress": {"clusterIP": FILLED_IN["FIXED_ADDRESS"]}},
    "api-proxy": {"apiProxy": {"addresses": [FILLED_IN["API_SERVER_NETWORK"]]}},
    "kubelet-root": {"agent": {"kubeletRoot": KUBELET_ROOT}},
}
"""Values that components need."""
TOGETHER: Final = {
    "certs-job-admission": ["certs-job", "admission"],
    "cert-manager-admission": ["cert-manager", "admission"],
}
"""Components that a component needs before it."""
UNORDERED: Final = {"env", "ports", "volumes", "volumeMounts"}
DIGEST: Final = "sha256:" + "0" * 64


def without_hash(items: list[Object]) -> list[Object]:
    """Return objects without the hash in the name of the second scheduler's ConfigMap.

    Both programs add a hash of the content to the name and its references, but different ones.
    """
    names = {item["metadata"]["name"] for item in items if item["kind"] == "ConfigMap"}
    text = json.dumps(items)
    for name in names:
        if name.startswith(f"{SCHEDULER_CONFIG}-"):
            assert text.count(f'"{name}"') == 2, "the ConfigMap, and the volume that is made of it"
            text = text.replace(f'"{name}"', f'"{SCHEDULER_CONFIG}"')
    changed: list[Object] = json.loads(text)
    return changed


def in_order(part: Any, key: str = "") -> Any:
    """Return a part of an object with `UNORDERED` lists sorted and the settings file parsed."""
    if isinstance(part, dict):
        return {name: in_order(value, name) for name, value in part.items()}
    if key == "settings.yaml":
        return yaml.safe_load(part)
    if isinstance(part, list):
        parts = [in_order(each) for each in part]
        return sorted(parts, key=partial(json.dumps, sort_keys=True)) if key in UNORDERED else parts
    return part


def by_name(items: list[Object]) -> dict[tuple[str, str, str], Object]:
    """Return objects by kind, namespace and name."""
    found = {}
    for item in in_order(without_hash(items)):
        metadata = item["metadata"]
        if item["kind"] == "Job":  # one for each revision of the release
            metadata["name"] = metadata["name"].removesuffix("-1")
        found[item["kind"], metadata.get("namespace", ""), metadata["name"]] = item
    return found


def assert_same(values: Values, folder: Path, tmp_path: Path) -> None:
    """Compare the objects of chart and kustomize."""
    expected = by_name([json.loads(json.dumps(item)) for item in built(folder)])
    given: Object = dict(values)
    for name in given.get("components", ()):
        given |= NEEDED.get(name, {})
    # kustomize's objects name our images without a registry.
    text = json.dumps(rendered(given, tmp_path)).replace(f'"{REGISTRY}/', '"')
    actual = by_name(json.loads(text))
    assert actual.keys() == expected.keys()
    for name, item in expected.items():
        assert actual[name] == item


def test_chart_renders_the_manifests(tmp_path: Path) -> None:
    assert_same({}, MANIFESTS, tmp_path)


@pytest.mark.parametrize("name", EVERY_COMPONENT)
def test_each_component_does_the_same_in_the_chart(name: str, tmp_path: Path) -> None:
    names = [*TOGETHER.get(name, ()), name]
    (tmp_path / "overlay").mkdir()

    assert_same({"components": names}, with_components(tmp_path / "overlay", names), tmp_path)


def test_all_components_do_the_same_together(tmp_path: Path) -> None:
    # without those that exclude certs-job
    names = [name for name in EVERY_COMPONENT if not name.startswith("cert-manager")]
    (tmp_path / "overlay").mkdir()

    assert_same({"components": names}, with_components(tmp_path / "overlay", names), tmp_path)


@pytest.mark.parametrize("overlay", sorted(OVERLAYS.iterdir()), ids=lambda path: path.name)
def test_each_variant_is_a_choice_of_values(overlay: Path, tmp_path: Path) -> None:
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    components = [Path(path).name for path in kustomization.get("components", [])]
    has_agent = any(path in kustomization["resources"] for path in ("../../base", "../../agent"))

    assert_same({"components": components, "agent": {"enabled": has_agent}}, overlay, tmp_path)


def test_without_agents_the_extender_does_not_wait_for_reports(tmp_path: Path) -> None:
    assert_same({"agent": {"enabled": False}}, OVERLAYS / "without-agent", tmp_path)


def test_values_of_a_release_that_knew_no_proxy_still_do(tmp_path: Path) -> None:
    assert_same({"apiProxy": None}, MANIFESTS, tmp_path)


@pytest.mark.parametrize("components", [[], ["openshift"]], ids=["plain", "openshift"])
def test_the_second_scheduler_is_a_choice_of_values(components: list[str], tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    with_components(overlay, components)
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    kustomization["resources"].append(os.path.relpath(SECOND_SCHEDULER, overlay.resolve()))
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))

    assert_same({"components": components, "scheduler": {"enabled": True}}, overlay, tmp_path)


def test_second_scheduler_is_off_by_default(tmp_path: Path) -> None:
    assert not [item for item in rendered({}, tmp_path) if SCHEDULER in str(item["metadata"])]


def test_the_second_schedulers_values_change_it_and_restart_it(tmp_path: Path) -> None:
    chosen = {
        "enabled": True,
        "replicas": 3,
        "nodeSelector": {"pool": "infra"},
        "tolerations": [{"operator": "Exists"}],
        "resources": {"limits": {"memory": "4Gi"}},
    }
    image = {"repository": "r.example.com/scheduler", "tag": "v1.35.9"}
    before = rendered({"scheduler": chosen, "images": {"scheduler": image}}, tmp_path)
    after = rendered(
        {"scheduler": {**chosen, "extender": {"ignorable": False, "weight": 100}}}, tmp_path
    )

    spec = find(before, "Deployment", SCHEDULER)["spec"]
    pod = spec["template"]["spec"]
    assert spec["replicas"] == 3
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "infra"}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["containers"][0]["resources"] == {"limits": {"memory": "4Gi"}}
    assert pod["containers"][0]["image"] == "r.example.com/scheduler:v1.35.9"
    assert find(before, "Deployment", EXTENDER)["spec"]["replicas"] == 2
    name, text = scheduler_config(before)
    other, changed = scheduler_config(after)
    assert name != other
    shipped = yaml.safe_load(text)
    shipped["extenders"][0] |= {"ignorable": False, "weight": 100}
    assert yaml.safe_load(changed) == shipped


def scheduler_config(items: list[Object]) -> tuple[str, str]:
    """Return name and content of the ConfigMap in the second scheduler's volume."""
    volumes = find(items, "Deployment", SCHEDULER)["spec"]["template"]["spec"]["volumes"]
    (name,) = [each["configMap"]["name"] for each in volumes if "configMap" in each]
    return name, find(items, "ConfigMap", name)["data"]["kube-scheduler.yaml"]


@pytest.mark.parametrize(
    "settings",
    [
        {"shutdown_seconds": 200},
        {"drain_seconds": 0.5, "shutdown_seconds": 30},
        {"drain_seconds": 0},
    ],
    ids=str,
)
def test_the_extender_gets_the_time_to_end_that_its_settings_need(
    settings: dict[str, float], tmp_path: Path
) -> None:
    shipped = find(built(MANIFESTS), "Deployment", EXTENDER)["spec"]["template"]["spec"]
    to_spare = shipped["terminationGracePeriodSeconds"] - time_to_end(Settings())

    items = rendered({"extender": {"settings": settings}}, tmp_path)

    spec = find(items, "Deployment", EXTENDER)["spec"]["template"]["spec"]
    needed = time_to_end(Settings.model_validate(settings))
    assert spec["terminationGracePeriodSeconds"] == math.ceil(needed + to_spare)


def time_to_end(settings: Settings) -> float:
    return settings.drain_seconds + settings.shutdown_seconds


@pytest.mark.parametrize(
    ("server", "scheduler"),
    [
        ("v1.35.4", "v1.35.4"),
        ("v1.33.5-gke.1080000", "v1.33.5"),
        ("v1.34.1-eks-113cf36", "v1.34.1"),
        ("v1.36.2+k3s1", "v1.36.2"),
        ("v1.38.0-rc.1", "v1.38.0-rc.1"),
    ],
)
def test_the_second_scheduler_has_the_api_servers_version(
    server: str, scheduler: str, tmp_path: Path
) -> None:
    items = rendered({"scheduler": {"enabled": True}}, tmp_path, server)

    (container,) = find(items, "Deployment", SCHEDULER)["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"registry.k8s.io/kube-scheduler:{scheduler}"


def test_a_kube_scheduler_newer_than_the_api_server_or_unknown_is_refused(tmp_path: Path) -> None:
    def values(tag: str) -> Values:
        return {"scheduler": {"enabled": True}, "images": {"scheduler": {"tag": tag}}}

    assert rendered(values("v1.36.9"), tmp_path, "v1.36.1")
    with pytest.raises(HelmError, match=r"v1\.37\.0 is newer than the API server \(v1\.36\.1\)"):
        rendered(values("v1.37.0"), tmp_path, "v1.36.1+k3s1")
    with pytest.raises(HelmError, match="tag: latest does not begin with a version"):
        rendered(values("latest"), tmp_path)


def test_our_images_come_from_one_registry(tmp_path: Path) -> None:
    items = rendered({"images": {"registry": "r.example.com/team/"}}, tmp_path)

    images = {
        find(items, kind, name)["spec"]["template"]["spec"]["containers"][0]["image"]
        for kind, name in (("Deployment", EXTENDER), ("DaemonSet", "idlegpu-agent"))
    }
    assert {image.partition(":")[0] for image in images} == {
        "r.example.com/team/idlegpu-extender", "r.example.com/team/idlegpu-agent",
    }  # fmt: skip


def test_images_come_from_where_the_values_say(tmp_path: Path) -> None:
    items = rendered(
        {
            "images": {
                "extender": {"repository": "r.example.com/extender", "digest": DIGEST},
                "agent": {"repository": "r.example.com/agent", "tag": "7"},
                "pullPolicy": "Always",
                "pullSecrets": ["registry"],
            }
        },
        tmp_path,
    )

    job = find(items, "CronJob", CERTS_JOB)["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    specs = {
        f"r.example.com/extender@{DIGEST}": [
            find(items, "Deployment", EXTENDER)["spec"]["template"]["spec"],
            job,
        ],
        "r.example.com/agent:7": [
            find(items, "DaemonSet", "idlegpu-agent")["spec"]["template"]["spec"]
        ],
    }
    for image, pods in specs.items():
        for pod in pods:
            assert pod["containers"][0]["image"] == image
            assert pod["containers"][0]["imagePullPolicy"] == "Always"
            assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_settings_go_over_those_that_are_shipped(tmp_path: Path) -> None:
    url = "http://prometheus.observability.svc:9090"
    items = rendered({"extender": {"settings": {"prometheus": {"url": url}}}}, tmp_path)
    content = find(items, "ConfigMap", EXTENDER)["data"]["settings.yaml"].encode()
    shipped = find(built(MANIFESTS), "ConfigMap", EXTENDER)["data"]["settings.yaml"].encode()

    settings = load_settings(Path("settings.yaml"), {}, content)
    before = load_settings(Path("settings.yaml"), {}, shipped)

    assert settings.prometheus.url == url
    assert before.prometheus.url != url
    changed = {"prometheus": before.prometheus.model_copy(update={"url": url})}
    assert settings == before.model_copy(update=changed)


def test_agents_which_read_their_settings_once_restart_with_other_ones(tmp_path: Path) -> None:
    def template(settings: Values) -> Object:
        daemon_set = find(
            rendered({"agent": {"settings": settings}}, tmp_path), "DaemonSet", "idlegpu-agent"
        )
        return dict(daemon_set["spec"]["template"])

    every: tuple[Values, ...] = ({}, {"interval_seconds": 2}, {"interval_seconds": 3})
    templates = [template(settings) for settings in every]

    assert templates[0] != templates[1] != templates[2] != templates[0]
    assert template(every[1]) == templates[1]
    # labels of the selector
    assert len({str(each["metadata"]["labels"]) for each in templates}) == 1


def test_cluster_specific_fields_are_chart_values(tmp_path: Path) -> None:
    items = rendered(
        {
            "components": ["fixed-address", "runtime-class", "service-monitor"],
            "namespaces": {"create": False},
            "extender": {"replicas": 3, "nodeSelector": {"pool": "infra"}},
            "agent": {"resources": {"limits": {"memory": "1Gi"}}},
            "monitoringNamespace": "observability",
            "runtimeClassName": "nvidia-legacy",
            "fixedAddress": {"clusterIP": "10.0.0.9", "controlPlane": ["10.1.0.0/28"]},
            "monitorLabels": {"release": "stack"},
        },
        tmp_path,
    )

    deployment = find(items, "Deployment", EXTENDER)["spec"]
    agent = find(items, "DaemonSet", "idlegpu-agent")["spec"]["template"]["spec"]
    policy = find(items, "NetworkPolicy", "idlegpu-extender-control-plane")["spec"]
    text = json.dumps([item for item in items if item["kind"] == "NetworkPolicy"])
    assert not [item for item in items if item["kind"] == "Namespace"]
    assert deployment["replicas"] == 3
    assert deployment["template"]["spec"]["nodeSelector"]["pool"] == "infra"
    assert agent["runtimeClassName"] == "nvidia-legacy"
    assert agent["containers"][0]["resources"] == {"limits": {"memory": "1Gi"}}
    assert find(items, "Service", EXTENDER)["spec"]["clusterIP"] == "10.0.0.9"
    assert policy["ingress"][0]["from"] == [{"ipBlock": {"cidr": "10.1.0.0/28"}}]
    assert '"monitoring"' not in text
    assert '"observability"' in text
    assert find(items, "PodMonitor", "idlegpu-agent")["metadata"]["labels"]["release"] == "stack"


def test_how_the_agent_gets_its_gpus_is_a_value(tmp_path: Path) -> None:
    name = "NVIDIA_VISIBLE_DEVICES"
    volume = {"name": "driver", "hostPath": {"path": "/opt/nvidia"}}
    mount = {"name": "driver", "mountPath": "/usr/local/nvidia"}

    before = agent_of(rendered({}, tmp_path))
    after = agent_of(
        rendered(
            {
                "agent": {
                    "env": [{"name": name, "value": "void"}, {"name": "A", "value": "b"}],
                    "volumes": [volume],
                    "volumeMounts": [mount],
                    "securityContext": {"privileged": True, "allowPrivilegeEscalation": True},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "kubeletRoot": f"{KUBELET_ROOT}/",
                }
            },
            tmp_path,
        )
    )

    (was,), (container,) = before["containers"], after["containers"]
    environ = {each["name"]: each.get("value") for each in container["env"]}
    assert {name: "void", "A": "b"}.items() <= environ.items()
    assert environ.keys() == {each["name"] for each in was["env"]} | {"A"}
    assert [each for each in container["volumeMounts"] if each not in was["volumeMounts"]] == [
        mount
    ]
    assert container["securityContext"] == {
        **was["securityContext"],
        "privileged": True,
        "allowPrivilegeEscalation": True,
    }
    assert after["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert volume in after["volumes"]
    on_host = (each for each in after["volumes"] if "hostPath" in each)
    paths = {each["name"]: each["hostPath"]["path"] for each in on_host}
    assert paths["pod-resources"] == f"{KUBELET_ROOT}/pod-resources"
    assert paths["pod-logs"] == "/var/log/pods"


def agent_of(items: list[Object]) -> Object:
    pod: Object = find(items, "DaemonSet", "idlegpu-agent")["spec"]["template"]["spec"]
    return pod


def test_the_api_servers_addresses_are_a_value(tmp_path: Path) -> None:
    addresses = ["10.1.0.4/32", "fd00::4/128"]

    items = rendered({"components": ["api-proxy"], "apiProxy": {"addresses": addresses}}, tmp_path)

    (container,) = find(items, "Deployment", EXTENDER)["spec"]["template"]["spec"]["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    policy = find(items, "NetworkPolicy", "idlegpu-extender-api-proxy")["spec"]
    assert load_settings(None, environ).api.proxies == tuple(addresses)
    assert policy["ingress"][0]["from"] == [{"ipBlock": {"cidr": each}} for each in addresses]


@pytest.mark.parametrize(
    "values",
    [
        {"components": ["fixed-address"], "fixedAddress": {"clusterIP": "fd00::58"}},
        {"extender": {"settings": {"listen": "[::]:8888"}}},
    ],
    ids=["address", "listen"],
)
def test_every_port_listens_on_ipv6_if_one_does(values: Values, tmp_path: Path) -> None:
    components = ["agent-reports", "admission", "host-port", *values.get("components", ())]

    text = json.dumps(rendered({**values, "components": components}, tmp_path))

    ports = ("8888", "8889", "8890", "9401", "9402", "9403")
    assert [port for port in ports if f"[::]:{port}" not in text] == []
    assert "0.0.0.0:" not in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param(
            {"fixedAddress": {"clusterIP": "10.96.0.88"}},
            r"fixedAddress\.clusterIP: only the component fixed-address reads it",
            id="address-without-its-component",
        ),
        pytest.param(
            {"fixedAddress": {"controlPlane": ["10.0.0.0/8"]}},
            r"fixedAddress\.controlPlane: only the component fixed-address reads it",
            id="networks-without-their-component",
        ),
        pytest.param(
            {"apiProxy": {"addresses": ["10.0.0.0/28"]}},
            r"apiProxy\.addresses: only the component api-proxy reads it",
            id="proxy-without-its-component",
        ),
        pytest.param(
            {"runtimeClassName": "nvidia-legacy"},
            "runtimeClassName: only the component runtime-class reads it",
            id="class-without-its-component",
        ),
        pytest.param(
            {"monitorLabels": {"release": "stack"}},
            "only the component service-monitor or prometheus-rule reads it",
            id="labels-without-monitors",
        ),
        pytest.param(
            {"components": ["admission", "certs-job-admission"]},
            "certs-job-admission does nothing without certs-job",
            id="bundle-without-its-job",
        ),
        pytest.param(
            {"components": ["cert-manager", "cert-manager-admission"]},
            "cert-manager-admission does nothing without admission",
            id="bundle-without-webhook",
        ),
        pytest.param({"components": None}, "'components'", id="no-components"),
        pytest.param({"agent": {"enabled": None}}, "/agent.*'enabled'", id="agent-neither"),
        pytest.param({"monitoringNamespace": None}, "'monitoringNamespace'", id="no-monitoring"),
        pytest.param(
            {"images": {"agent": {"repository": "r.example.com/agent:1.0"}}},
            "agent/repository",
            id="tag-in-repository",
        ),
        pytest.param(
            {"agent": {"tolerations": [{"key": "gpu", "value": True}]}},
            "tolerations/0/value",
            id="toleration-that-is-no-text",
        ),
        pytest.param(
            {"extender": {"resources": {"limit": {"memory": "1Gi"}}}},
            "'limit' not allowed",
            id="misspelt-limits",
        ),
        pytest.param(
            {"extender": {"resources": {"limits": {"memory": "1Gb"}}}},
            "limits/memory",
            id="no-quantity",
        ),
        pytest.param({"extender": {"replica": 2}}, "replica", id="unknown-value"),
        pytest.param({"extender": {"replicas": 0}}, "replicas", id="no-replica"),
        pytest.param({"components": ["fixed-address"]}, "fixedAddress.clusterIP", id="no-address"),
        pytest.param({"fixedAddress": {"clusterIP": "10.0.0.288"}}, "fixedAddress/cl", id="octet"),
        pytest.param({"apiProxy": {"addresses": ["10.0.0.0/33"]}}, "addresses/0", id="prefix"),
        pytest.param({"components": ["api-proxy"]}, "apiProxy.addresses", id="no-proxy"),
        pytest.param(
            {"components": ["fixed-address"], "fixedAddress": None},
            "fixedAddress.clusterIP",
            id="address-removed",
        ),
        pytest.param(
            {"components": ["api-proxy"], "apiProxy": None},
            "apiProxy.addresses",
            id="proxy-removed",
        ),
        pytest.param({"components": ["kubelet-root"]}, "agent.kubeletRoot", id="no-root"),
        pytest.param(
            {"extender": {"settings": {"prometheus": {"url": "http://PROMETHEUS:9090"}}}},
            "replace PROMETHEUS",
            id="placeholder",
        ),
        pytest.param(
            {"images": {"registry": ""}}, "images.registry: set the registry", id="no-registry"
        ),
        pytest.param({"agent": {"env": [{"value": "x"}]}}, "name", id="no-name"),
        pytest.param({"components": ["no-such"]}, "components/0", id="unknown-component"),
        pytest.param(
            {"components": ["certs-job", "cert-manager"]},
            "certs-job and cert-manager make the same Secrets",
            id="two-that-make-secrets",
        ),
        pytest.param({"scheduler": {"enable": True}}, "enable", id="unknown-of-scheduler"),
        pytest.param(
            {"scheduler": {"extender": {"httpTimeout": "5s"}}}, "httpTimeout", id="slow-extender"
        ),
        pytest.param(
            {"scheduler": {"extender": {"managedResources": [{"name": "nvidia.com/mig-*"}]}}},
            "managedResources",
            id="wildcard",
        ),
        pytest.param({"images": {"agent": {"digest": "sha256:1"}}}, "digest", id="bad-digest"),
        pytest.param({"images": {"agent": {"tag": "a b"}}}, "images/agent/tag", id="bad-tag"),
        pytest.param({"images": {"agent": {"repository": "a b"}}}, "agent/repo", id="repository"),
        pytest.param({"images": {"registry": "https://r.example"}}, "images/registry", id="a-url"),
        pytest.param({"images": {"agent": None}}, "/images.*'agent'", id="no-image"),
        pytest.param({"extender": None}, "'extender'", id="no-extender"),
        pytest.param({"extender": {"settings": None}}, "/extender.*'settings'", id="no-settings"),
        pytest.param({"agent": {"settings": None}}, "/agent.*'settings'", id="no-agent-settings"),
        pytest.param(
            {"extender": {"settings": {"api": None}}}, "extender/settings/api", id="no-section"
        ),
        pytest.param(
            {"extender": {"settings": {"drain_seconds": "soon"}}}, "drain_seconds", id="no-number"
        ),
        pytest.param(
            {"agent": {"env": [{"name": "X", "value": 5}]}}, "agent/env/0/value", id="number-in-env"
        ),
        pytest.param(
            {"scheduler": {"nodeSelector": None}}, "/scheduler.*'nodeSelector'", id="no-selector"
        ),
        pytest.param({"monitoringNamespace": "x" * 64}, "monitoringNamespace", id="long-name"),
        pytest.param({"runtimeClassName": "a b"}, "runtimeClassName", id="bad-name"),
        pytest.param(
            {"extender": {"settings": {"api": {"allow_plain": True}}}},
            "status-plain",
            id="plain-port-with-probes-over-tls",
        ),
    ],
)
def test_values_that_cannot_be_meant_are_refused(
    values: Values, message: str, tmp_path: Path
) -> None:
    with pytest.raises(HelmError, match=message):
        rendered(values, tmp_path)


def test_a_release_in_a_namespace_that_the_chart_creates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HelmError, match="--namespace idlegpu: the chart creates that namespace"):
        helm(
            "template",
            "r",
            str(CHART),
            "--namespace=idlegpu",
            f"--set=images.registry={REGISTRY}",
            folder=tmp_path,
        )


def test_helm_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), folder=tmp_path)


def test_the_chart_is_of_the_version_that_is_built() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (MANIFESTS.parent / "pyproject.toml").read_text()

    assert f'\nversion = "{chart["version"]}"\n' in project
    assert chart["appVersion"] == chart["version"]


def test_a_packaged_chart_renders_the_same_objects(tmp_path: Path) -> None:
    values: Values = {
        "components": ["certs-job", "grafana-dashboard", "prometheus-rule"],
        "scheduler": {"enabled": True},
    }
    helm("package", str(CHART), "--destination", str(tmp_path), folder=tmp_path)
    (archive,) = tmp_path.glob("idlegpu-*.tgz")

    assert rendered(values, tmp_path, chart=archive) == rendered(values, tmp_path)
