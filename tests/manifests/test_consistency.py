"""Consistency of the shipped files with each other and with the programs."""

import re
from pathlib import Path
from typing import Final

import pytest
import yaml

from agent.config import load as load_agent_settings
from extender.core.request.request import GATE
from extender.effects.waker import _POD_ANNOTATION
from extender.server.certificates.storing import CA_CONFIG_MAP
from extender.settings.config import Settings, load_settings
from extender.settings.loading import ConfigError
from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import (
    AGENT_NAMESPACE,
    COMPONENTS,
    EXTENDER_NAMESPACE,
    MANIFESTS,
    SCHEDULER_CONFIG,
    built,
    find,
    with_components,
)

EXAMPLES: Final = MANIFESTS / "examples"
PATHS: Final = sorted(
    path
    for folder in (MANIFESTS, SCHEDULER_CONFIG / "second-scheduler")
    for path in folder.rglob("*.yaml")
    if path.name not in {"kustomization.yaml", "kube-scheduler.yaml"}
    and EXAMPLES not in path.parents
)
EXTENDER: Final = "idlegpu-extender"
AGENT: Final = "idlegpu-agent"
WORKLOADS: Final = {"Deployment", "DaemonSet"}

PAUSES: Final = {"paused-for-driver-upgrade", "paused-for-mig-change"}
PAUSED: Final = {
    "nvidia.com/gpu.deploy.client": PAUSES | {"false"},
    "nvidia.com/gpu.deploy.device-plugin": PAUSES,
    "nvidia.com/gpu.deploy.gpu-feature-discovery": PAUSES,
}
"""Labels that NVIDIA's driver manager and MIG manager set while they work: k8s-driver-manager
`cmd/driver-manager/main.go`, mig-parted `pkg/mig/reconfigure/reconfigure.go`."""


def read(path: Path) -> Object:
    (item,) = yaml.safe_load_all(path.read_text())
    return dict(item)


def items() -> list[Object]:
    return [read(path) for path in PATHS]


def template(kind: str, name: str) -> Object:
    found: Object = find(items(), kind, name)["spec"]["template"]
    return found


def container_of(kind: str, name: str) -> Object:
    (container,) = template(kind, name)["spec"]["containers"]
    return dict(container)


def extender_settings(environ: dict[str, str] | None = None) -> Settings:
    content = find(items(), "ConfigMap", EXTENDER)["data"]["settings.yaml"].encode()
    return load_settings(Path("settings.yaml"), environ or {}, content)


def ports_of(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(MANIFESTS.parent)))
def test_a_file_holds_one_object_that_its_kustomization_names(path: Path) -> None:
    item = read(path)
    kustomization = yaml.safe_load((path.parent / "kustomization.yaml").read_text())

    assert path.name in kustomization["resources"]
    assert item["metadata"]["labels"]["app.kubernetes.io/part-of"] == "idlegpu"


def test_extender_serves_the_ports_that_the_manifests_name() -> None:
    settings = extender_settings()
    container = container_of("Deployment", EXTENDER)
    services = {
        item["metadata"]["name"]: item["spec"] for item in items() if item["kind"] == "Service"
    }

    assert settings.listen_address == ("0.0.0.0", ports_of(container)["webhooks"])
    host, _, port = settings.peers.service.partition(":")
    assert host == "idlegpu-peers.idlegpu.svc"
    assert services["idlegpu-peers"]["ports"][0]["port"] == int(port)
    assert services[EXTENDER]["ports"][0]["port"] == settings.listen_address[1]
    assert settings.status_address == ("0.0.0.0", ports_of(container)["status"])
    tls = {settings.tls.cert_file, settings.tls.key_file, settings.tls.client_ca_file}
    assert tls == {Path("/etc/idlegpu-tls") / name for name in ("tls.crt", "tls.key", "ca.crt")}
    for service in services.values():
        assert all(port["targetPort"] in ports_of(container) for port in service["ports"])
        assert (
            service["selector"].items()
            <= template("Deployment", EXTENDER)["metadata"]["labels"].items()
        )


def test_only_kube_scheduler_is_limited_to_ready_pods() -> None:
    services = {
        item["metadata"]["name"]: item["spec"] for item in items() if item["kind"] == "Service"
    }

    for name in ("idlegpu-peers", "idlegpu-agents"):
        assert services[name]["clusterIP"] == "None"
        assert services[name]["publishNotReadyAddresses"]
    assert "clusterIP" not in services[EXTENDER]
    assert not services[EXTENDER].get("publishNotReadyAddresses")


