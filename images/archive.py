#!/usr/bin/env python3
"""Write the images as OCI archives, without docker, podman or root.

    images/archive.py REGISTRY

An image is Debian's Python, from packages whose signatures apt checks, and the tree and the
settings of its Dockerfile. The same checkout and packages give the same bytes. Needs Linux with
apt-get, dpkg-deb and the package debian-archive-keyring.

Variables of the environment:
    TAG             the images' tag; unless set, the version in pyproject.toml
    PLATFORMS       unless set, linux/amd64,linux/arm64
    OUT             the folder for the archives; unless set, build/images
    DEBIAN_MIRROR   unless set, http://deb.debian.org
    KUBE_SCHEDULER  a kube-scheduler program, of which an image is written as well
"""

import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = (
    *("base-files", "ca-certificates", "netbase", "tzdata", "media-types"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libbz2-1.0", "liblzma5", "libexpat1"),
    *("libcrypt1", "libffi8", "libssl3", "libsqlite3-0", "libuuid1"),
    *("libpython3.11-minimal", "libpython3.11-stdlib", "python3.11-minimal"),
)
"""Python 3.11 and what its modules and the wheels link with: no shell, no package manager."""
BUILD_PACKAGES: Final = ("python3-pip-whl",)
UNUSED: Final = ("usr/share/man", "usr/share/locale", "usr/share/lintian", "usr/share/bug")
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
TIME: Final = 1577836800
"""Time of every file, as in build.sh."""
CREATED: Final = "2020-01-01T00:00:00Z"
MEDIA: Final = "application/vnd.oci.image."
SEARCH_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Json = dict[str, Any]


def main() -> int:
    """Write the archives of all programs and platforms; return the exit status."""
    _, *registry = sys.argv
    if len(registry) != 1:
        return _fail("name your registry, such as registry.example.com/team", 2)
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if missing or not Path(KEYRING).exists():
        return _fail(f"not here: {' '.join(missing) or KEYRING}; build where docker or podman is")
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    tag = os.environ.get("TAG") or (version[1] if version else "")
    platforms = os.environ.get("PLATFORMS") or "linux/amd64,linux/arm64"
    out = Path(os.environ.get("OUT") or ROOT / "build" / "images").absolute()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix=".work-") as work:
            builder = Builder(Path(work), f"{registry[0].rstrip('/')}/", out)
            for architecture in (each.removeprefix("linux/") for each in platforms.split(",")):
                for program in ("extender", "agent"):
                    builder.write_program(program, architecture, tag)
            if os.environ.get("KUBE_SCHEDULER"):
                builder.write_scheduler(Path(os.environ["KUBE_SCHEDULER"]))
    except (BuildError, subprocess.CalledProcessError) as error:
        return _fail(str(error))
    return 0


def _fail(message: str, status: int = 1) -> int:
    sys.stderr.write(f"images/archive.py: {message}\n")
    return status


class BuildError(RuntimeError):
    """An image cannot be built; the message says why."""


