"""Runner of the shipped scripts for administrators."""

import os
import subprocess
from pathlib import Path

from testkit.controlplane.tools import binary


def run(
    script: Path, *arguments: str, kubeconfig: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with the real kubectl."""
    path = f"{binary('kubectl').parent}:{os.environ['PATH']}"
    home = str(kubeconfig.parent) if kubeconfig else "/nonexistent"  # for kubectl's cache
    kube = {"HOME": home, "KUBECONFIG": str(kubeconfig or "/dev/null")}
    variables = {"PATH": path, **kube, **environment}
    return subprocess.run(
        [script, *arguments], env=variables, capture_output=True, text=True, check=False
    )
