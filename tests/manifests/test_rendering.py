"""Scripts that fill in registry, addresses and versions, and refuse a remaining placeholder."""

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import yaml

from extender.server.certificates.__main__ import main as certificates
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.shipped import COMPONENTS, MANIFESTS, OVERLAYS, SCHEDULER_CONFIG, find
from testkit.controlplane.tools import KUBERNETES_VERSION
from tests.manifests.scripts import run

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

RENDER: Final = MANIFESTS / "render.sh"
CONTROL_PLANE: Final = SCHEDULER_CONFIG / "control-plane.sh"
ADDRESS: Final = "10.96.0.77"
SIDE: Final = "kube-scheduler"
VARIABLES: Final = ("IDLEGPU_", "NVIDIA_")
"""Prefixes of environment variables of containers, which are not placeholders."""


def objects(done: subprocess.CompletedProcess[str]) -> list[Object]:
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_one_value_fills_the_address_in() -> None:
    items = objects(run(RENDER, "r.example.com", "kubeadm", FIXED_ADDRESS=ADDRESS))

    assert find(items, "Service", "idlegpu-extender")["spec"]["clusterIP"] == ADDRESS
    assert "FIXED_ADDRESS" not in str(items)


@pytest.mark.parametrize(
    ("arguments", "name", "file"),
    [
        (("kubeadm",), "FIXED_ADDRESS", "components/fixed-address/kustomization.yaml"),
        (("default", "api-proxy"), "API_SERVER_NETWORK", "components/api-proxy/network-policy"),
    ],
)
def test_a_placeholder_that_is_left_is_named_with_its_file(
    arguments: tuple[str, ...], name: str, file: str
) -> None:
    done = run(RENDER, "r.example.com", *arguments)

    assert done.returncode == 1
    assert done.stdout == ""
    assert f"set {name}: it is a placeholder in manifests/components/" in done.stderr
    assert file in done.stderr


def test_a_registry_is_a_host_and_a_path() -> None:
    items = objects(run(RENDER, "r.example.com:5000/team/", "without-agent"))
    url = run(RENDER, "https://r.example.com/team")

    assert "r.example.com:5000/team/idlegpu-extender:" in str(items)
    assert url.returncode == 2
    assert "leave out https://, as in registry.example.com/team" in url.stderr


def test_every_placeholder_of_the_manifests_is_known_to_the_script() -> None:
    (line,) = (each for each in RENDER.read_text().splitlines() if each.startswith("placeholders="))
    known = line.partition("=")[2].strip('"').split()
    texts = [path.read_text() for path in COMPONENTS.rglob("*.yaml")]
    names = re.findall(r"^ [^#\n]*?\b([A-Z]+_[A-Z_]+)(?=$|[/}])", "\n".join(texts), re.MULTILINE)

    assert set(known) == {name for name in names if not name.startswith(VARIABLES)}
    assert [name for name in known if f"#   {name} " not in RENDER.read_text()] == []


def test_components_go_with_any_variant_and_an_own_overlay(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{os.path.relpath(MANIFESTS, tmp_path.resolve())}]\n"
    )

    several = objects(
        run(
            RENDER,
            "r",
            "kubeadm",
            "api-proxy",
            "runtime-class",
            API_SERVER_NETWORK="10.0.0.0/28",
            FIXED_ADDRESS=ADDRESS,
        )
    )
    own = objects(run(RENDER, "r", str(tmp_path), "runtime-class"))

    for items in (several, own):
        agent = find(items, "DaemonSet", "idlegpu-agent")["spec"]["template"]["spec"]
        assert agent["runtimeClassName"] == "nvidia"
    policy = find(several, "NetworkPolicy", "idlegpu-extender-api-proxy")["spec"]
    assert policy["ingress"][0]["from"] == [{"ipBlock": {"cidr": "10.0.0.0/28"}}]
    unknown = run(RENDER, "r", "default", "no-such")
    assert unknown.returncode == 2
    assert "no-such is no component: must be one of admission" in unknown.stderr


