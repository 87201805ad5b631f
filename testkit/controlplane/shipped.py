"""Shipped manifests, as files and as built by kustomize."""

import re
import subprocess
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Final

import yaml

from testkit.controlplane.objects import Object
from testkit.controlplane.tools import binary

ROOT: Final = Path(__file__).parents[2]
MANIFESTS: Final = ROOT / "manifests"
OVERLAYS: Final = MANIFESTS / "overlays"
COMPONENTS: Final = MANIFESTS / "components"
EXAMPLES: Final = MANIFESTS / "examples"
SCHEDULER_CONFIG: Final = ROOT / "scheduler-config"
SECOND_SCHEDULER: Final = SCHEDULER_CONFIG / "second-scheduler"
CRDS: Final = Path(__file__).parent / "crds"

EXTENDER_NAMESPACE: Final = "idlegpu"
AGENT_NAMESPACE: Final = "idlegpu-agent"

FILLED_IN: Final = {
    "FIXED_ADDRESS": "10.96.0.88",
    "API_SERVER_NETWORK": "192.0.2.0/24",
    "KUBELET_ROOT": "/var/lib/k0s/kubelet",
}
"""Values of the placeholders that manifests/render.sh reads from the environment."""

# Plural names that do not follow from the kind by adding an s.
_IRREGULAR: Final = {
    "NetworkPolicy": "networkpolicies",
    "CSIStorageCapacity": "csistoragecapacities",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
}


@cache
def manifest_text(folder: Path) -> str:
    """Build a kustomization as YAML, with `FILLED_IN` for its placeholders.

    Raises:
        RuntimeError: kubectl cannot build it.
    """
    command = [str(binary("kubectl")), "kustomize", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if result.returncode:
        raise RuntimeError(f"cannot put {folder} together: {result.stderr}")
    text = result.stdout
    for name, value in FILLED_IN.items():
        text = re.sub(rf"(\.\./)?{name}", value, text)
    return text


@cache
def _built(folder: Path) -> list[Object]:
    return [item for item in yaml.safe_load_all(manifest_text(folder)) if item]


def built(folder: Path) -> list[Object]:
    """Build a kustomization with the real kubectl, and return its objects.

    Raises:
        RuntimeError: the folder has no kustomization, or it refers to a missing file.
    """
    # a copy, because parsing the YAML again would take fifty times as long
    return deepcopy(_built(folder))


def with_components(folder: Path, names: Iterable[str]) -> Path:
    """Write an overlay of all manifests with components; return its folder.

    Args:
        folder: empty folder outside the repository.
        names: names of folders in manifests/components.
    """
    up = "/".join([".."] * len(folder.resolve().parts[1:]))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{up}{MANIFESTS}/base"],
        "components": [f"{up}{COMPONENTS}/{name}" for name in names],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder


def find(items: Iterable[Object], kind: str, name: str) -> Object:
    """Return the only object of a kind and name.

    Raises:
        LookupError: there is no such object, or more than one.
    """
    found = [item for item in items if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    if len(found) != 1:
        raise LookupError(f"{kind} {name}: {len(found)} found")
    return found[0]


def collection_of(item: Object) -> str:
    """Return the API path of a shipped object's collection.

    Example:
        >>> role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role"}
        >>> collection_of(role | {"metadata": {"namespace": "a"}})
        '/apis/rbac.authorization.k8s.io/v1/namespaces/a/roles'
    """
    version, kind = item["apiVersion"], item["kind"]
    plural = _IRREGULAR.get(kind, f"{kind.lower()}s")
    plural = re.sub(r"ss$", "sses", re.sub(r"sss$", "sses", plural))
    group = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = item["metadata"].get("namespace")
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"{group}{scope}/{plural}"


def address_of(item: Object) -> str:
    """Return the API path of a shipped object."""
    return f"{collection_of(item)}/{item['metadata']['name']}"


def pod_of(item: Object, name: str) -> Object:
    """Build a pod of a Deployment, DaemonSet or Job, as its controller would."""
    template = item["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **template["metadata"],
            "name": name,
            "namespace": item["metadata"].get("namespace", "default"),
        },
        "spec": template["spec"],
    }
