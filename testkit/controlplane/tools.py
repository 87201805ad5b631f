"""Programs that the tests run: installed ones, or built once into a cache.

`python -m testkit.controlplane.tools` prepares the programs of `make test`, with `--neighbours`
those of `make test-neighbours`. A program is searched in `KUBE_ASSETS`, the cache and PATH, in this
order; otherwise it is built from the module that pins it.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from testkit.controlplane.gobuild import BuildError, GoProgram, GoToolchain, say

KUBERNETES_VERSION: Final = "v1.37.2"
OLDEST_KUBERNETES_VERSION: Final = "v1.32.2"
"""Oldest version in docs/versions.md, for the cases of tests/versions."""
OLDEST: Final = "oldest-"
"""Prefix of the names of its programs."""
DESCHEDULER_VERSION: Final = "v0.36.0"
ETCD_VERSION: Final = "v3.7.0"
KWOK_VERSION: Final = "v0.8.0"
HELM_VERSION: Final = "v4.3.1"
PROMETHEUS_VERSION: Final = "3.15.0"
MODULES: Final = Path(__file__).parent
VERSION_TIMEOUT_SECONDS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Program that the tests need.

    Attributes:
        program: Go program to build.
        version_arguments: arguments that make it print its version.
        fitting: regular expression that matches the version output of an accepted program.
        build_seconds: approximate build time on two cores, after the tools listed before it.
        megabytes: approximate size of the program.
        version: version that is built here, "" if it does not matter.
        is_neighbour: whether only the tests with other projects and releases run it.
    """

    program: GoProgram
    version_arguments: tuple[str, ...]
    fitting: str
    build_seconds: int
    megabytes: int
    version: str = ""
    is_neighbour: bool = False


def _kubernetes(
    name: str,
    *version_arguments: str,
    build_seconds: int,
    megabytes: int,
    module: Path = MODULES,
    version: str = KUBERNETES_VERSION,
    is_neighbour: bool = False,
) -> Tool:
    minor = version.split(".")[1]
    program = GoProgram(
        module=module,
        package=f"k8s.io/kubernetes/cmd/{name}",
        variables={
            "k8s.io/component-base/version.gitVersion": version,
            "k8s.io/component-base/version.gitMajor": "1",
            "k8s.io/component-base/version.gitMinor": minor,
        },
    )
    return Tool(
        program=program,
        version_arguments=version_arguments,
        fitting=rf"\bv1\.{minor}\.\d+\s",
        build_seconds=build_seconds,
        megabytes=megabytes,
        version=version.removeprefix("v"),
        is_neighbour=is_neighbour,
    )


def _oldest_kubernetes(name: str, build_seconds: int, megabytes: int) -> Tool:
    return _kubernetes(
        name,
        "--version",
        build_seconds=build_seconds,
        megabytes=megabytes,
        module=MODULES / "oldest",
        version=OLDEST_KUBERNETES_VERSION,
        is_neighbour=True,
    )


def _prometheus(name: str, build_seconds: int, megabytes: int) -> Tool:
    program = GoProgram(
        module=MODULES / "prometheus",
        package=f"github.com/prometheus/prometheus/cmd/{name}",
        variables={"github.com/prometheus/common/version.Version": PROMETHEUS_VERSION},
        # file_sd and static targets stay; the clients of cloud providers are left out
        tags=("remove_all_sd",),
    )
    return Tool(
        program=program,
        version_arguments=("--version",),
        fitting=r"version 3\.\d+",
        build_seconds=build_seconds,
        megabytes=megabytes,
        version=PROMETHEUS_VERSION,
    )