def test_an_own_overlay_may_fill_a_placeholder_in(tmp_path: Path) -> None:
    overlay = Path(os.path.relpath(OVERLAYS / "kubeadm", tmp_path.resolve()))
    operation = {"op": "replace", "path": "/spec/clusterIP", "value": ADDRESS}
    patch = {
        "target": {"kind": "Service", "name": "idlegpu-extender"},
        "patch": json.dumps([operation]),
    }
    kustomization = {"resources": [str(overlay)], "patches": [patch]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))

    items = objects(run(RENDER, "r", str(tmp_path)))

    assert find(items, "Service", "idlegpu-extender")["spec"]["clusterIP"] == ADDRESS


def test_an_image_that_an_own_overlay_pins_by_digest_comes_from_the_registry(
    tmp_path: Path,
) -> None:
    digest = "sha256:" + "0" * 64
    kustomization = {
        "resources": [os.path.relpath(MANIFESTS, tmp_path.resolve())],
        "images": [{"name": "idlegpu-extender", "digest": digest}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))

    text = str(objects(run(RENDER, "r.example.com:5000/team", str(tmp_path))))

    assert f"'r.example.com:5000/team/idlegpu-extender@{digest}'" in text
    assert "'idlegpu-extender@" not in text


def test_with_an_ipv6_address_every_port_listens_on_ipv6() -> None:
    components = ("admission", "certs-job-admission", "host-port")

    done = run(RENDER, "r", "kubeadm", *components, FIXED_ADDRESS="fd00:10:96::58")

    assert (
        find(objects(done), "Service", "idlegpu-extender")["spec"]["clusterIP"] == "fd00:10:96::58"
    )
    assert '"[::]:8888"' in done.stdout
    assert "0.0.0.0:" not in done.stdout


def test_on_openshift_only_the_agent_names_a_user() -> None:
    items = [
        *objects(run(RENDER, "r", "default", "openshift")),
        *objects(run(RENDER, "r", "second-scheduler", "openshift", KUBE_VERSION="v1.36.1")),
    ]

    fixed = re.compile("runAsUser|runAsGroup|fsGroup")
    assert [item["kind"] for item in items if fixed.search(str(item))] == ["DaemonSet"]
    workloads = [item for item in items if "runAsNonRoot" in str(item)]
    assert {item["metadata"]["name"] for item in workloads} == {
        "idlegpu-certs", "idlegpu-extender", "idlegpu-scheduler",
    }  # fmt: skip
    roles = {item["roleRef"]["name"] for item in items if "idlegpu-agent-p" in str(item)}
    assert roles == {"system:openshift:scc:privileged"}


def image_of(done: subprocess.CompletedProcess[str]) -> str:
    pod = find(objects(done), "Deployment", "idlegpu-scheduler")["spec"]["template"]["spec"]
    return str(pod["containers"][0]["image"])


def test_the_second_scheduler_has_the_api_servers_version(control_plane: ControlPlane) -> None:
    requested = run(RENDER, "r", "second-scheduler", kubeconfig=control_plane.kubeconfig())
    given = run(
        RENDER, "r", "second-scheduler", KUBE_VERSION="v1.35.1", KUBE_REGISTRY="r.example.com/kube"
    )
    unknown = run(RENDER, "r", "second-scheduler")

    assert image_of(requested) == f"registry.k8s.io/kube-scheduler:{KUBERNETES_VERSION}"
    assert image_of(given) == "r.example.com/kube/kube-scheduler:v1.35.1"
    assert unknown.returncode == 1
    assert "set KUBE_VERSION to the API server's version" in unknown.stderr


def certificate(folder: Path) -> Mapping[str, str]:
    """Issue certificates and return kube-scheduler's files, encoded as in a Secret."""
    assert certificates(["--folder", str(folder)]) == 0
    return {
        path.name: base64.b64encode(path.read_bytes()).decode()
        for path in (folder / SIDE).iterdir()
    }