def test_grace_period_covers_drain_and_open_requests() -> None:
    spec = template("Deployment", EXTENDER)["spec"]
    settings = extender_settings()

    assert settings.drain_seconds >= 5  # until every node knows its end
    assert settings.shutdown_seconds > 90  # after which kube-scheduler closes idle connections
    needed = settings.drain_seconds + settings.shutdown_seconds
    assert needed < spec["terminationGracePeriodSeconds"]


def test_the_agent_takes_its_settings_and_serves_where_it_is_scraped(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(find(items(), "ConfigMap", AGENT)["data"]["settings.yaml"])
    container = container_of("DaemonSet", AGENT)
    environ = {entry["name"]: "gpu-7" for entry in container["env"]}

    options = load_agent_settings(path, environ).settings.value()

    assert (options.host, options.port) == ("0.0.0.0", ports_of(container)["metrics"])
    assert options.node == "gpu-7"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert options.pod_logs in mounts
    assert str(Path(options.kubelet_socket).parent) in mounts


@pytest.mark.parametrize("kind_and_name", [("Deployment", EXTENDER), ("DaemonSet", AGENT)])
def test_mounted_volumes_and_probed_ports_exist(kind_and_name: tuple[str, str]) -> None:
    container = container_of(*kind_and_name)
    volumes = {volume["name"] for volume in template(*kind_and_name)["spec"]["volumes"]}
    settings = container["args"][container["args"].index("--config") + 1]

    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert str(Path(settings).parent) in {m["mountPath"] for m in container["volumeMounts"]}
    assert all("subPath" not in mount for mount in container["volumeMounts"])
    for probe in ("readinessProbe", "livenessProbe"):
        if probe in container:
            assert container[probe]["httpGet"]["port"] in ports_of(container)


def test_network_policies_name_pods_namespaces_and_ports_that_exist() -> None:
    namespaces = {item["metadata"]["name"] for item in items() if item["kind"] == "Namespace"}
    pods = {
        item["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
        for item in items()
        if item["kind"] in {"Deployment", "DaemonSet"}
    }
    containers = (container_of("Deployment", EXTENDER), container_of("DaemonSet", AGENT))
    known = {name for container in containers for name in ports_of(container)}
    known_numbers = {53, *(n for container in containers for n in ports_of(container).values())}
    rules = [
        rule
        for item in items()
        if item["kind"] == "NetworkPolicy"
        for rule in (*item["spec"].get("ingress", []), *item["spec"].get("egress", []))
    ]

    for rule in rules:
        assert {port["port"] for port in rule["ports"]} <= known | known_numbers
        for peer in (*rule.get("from", []), *rule.get("to", [])):
            for selector, among in (
                ("podSelector", pods),
                ("namespaceSelector", namespaces | {"monitoring"}),
            ):
                assert set(peer.get(selector, {}).get("matchLabels", {}).values()) <= among


def test_every_client_with_a_certificate_reaches_the_webhooks_and_nothing_else() -> None:
    policy = read(COMPONENTS / "fixed-address" / "network-policy.yaml")
    labels = template("Deployment", EXTENDER)["metadata"]["labels"]

    assert policy["metadata"]["namespace"] == "idlegpu"
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    # No "from": under VXLAN, IPIP or Cilium no ipBlock matches a kube-scheduler on the host
    # network.
    assert policy["spec"]["ingress"] == [{"ports": [{"port": "webhooks"}]}]
    assert extender_settings().tls.client_ca_file is not None


def test_system_priority_classes_are_limited_to_our_namespaces() -> None:
    shipped = items()
    quotas = {
        item["metadata"]["namespace"]: values
        for item in shipped
        if item["kind"] == "ResourceQuota"
        for term in item["spec"]["scopeSelector"]["matchExpressions"]
        for values in [(term["scopeName"], term["operator"], *term["values"])]
    }
    named = {
        (item["metadata"]["namespace"], spec["priorityClassName"])
        for item in shipped
        for spec in pod_specs(item)
    }

    assert not [item for item in shipped if item["kind"] == "PriorityClass"]
    assert named == {
        (EXTENDER_NAMESPACE, "system-cluster-critical"),
        (AGENT_NAMESPACE, "system-node-critical"),
    }
    assert quotas == {namespace: ("PriorityClass", "In", priority) for namespace, priority in named}


def test_the_threat_model_has_a_row_for_each_port() -> None:
    text = (MANIFESTS.parent / "SECURITY.md").read_text()
    documented = set(re.findall(r"^\| (\d+), ", text, re.MULTILINE))
    ports = {
        port
        for path in MANIFESTS.rglob("*.yaml")
        if EXAMPLES not in path.parents
        for port in re.findall(r"containerPort: (\d+)", path.read_text())
    }

    assert documented == ports


def pod_specs(item: Object) -> list[Object]:
    """Return the pod specs in a workload's templates, [] for other objects."""
    spec = item.get("spec", {})
    template = spec.get("jobTemplate", {"spec": spec})["spec"].get("template", {})
    return [template["spec"]] if "spec" in template else []


def test_every_namespace_denies_traffic_without_a_policy() -> None:
    closed = {
        item["metadata"]["namespace"]: item["spec"]["policyTypes"]
        for item in items()
        if item["kind"] == "NetworkPolicy" and item["spec"]["podSelector"] == {}
    }

    assert closed == {"idlegpu": ["Ingress"], "idlegpu-agent": ["Ingress", "Egress"]}


def variables(component: str, workload: str) -> dict[str, str]:
    """Return the environment variables that a component adds to a workload."""
    kustomization = yaml.safe_load((COMPONENTS / component / "kustomization.yaml").read_text())
    (patch,) = (
        each
        for each in kustomization["patches"]
        if each["target"]["name"] == workload and each["target"]["kind"] in WORKLOADS
    )
    (container,) = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"]}


@pytest.mark.parametrize("target", ["node", "pod"])
def test_wake_component_uses_known_settings(target: str) -> None:
    assert extender_settings(variables(f"wake-{target}s", EXTENDER)).wake.target == target


def test_wake_policy_covers_the_extenders_account_and_writes() -> None:
    folder = COMPONENTS / "wake-pods"
    (subject,) = yaml.safe_load((folder / "cluster-role-binding.yaml").read_text())["subjects"]
    policy = (folder / "admission-policy.yaml").read_text()

    assert f'"system:serviceaccount:{subject["namespace"]}:{subject["name"]}"' in policy
    assert f'"{_POD_ANNOTATION}"' in policy
    assert f'"{GATE}"' in policy


def test_agents_report_to_the_right_address_as_the_right_account() -> None:
    agents = extender_settings(variables("agent-reports", EXTENDER)).agents
    reports = load_agent_settings(None, variables("agent-reports", AGENT)).settings.reports
    service = find(items(), "Service", "idlegpu-agents")
    token = find(items(), "DaemonSet", AGENT)["spec"]["template"]["spec"]["volumes"][1]
    account = find(items(), "ServiceAccount", AGENT)["metadata"]
    mounts = {m["name"]: m["mountPath"] for m in container_of("DaemonSet", AGENT)["volumeMounts"]}
    (source,) = token["projected"]["sources"]

    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert reports.service == f"{name}:{service['spec']['ports'][0]['port']}"
    assert agents.address[1] == ports_of(container_of("Deployment", EXTENDER))["agents"]
    assert source["serviceAccountToken"]["audience"] == agents.audience
    assert str(reports.token_file) == f"{mounts[token['name']]}/token"
    assert f"{account['namespace']}/{account['name']}" in agents.service_accounts


@pytest.mark.neighbours
@pytest.mark.e2e
def test_agents_verify_the_webhooks_certificate(tmp_path: Path) -> None:
    together = built(with_components(tmp_path, ["certs-job", "agent-reports"]))
    agents = extender_settings(variables("agent-reports", EXTENDER)).agents
    reports = load_agent_settings(None, variables("agent-reports", AGENT)).settings.reports
    webhooks = extender_settings().tls

    assert (agents.cert_file, agents.key_file) == (webhooks.cert_file, webhooks.key_file)
    assert not agents.allow_plain
    assert not reports.allow_plain
    certificate = yaml.safe_load(
        (COMPONENTS / "cert-manager" / "certificate-extender.yaml").read_text()
    )
    assert reports.server_name in certificate["spec"]["dnsNames"]
    pod = find(together, "DaemonSet", AGENT)["spec"]["template"]["spec"]
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "ca")
    (volume,) = (v for v in pod["volumes"] if v["name"] == "ca")
    assert str(reports.ca_file) == f"{mount['mountPath']}/ca.crt"
    assert volume["configMap"]["name"] == CA_CONFIG_MAP
    for kind, path in (("Job", ()), ("CronJob", ("jobTemplate", "spec"))):
        spec = find(together, kind, "idlegpu-certs")["spec"]
        for name in path:
            spec = spec[name]
        (container,) = spec["template"]["spec"]["containers"]
        assert f"--ca-namespace={AGENT_NAMESPACE}" in container["args"]


@pytest.mark.neighbours
@pytest.mark.e2e
def test_all_clients_of_the_status_port_use_https_by_default(tmp_path: Path) -> None:
    together = built(with_components(tmp_path, ["service-monitor"]))
    settings = extender_settings()
    (endpoint,) = find(together, "ServiceMonitor", EXTENDER)["spec"]["endpoints"]
    certificate = read(COMPONENTS / "cert-manager" / "certificate-extender.yaml")["spec"]

    assert settings.api.files(settings.tls) == (settings.tls.cert_file, settings.tls.key_file)
    assert schemes(together) == {"https"}
    assert endpoint["tlsConfig"]["serverName"] in certificate["dnsNames"]
    assert endpoint["tlsConfig"]["ca"]["secret"] == {
        "name": certificate["secretName"],
        "key": "ca.crt",
    }


@pytest.mark.neighbours
@pytest.mark.e2e
def test_all_clients_of_the_status_port_use_http_with_status_plain(tmp_path: Path) -> None:
    together = built(with_components(tmp_path, ["service-monitor", "status-plain"]))
    settings = extender_settings(variables("status-plain", EXTENDER))

    assert settings.api.files(settings.tls) is None
    assert schemes(together) == {"http"}


def schemes(together: list[Object]) -> set[str]:
    """Return the URL schemes of kubelet, Prometheus and the API server's proxy."""
    (container,) = find(together, "Deployment", EXTENDER)["spec"]["template"]["spec"]["containers"]
    probes = [container[name]["httpGet"] for name in ("readinessProbe", "livenessProbe")]
    (endpoint,) = find(together, "ServiceMonitor", EXTENDER)["spec"]["endpoints"]
    ports = find(together, "Service", EXTENDER)["spec"]["ports"]
    (port,) = (port for port in ports if port["name"] == "status")
    assert {probe["port"] for probe in probes} == {endpoint["port"]} == {port["targetPort"]}
    return {port["appProtocol"], endpoint["scheme"], *(probe["scheme"].lower() for probe in probes)}


def test_network_policy_lets_the_api_server_proxy_to_the_status_port() -> None:
    policy = read(COMPONENTS / "api-proxy" / "network-policy.yaml")["spec"]
    labels = template("Deployment", EXTENDER)["metadata"]["labels"]
    environ = variables("api-proxy", EXTENDER)
    (rule,) = policy["ingress"]

    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert rule["ports"] == [{"port": "status"}]
    assert environ == {"IDLEGPU_API_PROXIES": "API_SERVER_NETWORK"}
    assert rule["from"] == [{"ipBlock": {"cidr": "API_SERVER_NETWORK"}}]
    with pytest.raises(ConfigError, match="API_SERVER_NETWORK"):
        extender_settings(environ)


@pytest.mark.neighbours
@pytest.mark.e2e
def test_pods_reach_only_the_gpu_loads_of_their_nodes_agent(tmp_path: Path) -> None:
    together = built(with_components(tmp_path, ["host-port"]))
    pod = find(together, "DaemonSet", AGENT)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = load_agent_settings(None, variables("host-port", AGENT)).settings.value()
    rules = find(together, "NetworkPolicy", AGENT)["spec"]["ingress"]
    runtime = find([read(EXAMPLES / "function-runtime.yaml")], "Deployment", "function-runtime")
    (worker,) = runtime["spec"]["template"]["spec"]["containers"]
    (url,) = (each["value"] for each in worker["env"] if each["name"] == "IDLEGPU_AGENT_URL")

    on_node = {port["name"]: port["hostPort"] for port in container["ports"] if "hostPort" in port}
    assert on_node == {"loads": 9402}
    assert url == f"http://$(HOST_IP):{on_node['loads']}"
    assert ports_of(container)["loads"] == options.loads_port
    for_all = [rule["ports"] for rule in rules if rule["from"] == [{"namespaceSelector": {}}]]
    assert for_all == [[{"port": "loads"}]]
    for_some = [rule["from"] for rule in rules if rule["ports"] == [{"port": "metrics"}]]
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert for_some == [[{"namespaceSelector": monitoring}]]


def test_agent_leaves_a_node_that_the_gpu_operator_pauses() -> None:
    affinity = template("DaemonSet", AGENT)["spec"]["affinity"]["nodeAffinity"]
    (required,) = affinity.values()
    for label, values in PAUSED.items():
        for term in required["nodeSelectorTerms"]:
            not_in = [
                set(each["values"])
                for each in term["matchExpressions"]
                if (each["key"], each["operator"]) == (label, "NotIn")
            ]
            assert not_in == [values], term


def test_both_images_are_pinned_to_the_version_that_is_built() -> None:
    project = (MANIFESTS.parent / "pyproject.toml").read_text()
    for kind, name in (("Deployment", EXTENDER), ("DaemonSet", AGENT)):
        image, _, tag = container_of(kind, name)["image"].partition(":")

        assert image == name
        assert f'\nversion = "{tag}"\n' in project