TOOLS: Final = {
    "etcd": Tool(
        program=GoProgram(module=MODULES, package="go.etcd.io/etcd/server/v3", variables={}),
        version_arguments=("--version",),
        fitting=r"etcd Version: 3\.7\.",
        build_seconds=50,
        megabytes=25,
        version=ETCD_VERSION.removeprefix("v"),
    ),
    "kube-apiserver": _kubernetes("kube-apiserver", "--version", build_seconds=195, megabytes=119),
    "kube-scheduler": _kubernetes("kube-scheduler", "--version", build_seconds=40, megabytes=81),
    # Shares compiled packages with kube-scheduler.
    "extenderargs": Tool(
        program=GoProgram(module=MODULES / "extenderargs", package=".", variables={}),
        version_arguments=("-version",),
        fitting=r"extenderargs of kube-scheduler v0\.37\.",
        build_seconds=10,
        megabytes=9,
    ),
    # A separate module, because it has many dependencies that the others do not have.
    "kube-controller-manager": _kubernetes(
        "kube-controller-manager",
        "--version",
        build_seconds=40,
        megabytes=105,
        module=MODULES / "controllers",
        is_neighbour=True,
    ),
    "kubectl": _kubernetes("kubectl", "version", "--client", build_seconds=20, megabytes=62),
    "kwok": Tool(
        program=GoProgram(
            module=MODULES / "kwok", package="sigs.k8s.io/kwok/cmd/kwok", variables={}
        ),
        version_arguments=("--version",),
        fitting=r"kwok version v?0\.8\.",
        build_seconds=55,
        megabytes=64,
        version=KWOK_VERSION.removeprefix("v"),
    ),
    "cert-manager": Tool(
        program=GoProgram(module=MODULES / "certmanager", package=".", variables={}),
        version_arguments=("-help",),
        fitting=r"where /healthz answers",
        build_seconds=40,
        megabytes=67,
        is_neighbour=True,
    ),
    # With its provider of simulated nodes, which only creates Node objects.
    "karpenter": Tool(
        program=GoProgram(
            module=MODULES / "karpenter", package="sigs.k8s.io/karpenter/kwok", variables={}
        ),
        version_arguments=("--help",),
        fitting=r"-instance-types-file-path",
        build_seconds=80,
        megabytes=61,
        is_neighbour=True,
    ),
    # A release queries Prometheus only if the cluster's CA is at a path that exists only in pods;
    # this build reads a path in the working directory. A release prints "v20260526-v0.36.0", so it
    # is never accepted in place of this build.
    "descheduler": Tool(
        program=GoProgram(
            module=MODULES / "descheduler",
            package="sigs.k8s.io/descheduler/cmd/descheduler",
            variables={
                "sigs.k8s.io/descheduler/pkg/version.version": DESCHEDULER_VERSION,
                "sigs.k8s.io/descheduler/pkg/descheduler/client.K8sPodCAFilePath": "ca.crt",
            },
        ),
        version_arguments=("version",),
        fitting=r"GitVersion:v0\.36\.",
        build_seconds=100,
        megabytes=82,
        is_neighbour=True,
    ),
    "prometheus": _prometheus("prometheus", 80, 51),
    "promtool": _prometheus("promtool", 30, 54),
    "dashboardcheck": Tool(
        program=GoProgram(module=MODULES / "grafana", package=".", variables={}),
        version_arguments=("-version",),
        fitting=r"dashboardcheck of grafana-foundation-sdk 0\.0\.",
        build_seconds=30,
        megabytes=14,
        is_neighbour=True,
    ),
    f"{OLDEST}kube-apiserver": _oldest_kubernetes("kube-apiserver", 140, 95),
    f"{OLDEST}kube-scheduler": _oldest_kubernetes("kube-scheduler", 20, 67),
    "actionlint": Tool(
        program=GoProgram(
            module=MODULES / "actionlint",
            package="github.com/rhysd/actionlint/cmd/actionlint",
            variables={},
        ),
        version_arguments=("-version",),
        fitting=r"built with go",
        build_seconds=10,
        megabytes=6,
        is_neighbour=True,
    ),
    "helm": Tool(
        program=GoProgram(
            module=MODULES / "helm",
            package="helm.sh/helm/v4/cmd/helm",
            variables={"helm.sh/helm/v4/internal/version.version": HELM_VERSION},
        ),
        version_arguments=("version", "--short"),
        fitting=r"\bv4\.\d+\.\d+",
        build_seconds=80,
        megabytes=67,
        version=HELM_VERSION.removeprefix("v"),
        is_neighbour=True,
    ),
}


CLUSTER: Final = ("etcd", "kube-apiserver", "kube-scheduler", "kubectl", "kwok", "prometheus")
"""Programs of `make cluster`."""


@cache
def binary(name: str) -> Path:
    """Return the path of a tool; build the missing tools first.

    Args:
        name: name of the tool, a key of `TOOLS`.

    Raises:
        BuildError: the tool was not found and cannot be built.
    """
    path = _installed(name)
    if path is None:
        # All at once: separate builds would each compile the shared packages.
        prepare(names_of(neighbours=TOOLS[name].is_neighbour))
        path = cached_path(name)
    elif path != cached_path(name) and (text := other_version(name, path)):
        say(f"warning: {path} is {text}, the tests were made with {TOOLS[name].version}")
    return path