class Builder:
    """Builds images in a work folder and writes their archives.

    Args:
        work: an empty folder.
        prefix: before the images' names.
        out: the folder for the archives.
    """

    def __init__(self, work: Path, prefix: str, out: Path) -> None:
        self._work = work
        self._prefix = prefix
        self._out = out
        self._machine = next(
            (name for name, machine in MACHINES.items() if machine == platform.machine()), ""
        )
        self._bases: dict[str, Path] = {}

    def write_program(self, program: str, architecture: str, tag: str) -> None:
        """Write the archive of extender or agent for an architecture, amd64 or arm64."""
        if architecture not in MACHINES:
            raise BuildError(f"PLATFORMS: linux/{architecture}: must be linux/amd64 or linux/arm64")
        base = self._base(architecture)
        tree = self._work / f"{program}-{architecture}"
        # pip takes its options from the environment, too.
        tags = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in range(36, 16, -1))]
        foreign = {
            "PIP_PLATFORM": " ".join(f"{each}_{MACHINES[architecture]}" for each in tags),
            "PIP_PYTHON_VERSION": "3.11",
        }
        environment = {
            **self._environment(),
            **(foreign if architecture != self._machine else {}),
            "INSTALLED": "/opt/idlegpu",
        }
        command = [str(ROOT / "images" / "build.sh"), program, str(tree)]
        subprocess.run(command, env=environment, check=True)
        layers = [
            (base, "", "Debian packages of Python 3.11"),
            (tree, "opt/idlegpu", f"images/build.sh {program} /opt/idlegpu"),
        ]
        self._write(f"idlegpu-{program}", tag, architecture, _config(program), layers)

    def write_scheduler(self, program: Path) -> None:
        """Write the archive of a kube-scheduler program, for this machine's architecture."""
        if b"/ld-linux" in program.read_bytes()[:8192]:
            raise BuildError(f"KUBE_SCHEDULER: {program} must be linked statically")
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        tree = self._work / "kube-scheduler"
        tree.mkdir()
        shutil.copy(program, tree / "kube-scheduler")
        (tree / "kube-scheduler").chmod(0o755)
        config = {"Entrypoint": ["kube-scheduler"], "Env": [SEARCH_PATH], "User": "65532:65532"}
        layers = [(tree, "usr/local/bin", "kube-scheduler")]
        self._write("kube-scheduler", answer.stdout.split()[-1], self._machine, config, layers)

    def _write(
        self,
        name: str,
        tag: str,
        architecture: str,
        config: Json,
        trees: list[tuple[Path, str, str]],
    ) -> None:
        """Write an archive; each tree is a layer: folder, path in the image, how it was made."""
        folder = self._work / "layout"
        (folder / "blobs" / "sha256").mkdir(parents=True)
        layers, diff_ids = [], []
        for tree, inside, _ in trees:
            layer, diff_id = _add_layer(folder, tree, inside)
            layers.append(layer)
            diff_ids.append(diff_id)
        image = {
            "architecture": architecture,
            "os": "linux",
            "created": CREATED,
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "history": [{"created": CREATED, "created_by": made} for _, _, made in trees],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{MEDIA}manifest.v1+json",
            "config": _add_json(folder, image, "config.v1+json"),
            "layers": layers,
        }
        descriptor = _add_json(folder, manifest, "manifest.v1+json")
        descriptor["platform"] = {"architecture": architecture, "os": "linux"}
        reference = f"{self._prefix}{name}:{tag}"
        descriptor["annotations"] = {
            "io.containerd.image.name": reference,  # from it `ctr images import` takes the name
            "org.opencontainers.image.ref.name": tag,
        }
        index = {
            "schemaVersion": 2,
            "mediaType": f"{MEDIA}index.v1+json",
            "manifests": [descriptor],
        }
        (folder / "index.json").write_text(json.dumps(index))
        (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
        path = self._out / f"{name}-{tag}-linux-{architecture}.tar"
        with path.open("wb") as file:
            _write_tar(file, folder, "")
        shutil.rmtree(folder)
        sys.stdout.write(f"wrote {path} ({reference})\n")

    def _environment(self) -> dict[str, str]:
        """Return variables with which Debian's Python of this machine runs pip and the compiler."""
        if not self._machine:
            raise BuildError(f"this machine must be of {' or '.join(MACHINES.values())}")
        root = self._base(self._machine)
        wrapper = self._work / "python"
        if not wrapper.exists():
            triple = f"{MACHINES[self._machine]}-linux-gnu"
            libraries = f"{root}/lib/{triple}:{root}/usr/lib/{triple}"
            (loader,) = (*root.glob("lib64/ld-linux-*"), *root.glob("lib/ld-linux-*"))
            wrapper.write_text(
                f'#!/bin/sh\nexec "{loader}" --library-path "{libraries}" '
                f'"{root}/usr/bin/python3.11" "$@"\n'
            )
            wrapper.chmod(0o755)
            self._fetch(self._machine, BUILD_PACKAGES, self._work / "pip")
        (pip,) = (self._work / "pip").glob("usr/share/python-wheels/pip-*.whl")
        return {
            **os.environ,
            "PYTHON": str(wrapper),
            "PYTHONPATH": str(pip),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
        }

    def _base(self, architecture: str) -> Path:
        """Return the folder with Debian's Python for an architecture."""
        if architecture in self._bases:
            return self._bases[architecture]
        folder = self._bases[architecture] = self._work / f"base-{architecture}"
        self._fetch(architecture, PACKAGES, folder)
        for name in UNUSED:
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("python", "python3"):
            (folder / "usr" / "bin" / name).unlink(missing_ok=True)
            (folder / "usr" / "bin" / name).symlink_to("python3.11")
        # The work of scripts in the packages, which only a container could run.
        etc = folder / "etc"
        authorities = sorted((folder / "usr/share/ca-certificates/mozilla").glob("*.crt"))
        (etc / "ssl" / "certs").mkdir(parents=True, exist_ok=True)
        bundle = b"".join(file.read_bytes() for file in authorities)
        (etc / "ssl" / "certs" / "ca-certificates.crt").write_bytes(bundle)
        (folder / "usr/lib/ssl").mkdir(exist_ok=True)
        (folder / "usr/lib/ssl/cert.pem").symlink_to("/etc/ssl/certs/ca-certificates.crt")
        (folder / "tmp").chmod(0o1777)
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
        users = "root:x:0:0:root:/root:/sbin/nologin\nidlegpu:x:65532:65532::/:/sbin/nologin\n"
        (etc / "passwd").write_text(users)
        (etc / "group").write_text("root:x:0:\nidlegpu:x:65532:\n")
        # The file system is read-only at run time.
        options = ["-m", "compileall", "-q", "-j", "1", "--invalidation-mode", "unchecked-hash"]
        library = folder / "usr/lib/python3.11"
        environment = {**self._environment(), "PYTHONHASHSEED": "0"}
        command = [environment["PYTHON"], *options, "-s", str(folder), "-p", "/", str(library)]
        subprocess.run(command, env=environment, check=True)
        return folder

    def _fetch(self, architecture: str, packages: tuple[str, ...], folder: Path) -> None:
        """Unpack Debian's packages for an architecture, with a record that scanners read."""
        state = self._work / f"apt-{architecture}"
        options = [
            f"APT::Architecture={architecture}",
            f"APT::Architectures={architecture}",
            "APT::Sandbox::User=",  # apt's own user may not read the work folder
            "Acquire::Languages=none",
            f"Dir::State={state}",
            f"Dir::State::status={state}/status",
            f"Dir::Cache={state}",
            f"Dir::Etc::sourcelist={state}/sources.list",
            "Dir::Etc::sourceparts=-",
        ]
        apt = ["apt-get", "--quiet=2", *(word for each in options for word in ("--option", each))]
        if not state.exists():
            (state / "lists" / "partial").mkdir(parents=True)
            (state / "status").touch()
            mirror = os.environ.get("DEBIAN_MIRROR") or "http://deb.debian.org"
            source = f"deb [signed-by={KEYRING}] {mirror}/debian"
            (state / "sources.list").write_text(
                f"{source} bookworm main\n{source} bookworm-updates main\n"
                f"{source}-security bookworm-security main\n"
            )
            subprocess.run([*apt, "update"], check=True)
        unpack = shutil.which("dpkg-deb") or "dpkg-deb"
        with tempfile.TemporaryDirectory(dir=self._work) as archives:
            subprocess.run([*apt, "download", *packages], cwd=archives, check=True)
            records = folder / "var/lib/dpkg/status.d"
            records.mkdir(parents=True)
            for archive in sorted(Path(archives).glob("*.deb")):
                subprocess.run([unpack, "--extract", archive, folder], check=True)
                record = subprocess.run([unpack, "-f", archive], capture_output=True, check=True)
                (records / archive.name.partition("_")[0]).write_bytes(record.stdout)


def _config(program: str) -> Json:
    """Return the settings of the last stage of a program's Dockerfile."""
    text = (ROOT / "images" / f"{program}.Dockerfile").read_text()
    last = text[text.rindex("\nFROM ") :]
    found = dict(re.findall(r"^(ENV|USER|WORKDIR|EXPOSE|ENTRYPOINT) (.*)$", last, re.MULTILINE))
    return {
        "Env": [SEARCH_PATH, *found["ENV"].split()],
        "User": found["USER"],
        "WorkingDir": found["WORKDIR"],
        "ExposedPorts": {f"{port}/tcp": {} for port in found["EXPOSE"].split()},
        "Entrypoint": json.loads(found["ENTRYPOINT"]),
    }


def _add_json(folder: Path, content: Json, kind: str) -> Json:
    """Add a document to a layout; return its descriptor."""
    data = json.dumps(content).encode()
    digest = hashlib.sha256(data).hexdigest()
    (folder / "blobs" / "sha256" / digest).write_bytes(data)
    return {"mediaType": MEDIA + kind, "digest": f"sha256:{digest}", "size": len(data)}


def _add_layer(folder: Path, tree: Path, inside: str) -> tuple[Json, str]:
    """Add a tree to a layout as a layer; return its descriptor and the digest of the tar in it."""
    path = folder / "layer"
    with path.open("wb") as file:
        packed = _Hashing(file)
        with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped:
            plain = _Hashing(zipped)
            _write_tar(plain, tree, inside)
    size = path.stat().st_size
    path.rename(folder / "blobs" / "sha256" / packed.digest)
    descriptor = {
        "mediaType": f"{MEDIA}layer.v1.tar+gzip",
        "digest": f"sha256:{packed.digest}",
        "size": size,
    }
    return descriptor, f"sha256:{plain.digest}"


class _Hashing:
    """Passes on what is written, and hashes it."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Hash and pass on."""
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Pass on."""
        self._file.flush()

    @property
    def digest(self) -> str:
        """The digest of all that was written."""
        return self._hash.hexdigest()


def _write_tar(file: Any, tree: Path, inside: str) -> None:  # noqa: ANN401 - has write() alone
    """Write a tree as a tar that depends on names, modes and contents only."""
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for parent in sorted(Path(inside, "x").parents)[1:]:
            tar.addfile(_entry(tarfile.TarInfo(f"{parent}/"), tarfile.DIRTYPE, 0o755))
        for path in sorted(_walk(tree)):
            member = tarfile.TarInfo(str(Path(inside, path.relative_to(tree))))
            mode = path.lstat().st_mode & 0o1777  # no program takes another user
            if path.is_symlink():
                member.linkname = str(path.readlink())
                tar.addfile(_entry(member, tarfile.SYMTYPE, 0o777))
            elif path.is_dir():
                tar.addfile(_entry(member, tarfile.DIRTYPE, mode))
            else:
                member.size = path.stat().st_size
                with path.open("rb") as content:
                    tar.addfile(_entry(member, tarfile.REGTYPE, mode), content)


def _entry(member: tarfile.TarInfo, kind: bytes, mode: int) -> tarfile.TarInfo:
    member.type, member.mode, member.mtime = kind, mode, TIME
    return member


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


if __name__ == "__main__":
    sys.exit(main())
