"""Contents of the images, built as in their Dockerfiles, and run without other files."""

import hashlib
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from simulation.cluster import kubeconfig_text, run_cluster
from simulation.demo_fleet import demo_fleet
from simulation.kube_scheduler import SimulatedScheduler
from simulation.objects import pod_object
from testkit.agent.fake_driver import GIB, FakeDriver, card, uuid
from testkit.controlplane.process import free_port
from testkit.controlplane.waiting import wait_for
from testkit.internet import internet_environment
from tests.images.dockerfile import IMAGES, ROOT, Image, build, fetch_wheels
from tests.images.platforms import Platform, chosen

# Builds for minutes, and needs a package index; slower in an emulator.
pytestmark = [pytest.mark.e2e, pytest.mark.neighbours, pytest.mark.timeout(900)]

SETTINGS = """
listen: 127.0.0.1:{webhooks}
status_listen: 127.0.0.1:{status}
kubeconfig: {kubeconfig}
prometheus: {{url: "{prometheus}", interval_seconds: 1}}
tls:
  cert_file: {certificates}/tls.crt
  key_file: {certificates}/tls.key
  client_ca_file: {certificates}/ca.crt
wake: {{enabled: false}}
drain_seconds: 0
"""
IMPORT_ALL = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
programs = ("agent", "extender", "worker_device")
for path in sorted(p for name in programs for p in (root / name).rglob("*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if not name.endswith("__main__"):
        importlib.import_module(name)
        print(name)
"""
IMPORT_COMPILED = """
import importlib, pathlib, platform, sys
print("Python", platform.python_version(), platform.machine(), *platform.libc_ver())
root = pathlib.Path(sys.argv[1])
for path in sorted(root.rglob("*.so")):
    folders = path.parent.relative_to(root).parts
    if not any(folder.endswith(".libs") for folder in folders):  # which NumPy is linked with
        name = ".".join((*folders, path.name.partition(".")[0]))
        importlib.import_module(name)
        print(name)
"""
COMPILED = {
    "extender": {
        *("_cffi_backend", "aiohttp", "cryptography", "msgspec", "numpy", "orjson"),
        *("pydantic_core", "uvloop", "yaml"),
    },
    "agent": {"google", "msgspec", "numpy", "orjson", "pydantic_core", "yaml"},
}
ELF_MACHINES = {"x86_64": b"\x3e\x00", "aarch64": b"\xb7\x00"}
GPU = "nvidia.com/gpu"
DEADLINE_SECONDS = 120.0


def show(what: object) -> None:
    """Print an observation, for runs with `-s`."""
    print(f"\n{what}")  # noqa: T201 - kept in bench/results/arm64.md


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """Return this machine's platform, or the one that IMAGES_PLATFORM names."""
    return chosen(tmp_path_factory.mktemp("python"))


@pytest.fixture(scope="module")
def wheels(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages of both lock files."""
    return fetch_wheels(platform, tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def extender(platform: Platform, tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Image:
    """Return the extender's image."""
    return build("extender", platform, tmp_path_factory.mktemp("extender"), wheels)


@pytest.fixture(scope="module")
def agent(platform: Platform, tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Image:
    """Return the agent's image."""
    return build("agent", platform, tmp_path_factory.mktemp("agent"), wheels)


@contextmanager
def serving(image: Image, *arguments: str, **variables: str) -> Iterator[None]:
    """Run a program of an image while the context is open."""
    process = subprocess.Popen(
        image.command(*arguments),
        env=image.environment(**variables),
        cwd="/",
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(30)


async def until_answered(url: str, said: str = "", *, context: ssl.SSLContext | bool = True) -> str:
    """Poll until the status is 200 and the answer contains a text; return the answer."""

    async def answer() -> str | None:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(url, ssl=context) as found:
                    text = await found.text()
                    return text if found.status == 200 and said in text else None
            except aiohttp.ClientConnectionError:
                return None

    return await wait_for(answer, url, deadline_seconds=DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def certificates(extender: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the certificates that the extender's image issued."""
    folder = tmp_path_factory.mktemp("certs")
    result = extender.run(
        "-m", "extender.server.certificates", "--folder", str(folder), "--address", "127.0.0.1"
    )
    assert result.returncode == 0, result.stderr
    return folder


def two_cards(image: Image, folder: Path) -> dict[str, str]:
    """Return variables with which a program of the image finds an idle and a busy card."""
    driver = FakeDriver(folder, image.platform.compiler)
    driver.has(card(0), card(1, busy=90, used=60 * GIB))
    return {name: driver.environment[name] for name in ("FAKE_NVML", "LD_LIBRARY_PATH")}


def hashes(tree: Path) -> dict[str, tuple[int, str]]:
    """Return mode and hash ("" for a folder) of all files in a tree, independent of times."""
    return {
        str(path.relative_to(tree)): (
            stat.S_IMODE(path.stat().st_mode),
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in (tree, *tree.rglob("*"))
    }


async def test_extender_from_its_image_places_pods_over_tls(
    extender: Image, certificates: Path, tmp_path: Path
) -> None:
    webhooks, status = free_port(), free_port()
    settings = tmp_path / "settings.yaml"
    context = ssl.create_default_context(cafile=certificates / "kube-scheduler" / "ca.crt")
    own = certificates / "kube-scheduler"
    context.load_cert_chain(own / "tls.crt", own / "tls.key")
    async with (
        run_cluster(demo_fleet()) as cluster,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
    ):
        settings.write_text(
            SETTINGS.format(
                webhooks=webhooks,
                status=status,
                kubeconfig=cluster.kubeconfig,
                prometheus=cluster.prometheus_url,
                certificates=certificates / "extender",
            )
        )
        with serving(extender, "-m", "extender", "--config", str(settings)):
            await until_answered(f"https://127.0.0.1:{status}/readyz", context=context)
            scheduler = SimulatedScheduler(
                url=f"https://127.0.0.1:{webhooks}", control=cluster.control, session=session
            )
            pod = pod_object("a", {GPU: 1}, annotations={"idlegpu.io/gpu-memory": "60Gi"})
            placement = await scheduler.schedule(pod)
            metrics = await until_answered(f"https://127.0.0.1:{status}/metrics", context=context)
        show(placement)

    assert placement.node in {"gpu-h200-01", "gpu-h100-01"}  # no other GPU of that size is idle
    assert placement.refused == {
        "gpu-a100-01": "node(s) had too few working GPUs (idlegpu)",
        "gpu-v100-01": "node(s) had GPUs with less memory than the pod requests (idlegpu)",
        "gpu-v100-02": "node(s) had GPUs with less memory than the pod requests (idlegpu)",
    }
    assert "idlegpu_" in metrics


async def test_the_extender_serves_without_an_api_server(extender: Image, tmp_path: Path) -> None:
    webhooks, status = free_port(), free_port()
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        f"listen: 127.0.0.1:{webhooks}\nstatus_listen: 127.0.0.1:{status}\n"
        f"kubeconfig: {tmp_path}/kubeconfig\ndrain_seconds: 0\n"
    )
    (tmp_path / "kubeconfig").write_text(kubeconfig_text("http://127.0.0.1:1"))

    with serving(extender, "-m", "extender", "--config", str(settings)):
        await until_answered(f"http://127.0.0.1:{status}/healthz")


def test_extender_image_can_create_certificates(certificates: Path) -> None:
    for side in ("extender", "kube-scheduler"):
        assert {path.name for path in (certificates / side).iterdir()} == {
            *("ca.crt", "tls.crt", "tls.key")
        }


def test_agent_without_a_driver_names_what_is_missing(agent: Image) -> None:
    result = agent.run("-m", "agent", "--once", IDLEGPU_AGENT_NODE="gpu-7")

    assert result.returncode in {0, 3}, result.stderr  # 0 on a machine with a GPU
    assert "gpu-7" in result.stdout


def test_agent_in_its_image_prints_driver_values(agent: Image, tmp_path: Path) -> None:
    result = agent.run("-m", "agent", "--once", COLUMNS="200", **two_cards(agent, tmp_path))

    assert result.returncode == 0, result.stderr
    idle, busy = (line for line in result.stdout.splitlines() if "H100" in line)
    assert " idle: busy 0%" in idle
    assert " not idle: busy 90%" in busy
    show(result.stdout)


async def test_agent_in_its_image_serves_driver_values(agent: Image, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    variables = {"IDLEGPU_AGENT_LISTEN": address, "IDLEGPU_AGENT_KUBELET_SOCKET": ""}

    with serving(agent, "-m", "agent", **variables, **two_cards(agent, tmp_path)):
        metrics = await until_answered(f"http://{address}/metrics", uuid(1))

    assert uuid(0) in metrics


@pytest.mark.parametrize("program", ["extender", "agent"])
def test_a_program_says_how_it_is_used_and_checks_settings(
    program: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    image: Image = request.getfixturevalue(program)
    settings = tmp_path / "settings.yaml"
    settings.write_text("listen: 127.0.0.1:8888\n")

    used = image.run("-m", program, "--help")
    checked = image.run("-m", program, "--check-config", str(settings))

    assert (used.returncode, checked.returncode) == (0, 0), used.stderr + checked.stderr
    assert used.stdout.startswith(f"usage: python -m {program}")
    assert f"{settings}: ok" in checked.stdout


@pytest.mark.parametrize("program", ["extender", "agent"])
def test_every_compiled_module_in_an_image_is_of_its_platform_and_loads(
    program: str, request: pytest.FixtureRequest
) -> None:
    image: Image = request.getfixturevalue(program)

    result = image.run("-c", IMPORT_COMPILED, str(image.tree))

    assert result.returncode == 0, result.stderr
    about, *names = result.stdout.splitlines()
    assert image.platform.machine in about
    assert names
    assert COMPILED[program] <= {name.partition(".")[0] for name in names}
    machines = {path.read_bytes()[18:20] for path in image.tree.rglob("*.so*")}
    assert machines == {ELF_MACHINES[image.platform.machine]}
    show(f"{program}: {about}: {' '.join(names)}")


@pytest.mark.parametrize("program", ["extender", "agent"])
def test_every_module_in_an_image_finds_its_imports(
    program: str, request: pytest.FixtureRequest
) -> None:
    image: Image = request.getfixturevalue(program)

    result = image.run("-c", IMPORT_ALL, str(image.tree))

    assert result.returncode == 0, result.stderr
    assert f"{program}.app" in result.stdout.split()
    version = image.run("-m", program, "--version")
    assert f'\nversion = "{version.stdout.strip()}"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_extenders_image_has_of_the_agent_its_report_alone(extender: Image) -> None:
    folder = extender.tree / "agent"
    modules = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}

    assert modules == {"__init__.py", "report/__init__.py", "report/contract.py"}
    assert not list(extender.tree.glob("pynvml*"))
    assert not (extender.tree / "extender" / "cli").exists()


def test_the_agents_image_has_no_server_of_the_extender(agent: Image) -> None:
    rooms = {path.name for path in (agent.tree / "extender").iterdir()} - {"__pycache__"}

    assert {name for name in rooms if not name.endswith(".py")} == {"core", "runtime", "settings"}
    assert "app.py" not in rooms
    assert not (agent.tree / "aiohttp").exists()


@pytest.mark.parametrize("program", ["extender", "agent"])
def test_nothing_in_an_image_is_compiled_when_it_starts(
    program: str, request: pytest.FixtureRequest
) -> None:
    image: Image = request.getfixturevalue(program)
    sources = [path for name in ("extender", "agent") for path in (image.tree / name).rglob("*.py")]

    compiled = [list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")) for path in sources]

    assert [len(each) for each in compiled] == [1] * len(sources)
    assert all(b"/opt/idlegpu/" in file.read_bytes() for (file,) in compiled)
    assert all(str(image.tree).encode() not in file.read_bytes() for (file,) in compiled)


@pytest.mark.timeout(1800)  # two builds
@pytest.mark.parametrize("program", ["extender", "agent"])
def test_the_same_lock_file_makes_the_same_files(
    program: str, request: pytest.FixtureRequest, platform: Platform, wheels: Path, tmp_path: Path
) -> None:
    image: Image = request.getfixturevalue(program)

    again = build(program, platform, tmp_path / "elsewhere", wheels, is_private=True)

    made = hashes(image.tree)
    assert hashes(again.tree) == made
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

    result = subprocess.run(
        command, env=internet_environment(), capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr
    assert "Would install" in result.stderr