def other_version(name: str, path: Path) -> str:
    """Return the version of a found program, "" if it is the version that is built here."""
    found = re.search(r"\d+\.\d+\.\d+", _fitting_output(name, path))
    wanted = TOOLS[name].version
    return found.group() if found and wanted and found.group() != wanted else ""


def names_of(*, neighbours: bool) -> list[str]:
    """List the tools that `make test` runs, or those that `make test-neighbours` adds."""
    return [name for name, tool in TOOLS.items() if tool.is_neighbour is neighbours]


def missing(names: Iterable[str]) -> list[str]:
    """List the tools that are neither installed nor in the cache."""
    return [name for name in names if _installed(name) is None]


def build_minutes(names: Iterable[str]) -> int:
    """Estimate how long the builds of some tools take on two cores, in minutes, rounded up."""
    return -(-sum(TOOLS[name].build_seconds for name in names) // 60)


def build_plan(names: Sequence[str]) -> str:
    """Describe the tools to build: names, folder and sizes."""
    megabytes = sum(TOOLS[name].megabytes for name in names)
    return (
        f"build {', '.join(names)} into {cache_folder()}, once ({megabytes} MB; some GB more while "
        "it builds)"
    )


def prepare(names: Iterable[str]) -> None:
    """Build the missing tools, and remove files that only the build needed.

    Raises:
        BuildError: a tool cannot be built.
    """
    to_build = missing(names)
    if not to_build:
        return
    say(f"{build_plan(to_build)}, about {build_minutes(to_build)} min")
    with _build_lock():
        toolchain = GoToolchain(cache_folder() / "scratch")
        for name in to_build:
            _build(name, toolchain)
        toolchain.discard()


def cache_folder() -> Path:
    """Return the cache folder, which all checkouts share."""
    own = os.environ.get("IDLEGPU_CACHE")
    if own:
        return Path(own).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "idlegpu"


def cached_path(name: str) -> Path:
    """Return the path of a tool in the cache.

    The cache key covers the module files, the flags and the platform. It excludes the Go version,
    because a newer Go on the machine should not cause a rebuild that takes minutes.
    """
    program = TOOLS[name].program
    digest = hashlib.sha256()
    for file in (program.module / "go.mod", program.module / "go.sum", *program.sources()):
        digest.update(file.read_bytes())
    digest.update("\0".join([program.package, *program.flags()]).encode())
    digest.update(f"{platform.system()} {platform.machine()}".encode())
    return cache_folder() / "tools" / f"{name}-{digest.hexdigest()[:12]}" / name


def main(arguments: Sequence[str]) -> int:
    """Prepare the tools, and print the path of each.

    Args:
        arguments: `--neighbours` adds the tools of `make test-neighbours`.
    """
    started = time.monotonic()
    names = names_of(neighbours=False)
    if "--neighbours" in arguments:
        names += names_of(neighbours=True)
    try:
        prepare(names)
    except BuildError as error:
        say(str(error))
        return 1
    for name in names:
        say(f"{name:15} {binary(name)}")
    say(f"ready after {time.monotonic() - started:.0f} s")
    return 0


def _installed(name: str) -> Path | None:
    assets = os.environ.get("KUBE_ASSETS")
    if assets and _fits(name, Path(assets) / name):
        return Path(assets) / name
    if cached_path(name).exists():
        return cached_path(name)
    on_path = shutil.which(name)
    return Path(on_path) if on_path and _fits(name, Path(on_path)) else None


def _fits(name: str, path: Path) -> bool:
    return bool(_fitting_output(name, path))


def _fitting_output(name: str, path: Path) -> str:
    """Return a program's version output; "" if it fails or does not match."""
    tool = TOOLS[name]
    try:
        result = subprocess.run(
            [str(path), *tool.version_arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=VERSION_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    output = result.stdout + result.stderr
    return output if re.search(tool.fitting, output) else ""


def _build(name: str, toolchain: GoToolchain) -> None:
    path = cached_path(name)
    if path.exists():  # another process built it during the wait for the lock
        return
    started = time.monotonic()
    say(f"building {name} ...")
    toolchain.build(TOOLS[name].program, path)
    say(f"built {name} in {time.monotonic() - started:.0f} s")


@contextmanager
def _build_lock() -> Iterator[None]:
    """Hold the build lock while the context is open; the system releases it if the process ends."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that builds the same tools ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
