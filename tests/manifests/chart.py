"""Helm chart, rendered by the real helm."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from testkit.controlplane.objects import Object
from testkit.controlplane.shipped import ROOT
from testkit.controlplane.tools import KUBERNETES_VERSION, binary

CHART: Final = ROOT / "charts" / "idlegpu"
RELEASE: Final = "idlegpu"
REGISTRY: Final = "docker.io/library"
"""Registry of the images in tests that set none, because the chart does not render without one."""

Values = Mapping[str, Any]


class HelmError(RuntimeError):
    """Error of helm; the message is its output."""


def helm(*arguments: str, folder: Path, kubeconfig: Path | None = None) -> str:
    """Run the real helm, with its own files in a folder, and return its output.

    Raises:
        HelmError: helm failed.
    """
    places = {f"HELM_{name}_HOME": str(folder / name) for name in ("CACHE", "CONFIG", "DATA")}
    result = subprocess.run(
        [str(binary("helm")), *arguments],
        env={**places, "HOME": str(folder), "KUBECONFIG": str(kubeconfig or "")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if result.returncode:
        raise HelmError(result.stderr)
    return result.stdout


def values_file(folder: Path, values: Values) -> Path:
    """Write a values file for helm, with a registry unless the values set one."""
    path = folder / "values.yaml"
    images = {"registry": REGISTRY, **values.get("images", {})}
    path.write_text(json.dumps({**values, "images": images}))
    return path


def rendered(
    values: Values, folder: Path, kube_version: str = KUBERNETES_VERSION, chart: Path = CHART
) -> list[Object]:
    """Render the chart with values for an API server's version, and return the objects."""
    path = values_file(folder, values)
    options = ("--values", str(path), "--kube-version", kube_version)
    output = helm("template", RELEASE, str(chart), *options, folder=folder)
    return [item for item in yaml.load_all(output, yaml.CSafeLoader) if item]