async def store(installation: Installation, data: Mapping[str, str]) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "idlegpu-kube-scheduler-tls", "namespace": "idlegpu"},
        "type": "kubernetes.io/tls",
        "data": data,
    }
    address = "/api/v1/namespaces/idlegpu/secrets/idlegpu-kube-scheduler-tls"
    await installation.admin.apply(address, secret)
    installation.items.append(secret)


async def test_a_control_plane_node_gets_configuration_and_renewed_certificates(
    installation: Installation, tmp_path: Path
) -> None:
    folder, kubeconfig = tmp_path / "idlegpu", installation.plane.kubeconfig()
    (tmp_path / "rendered.yaml").write_text(
        run(RENDER, "r", "kubeadm", FIXED_ADDRESS=ADDRESS).stdout
    )
    await installation.plane.kubectl("apply", "-f", str(tmp_path / "rendered.yaml"))
    installation.items += list(yaml.safe_load_all((tmp_path / "rendered.yaml").read_text()))
    await store(installation, certificate(tmp_path / "one"))

    first = run(CONTROL_PLANE, str(folder), kubeconfig=kubeconfig)
    again = run(CONTROL_PLANE, str(folder), kubeconfig=kubeconfig)

    assert first.returncode == 0, first.stderr
    (entry,) = yaml.safe_load((folder / "kube-scheduler.yaml").read_text())["extenders"]
    assert entry["urlPrefix"] == f"https://{ADDRESS}:8888"
    assert entry["tlsConfig"]["certFile"] == str(folder / "tls.crt")
    assert (folder / "tls.key").read_bytes() == (tmp_path / "one" / SIDE / "tls.key").read_bytes()
    assert (folder / "tls.key").stat().st_mode & 0o77 == 0
    assert (again.returncode, again.stdout) == (0, "")

    await store(installation, certificate(tmp_path / "two"))
    renewed = run(CONTROL_PLANE, str(folder), kubeconfig=kubeconfig)
    assert (folder / "tls.crt").read_bytes() == (tmp_path / "two" / SIDE / "tls.crt").read_bytes()
    assert "the CA changed: restart kube-scheduler" in renewed.stdout
    assert {path.name for path in folder.iterdir()} == {
        "ca.crt", "tls.crt", "tls.key", "kube-scheduler.yaml",
    }  # fmt: skip

    config = folder / "kube-scheduler.yaml"
    report = await doctor(installation, config)
    assert "IG010" in report["passed"]
    config.write_text(config.read_text().replace(ADDRESS, "10.96.0.3"))
    strayed = run(CONTROL_PLANE, str(folder), kubeconfig=kubeconfig)
    assert strayed.returncode == 1
    assert f"does not name the Service's address {ADDRESS}" in strayed.stderr
    report = await doctor(installation, config)
    (finding,) = [one for one in report["findings"] if one["code"] == "IG010"]
    assert f"Service idlegpu-extender: clusterIP: {ADDRESS}" in finding["evidence"]


async def doctor(installation: Installation, *files: Path) -> Object:
    """Return the report of `idlegpu doctor` about the cluster and files."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extender.cli", "doctor", "-o", "json",
        "--kubeconfig", str(installation.plane.kubeconfig()), *map(str, files),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    report: Object = json.loads(output)
    return report


def test_the_timer_runs_the_script() -> None:
    folder = SCHEDULER_CONFIG / "systemd"
    service = (folder / "idlegpu-control-plane.service").read_text()
    timer = (folder / "idlegpu-control-plane.timer").read_text()

    assert "\nExecStart=/usr/local/sbin/idlegpu-control-plane /etc/kubernetes/idlegpu\n" in service
    assert "\nEnvironment=KUBECONFIG=/etc/kubernetes/admin.conf\n" in service
    assert "\nOnCalendar=daily\n" in timer
