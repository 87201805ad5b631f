"""OCI archives that `make images` writes without docker and podman."""

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import pytest

from testkit.controlplane.tools import KUBERNETES_VERSION, binary
from testkit.internet import internet_environment
from tests.images.dockerfile import ROOT, fetch_wheels, stages, texts
from tests.images.platforms import native

# Builds for minutes, and needs a package index and Debian's mirror.
pytestmark = [pytest.mark.e2e, pytest.mark.neighbours, pytest.mark.timeout(900)]

ARCHIVE: Final = ROOT / "images" / "archive.py"
REGISTRY: Final = "r.example.com/team"
TAG: Final = "7"
MEDIA: Final = "application/vnd.oci.image."
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
IMPORTS: Final = """
import bz2, ctypes, lzma, sqlite3, ssl, uuid, zoneinfo
zoneinfo.ZoneInfo("Europe/Berlin")
print(len(ssl.create_default_context().get_ca_certs()) > 100)
"""
WHAT_IS_LOADED: Final = """
import importlib, pathlib, sys
root = pathlib.Path("/opt/idlegpu")
for path in sorted(root.rglob("*.so")):
    folders = path.parent.relative_to(root).parts
    if not any(folder.endswith(".libs") for folder in folders):
        importlib.import_module(".".join((*folders, path.name.partition(".")[0])))
print("all")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Image layout that was read from an archive."""

    index: Mapping[str, Any]
    blobs: Mapping[str, bytes]

    def document(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.blobs[descriptor["digest"]])
        return found

    @property
    def manifest(self) -> dict[str, Any]:
        (descriptor,) = self.index["manifests"]
        return self.document(descriptor)

    @property
    def image(self) -> dict[str, Any]:
        return self.document(self.manifest["config"])

    def unpack(self, folder: Path) -> Path:
        """Unpack the layers as a container's file system; return its root."""
        root = folder / "root"
        root.mkdir(mode=0o755)  # the image's user enters it, unlike the folder
        for layer in self.manifest["layers"]:
            with tarfile.open(fileobj=io.BytesIO(self.blobs[layer["digest"]])) as tar:
                tar.extractall(root, filter="fully_trusted")  # noqa: S202 - our own
        return root


