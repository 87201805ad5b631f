"""Commands of docs/install, run as written as far as one machine allows.

API server, kube-controller-manager, kube-scheduler (it reads the configuration that a recipe
writes), kubectl, helm, `idlegpu` and the certificate Job's program are real. There are no kubelets
and no images, so commands that wait for pods or change a host are only logged.
"""

import asyncio
import os
import re
import shlex
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import yaml

from testkit.controlplane.objects import node
from testkit.controlplane.shipped import ROOT
from testkit.controlplane.tools import binary
from testkit.controlplane.waiting import wait_for
from tests.manifests.releases import Release

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(300)]

PAGES: Final = sorted((ROOT / "docs" / "install").glob("*.md"))
BLOCK: Final = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
HOST_PATH: Final = re.compile(r"(?<![\w./#-])/(?=(etc|usr|var)/)")
FOREIGN_RANGE: Final = re.compile(r"\b10\.\d+\.\d+\.\d+\b")
ADDRESS: Final = "10.96.0.77"
"""Address in the service range of this API server, unlike those of some recipes."""
FOLDERS: Final = (
    "etc/kubernetes",
    "etc/rancher/k3s",
    "etc/rancher/rke2",
    "etc/systemd/system",
    "usr/local/sbin",
    "var/snap/microk8s/common",
    "var/snap/microk8s/current/args",
)
KUBECONFIGS: Final = (
    "etc/kubernetes/admin.conf",
    "etc/kubernetes/scheduler.conf",
    "etc/rancher/k3s/k3s.yaml",
    "etc/rancher/rke2/rke2.yaml",
    "var/lib/rancher/k3s/server/cred/scheduler.kubeconfig",
    "var/lib/rancher/rke2/server/cred/scheduler.kubeconfig",
    "var/snap/microk8s/current/credentials/client.config",
    "var/snap/microk8s/current/credentials/scheduler.config",
)
LOGGED: Final = ("make", "snap", "systemctl")
KUBECTL: Final = """
case "$*" in
*"condition=complete job/idlegpu-certs"*)
    exec {python} -m extender.server.certificates --secrets --kubeconfig {admin} ;;
*"rollout status"*) ;;
*"component=kube-scheduler"*) echo "- --config=/etc/kubernetes/idlegpu/kube-scheduler.yaml" ;;
*) exec {kubectl} "$@" ;;
esac
"""
# In place of kube-scheduler's restart: the real program ends after it has written its parsed
# configuration.
SCHEDULER: Final = """
for file in $(find {root} -name kube-scheduler.yaml); do
    timeout 60 {scheduler} --config "$file" --write-config-to {root}/accepted.yaml >&2
    [ -s {root}/accepted.yaml ]
done
"""
# Any exit status except "wrong usage" is accepted, because no extender answers.
IDLEGPU: Final = """
status=0
{python} -m extender.cli "$@" >{root}/idlegpu.out 2>&1 || status=$?
cat {root}/idlegpu.out
[ $status -ne 2 ]
"""


