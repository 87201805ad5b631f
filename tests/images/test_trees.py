"""What the images hold, built as their Dockerfiles say, and run without anything else."""

import hashlib
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.controlplane.process import free_port
from tests.controlplane.waiting import wait_for
from tests.images.dockerfile import (
    IMAGES,
    ROOT,
    build,
    command,
    environment,
    fetch_wheels,
    run,
)

# As slow as what needs a cluster, and like that it needs a package index.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SETTINGS = """
listen: 127.0.0.1:{webhooks}
status_listen: 127.0.0.1:{status}
kubeconfig: {folder}/kubeconfig
drain_seconds: 0
"""
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: none
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
users: [{name: none, user: {token: none}}]
"""
IMPORT_ALL = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
for path in sorted(p for name in ("agent", "extender") for p in (root / name).rglob("*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if not name.endswith("__main__"):
        importlib.import_module(name)
        print(name)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of both lock files."""
    return fetch_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def extender(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """What the extender's image has in its folder."""
    return build("extender", tmp_path_factory.mktemp("extender"), wheels)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """What the agent's image has in its folder."""
    return build("agent", tmp_path_factory.mktemp("agent"), wheels)


@pytest.fixture
def serving(extender: Path, tmp_path: Path) -> Iterator[str]:
    """An extender without an API server; yields the URL of its health."""
    webhooks, status = free_port(), free_port()
    settings = tmp_path / "settings.yaml"
    settings.write_text(SETTINGS.format(webhooks=webhooks, status=status, folder=tmp_path))
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    process = subprocess.Popen(
        command("-m", "extender", "--config", str(settings)),
        env=environment(extender),
        cwd="/",
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{status}"
    finally:
        process.terminate()
        process.wait(30)


def hashes(tree: Path) -> dict[str, tuple[int, str]]:
    """Return mode and hash ("" for a folder) of all in a tree, and nothing of when it was made."""
    return {
        str(path.relative_to(tree)): (
            stat.S_IMODE(path.stat().st_mode),
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in (tree, *tree.rglob("*"))
    }


async def test_the_extender_serves_with_what_its_image_holds(serving: str) -> None:
    async def answers() -> bool:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(f"{serving}/healthz") as answer:
                    return answer.status == 200
            except aiohttp.ClientConnectionError:
                return False

    await wait_for(answers, "the extender answers")


def test_certificates_are_made_with_what_the_extenders_image_holds(
    extender: Path, tmp_path: Path
) -> None:
    result = run(extender, "-m", "extender.certs", "--folder", str(tmp_path / "certs"))

    assert result.returncode == 0, result.stderr
    assert (tmp_path / "certs" / "extender" / "tls.crt").exists()


def test_the_agent_says_without_a_driver_what_is_missing(agent: Path) -> None:
    result = run(agent, "-m", "agent", "--once", IDLEGPU_AGENT_NODE="gpu-7")

    assert result.returncode in {0, 3}, result.stderr  # 0 on a machine with a GPU
    assert "gpu-7" in result.stdout


@pytest.mark.parametrize("program", ["extender", "agent"])
def test_every_module_in_an_image_finds_what_it_imports(
    program: str, request: pytest.FixtureRequest
) -> None:
    tree: Path = request.getfixturevalue(program)

    result = run(tree, "-c", IMPORT_ALL, str(tree))

    assert result.returncode == 0, result.stderr
    assert f"{program}.app" in result.stdout.split()
    version = run(tree, "-m", program, "--version")
    assert f'\nversion = "{version.stdout.strip()}"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_extenders_image_has_of_the_agent_its_report_alone(extender: Path) -> None:
    modules = {path.name for path in (extender / "agent").rglob("*.py")}

    assert modules == {"__init__.py", "report.py"}
    assert not list(extender.glob("pynvml*"))
    assert not (extender / "extender" / "cli").exists()


def test_the_agents_image_has_no_server_of_the_extender(agent: Path) -> None:
    rooms = {path.name for path in (agent / "extender").iterdir()} - {"__pycache__"}

    assert rooms == {"__init__.py", "core", "settings", "log_writer.py", "logs.py", "memory.py"}
    assert not (agent / "aiohttp").exists()


@pytest.mark.parametrize("program", ["extender", "agent"])
def test_nothing_in_an_image_is_compiled_when_it_starts(
    program: str, request: pytest.FixtureRequest
) -> None:
    tree: Path = request.getfixturevalue(program)
    sources = [path for name in ("extender", "agent") for path in (tree / name).rglob("*.py")]

    compiled = [list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")) for path in sources]

    assert [len(each) for each in compiled] == [1] * len(sources)
    assert all(b"/opt/idlegpu/" in file.read_bytes() for (file,) in compiled)
    assert all(str(tree).encode() not in file.read_bytes() for (file,) in compiled)


@pytest.mark.timeout(600)  # two builds
@pytest.mark.parametrize("program", ["extender", "agent"])
def test_the_same_lock_file_makes_the_same_files(
    program: str, request: pytest.FixtureRequest, wheels: Path, tmp_path: Path
) -> None:
    tree: Path = request.getfixturevalue(program)

    again = build(program, tmp_path / "elsewhere", wheels, is_private=True)

    made = hashes(tree)
    assert hashes(again) == made
    assert len(made) > 1000
    assert {mode for mode, content in made.values() if content} == {0o644}
    assert {mode for mode, content in made.values() if not content} == {0o755}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("program", ["extender", "agent"])
def test_every_package_has_a_wheel_for_both_platforms(
    program: str, machine: str, tmp_path: Path
) -> None:
    pytest.importorskip("uv", reason="uv resolves for other platforms than this one")
    command = [sys.executable, "-m", "uv", "--no-config", "pip", "install", "--dry-run"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--python-platform", f"{machine}-manylinux_2_28", "--python-version", "3.11"]
    command += ["--target", str(tmp_path), "--requirements", str(IMAGES / f"{program}.txt")]

    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert "Would install" in result.stderr