def layout(archive: Path) -> Layout:
    """Read an archive, and check the requirements of the specification of image layouts."""
    with tarfile.open(archive) as tar:
        files = {
            each.name: file.read() for each in tar if (file := tar.extractfile(each)) is not None
        }
    assert json.loads(files.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads(files.pop("index.json"))
    blobs = {name.removeprefix("blobs/").replace("/", ":"): data for name, data in files.items()}
    read = Layout(index=index, blobs=blobs)
    descriptors = [*index["manifests"], read.manifest["config"], *read.manifest["layers"]]
    assert {each["digest"] for each in descriptors} == blobs.keys()
    for each in descriptors:
        data = blobs[each["digest"]]
        assert each["size"] == len(data)
        assert each["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    return read


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_wheels(
        native(tmp_path_factory.mktemp("python")), tmp_path_factory.mktemp("wheels")
    )


def write(out: Path, wheels: Path) -> dict[str, Path]:
    """Write the archives of this machine's architecture; return them by program."""
    architecture = ARCHITECTURES[os.uname().machine]
    environment = {
        **internet_environment(),
        "OUT": str(out),
        "TAG": TAG,
        "PLATFORMS": f"linux/{architecture}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "KUBE_SCHEDULER": str(binary("kube-scheduler")),
    }
    for name in ("apt-get", "dpkg-deb"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not on this machine")
    mirror = os.environ.get("DEBIAN_MIRROR") or "http://deb.debian.org"
    try:
        urlopen(f"{mirror}/debian/dists/bookworm/Release", timeout=30).close()
    except OSError as error:
        pytest.skip(f"{mirror} cannot be reached: {error}")
    result = subprocess.run(
        [sys.executable, ARCHIVE, REGISTRY],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = {path.name.rpartition(f"-linux-{architecture}.tar")[0]: path for path in out.iterdir()}
    return {name.rpartition("-")[0]: path for name, path in found.items()}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> dict[str, Path]:
    return write(tmp_path_factory.mktemp("archives"), wheels)


def in_container(root: Path, image: Mapping[str, Any], *command: str) -> str:
    """Run a command as the image's user, with only the image's file system."""
    if os.getuid() != 0:
        pytest.skip("only root may change the root folder")
    result = subprocess.run(
        ["/usr/sbin/chroot", f"--userspec={image['config']['User']}", root, *command],
        env=dict(each.split("=", 1) for each in image["config"]["Env"]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_an_archive_is_an_image_layout_with_the_name_that_manifests_use(
    archives: dict[str, Path],
) -> None:
    assert archives.keys() == {"idlegpu-extender", "idlegpu-agent", "kube-scheduler"}
    for name, path in archives.items():
        read = layout(path)
        (descriptor,) = read.index["manifests"]
        tag = KUBERNETES_VERSION if name == "kube-scheduler" else TAG
        assert read.index["mediaType"] == f"{MEDIA}index.v1+json"
        assert descriptor["mediaType"] == read.manifest["mediaType"] == f"{MEDIA}manifest.v1+json"
        assert descriptor["annotations"]["io.containerd.image.name"] == f"{REGISTRY}/{name}:{tag}"
        assert descriptor["platform"] == {
            "os": "linux", "architecture": ARCHITECTURES[os.uname().machine],
        }  # fmt: skip
        assert read.manifest["config"]["mediaType"] == f"{MEDIA}config.v1+json"
        layers = read.manifest["layers"]
        assert {each["mediaType"] for each in layers} == {f"{MEDIA}layer.v1.tar+gzip"}
        assert read.image["rootfs"]["diff_ids"] == [
            f"sha256:{hashlib.sha256(gzip.decompress(read.blobs[each['digest']])).hexdigest()}"
            for each in layers
        ]


@pytest.mark.parametrize("program", ["extender", "agent"])
def test_an_image_has_the_settings_of_its_dockerfile(
    program: str, archives: dict[str, Path]
) -> None:
    last = stages(program)[-1]

    config = layout(archives[f"idlegpu-{program}"]).image["config"]

    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == json.loads(texts(last, "ENTRYPOINT")[0])
    assert set(texts(last, "ENV")[0].split()) < set(config["Env"])
    assert [*config["ExposedPorts"]] == [f"{port}/tcp" for port in texts(last, "EXPOSE")[0].split()]


@pytest.mark.parametrize("program", ["extender", "agent"])
def test_an_image_runs_by_itself(program: str, archives: dict[str, Path], tmp_path: Path) -> None:
    read = layout(archives[f"idlegpu-{program}"])
    root = read.unpack(tmp_path)

    version = in_container(root, read.image, *read.image["config"]["Entrypoint"], "--version")

    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert in_container(root, read.image, "python", "-c", IMPORTS) == "True"
    assert in_container(root, read.image, "python", "-c", WHAT_IS_LOADED) == "all"
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    set_id = [path for path in root.rglob("*") if path.lstat().st_mode & 0o6000]
    assert set_id == []


def test_the_second_schedulers_image_runs_by_itself(
    archives: dict[str, Path], tmp_path: Path
) -> None:
    read = layout(archives["kube-scheduler"])
    root = read.unpack(tmp_path)

    version = in_container(root, read.image, *read.image["config"]["Entrypoint"], "--version")

    assert version == f"Kubernetes {KUBERNETES_VERSION}"


def test_the_same_checkout_makes_the_same_archives(
    archives: dict[str, Path], wheels: Path, tmp_path: Path
) -> None:
    again = write(tmp_path, wheels)

    assert {name: path.read_bytes() for name, path in again.items()} == {
        name: path.read_bytes() for name, path in archives.items()
    }