def commands(page: Path) -> list[str]:
    """Return the code blocks of a page with commands, in order."""
    return [
        re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
        for indent, block in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


class Host:
    """Folder in place of a machine's root, with programs of which some only log."""

    def __init__(self, root: Path, release: Release) -> None:
        self.root = root
        self.programs = root / "bin"
        self.log = root / "log"
        admin = release.plane.kubeconfig()
        for folder in FOLDERS:
            (root / folder).mkdir(parents=True)
        for name in KUBECONFIGS:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(admin.read_text())
        self.programs.mkdir()
        names = {
            "root": shlex.quote(str(root)),
            "python": shlex.quote(sys.executable),
            "admin": shlex.quote(str(admin)),
            "kubectl": binary("kubectl"),
            "scheduler": binary("kube-scheduler"),
        }
        self.install("kubectl", KUBECTL.format(**names))
        self.install("idlegpu", IDLEGPU.format(**names))
        self.install("helm", f'exec {binary("helm")} "$@"')
        self.install("kubeadm", SCHEDULER.format(**names))
        for name in LOGGED:
            self.install(name, SCHEDULER.format(**names) if name != "make" else "exit 0")
        self._environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("IDLEGPU")},
            **{f"HELM_{name}_HOME": str(root / name) for name in ("CACHE", "CONFIG", "DATA")},
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOME": str(root),
            "KUBECONFIG": str(admin),
            "SCHEDULER_KUBECONFIG": str(root / "etc/kubernetes/scheduler.conf"),
        }

    def install(self, name: str, body: str) -> None:
        file = self.programs / name
        file.write_text(f'#!/bin/bash\nset -e\necho "{name} $*" >>"{self.log}"\n{body}\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    async def run(self, script: str) -> None:
        """Run commands in the checkout, with paths of a host below this folder.

        Raises:
            AssertionError: a command failed; the message is the output.
        """
        script = HOST_PATH.sub(f"{self.root}/", script)
        script = FOREIGN_RANGE.sub(ADDRESS, script)
        process = await asyncio.create_subprocess_exec(
            "bash", "-xeuo", "pipefail", "-c", script,
            cwd=ROOT,
            env=self._environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()

    def ran(self) -> list[str]:
        return self.log.read_text().splitlines()


async def is_gone(release: Release) -> bool:
    """Return whether no object of idlegpu is left."""
    kinds = "namespaces,clusterroles,clusterrolebindings,mutatingwebhookconfigurations"
    label = "app.kubernetes.io/part-of=idlegpu"
    return not await release.plane.kubectl("get", kinds, "-l", label, "-o", "name")


def assert_read(host: Host) -> None:
    """Check that servers are configured to read the written files."""
    for name in ("k3s", "rke2"):
        folder = host.root / "etc" / "rancher" / name
        config = yaml.safe_load((folder / "config.yaml.d" / "idlegpu.yaml").read_text())
        own = folder / "idlegpu"
        assert config["kube-scheduler-arg+"] == [f"config={own}/kube-scheduler.yaml"]
        assert (own / "kube-scheduler.yaml").is_file()
        assert config.get("kube-scheduler-extra-mount+", [f"{own}:{own}"]) == [f"{own}:{own}"]
    unit = (host.root / "etc/systemd/system/idlegpu-control-plane.service").read_text()
    assert f"KUBECONFIG={host.root}/var/snap/microk8s/current/credentials/" in unit
    assert f"idlegpu-control-plane {host.root}/var/snap/microk8s/common/idlegpu\n" in unit
    arguments = (host.root / "var/snap/microk8s/current/args/kube-scheduler").read_text()
    assert Path(arguments.strip().removeprefix("--config=")).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
async def test_a_recipe_runs_as_it_is_written_and_leaves_nothing(
    release: Release, tmp_path: Path, page: Path
) -> None:
    host = Host(tmp_path / "host", release)
    await release.admin.create(node("gpu", labels={"cloud.google.com/gke-accelerator": "t4"}))

    await host.run("\n".join(commands(page)))

    assert any(line.startswith("idlegpu doctor") for line in host.ran())
    if page.stem == "distributions":
        assert_read(host)
    await wait_for(partial(is_gone, release), "nothing of idlegpu is left")
    gpu_node = await release.admin.request("GET", "/api/v1/nodes/gpu")
    assert "idlegpu.io/scheduler" not in gpu_node["metadata"]["labels"]


async def test_the_readmes_commands_install_a_second_scheduler(
    release: Release, tmp_path: Path
) -> None:
    host = Host(tmp_path / "host", release)
    await release.admin.create(node("gpu"))
    (block,) = commands(ROOT / "README.md")

    await host.run(block.replace("NODE", "gpu").replace("//PROMETHEUS", "//prometheus"))

    found = await release.plane.kubectl("-n", "idlegpu", "get", "deployments", "-o", "name")
    assert found.split() == [
        "deployment.apps/idlegpu-extender",
        "deployment.apps/idlegpu-scheduler",
    ]
    own = await release.admin.request("GET", "/api/v1/nodes/gpu")
    assert own["metadata"]["labels"]["idlegpu.io/scheduler"] == "idlegpu-scheduler"
    assert own["spec"]["taints"][0]["key"] == "idlegpu.io/scheduler"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipe_states_needs_duration_and_rollback(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert re.search(r"Plan\s+(\d+|\w+)\s+minutes", text)
    assert "\nYou need:\n" in text
    assert re.search(r"\bWay\s+back\b", text)
    checks = [block for block in commands(page) if re.search("^idlegpu ", block, re.MULTILINE)]
    assert checks
    assert all(block.splitlines()[-1].startswith("idlegpu doctor") for block in checks)
