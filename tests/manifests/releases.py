"""Release of the chart on a real API server, and the objects that it leaves."""

import asyncio
import shlex
from functools import partial
from pathlib import Path
from typing import Final

from testkit.controlplane.client import ApiClient, ApiError
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.shipped import ROOT, address_of, find
from tests.manifests.chart import CHART, RELEASE, Values, helm, rendered, values_file

OURS: Final = "idlegpu"


def guide() -> str:
    """Return the content of docs/install.md."""
    return (ROOT / "docs" / "install.md").read_text()


def guides_commands(heading: str) -> list[list[str]]:
    """Return the words of the first commands below a heading of docs/install.md.

    Raises:
        ValueError: the heading has no commands.
    """
    _, _, below = guide().partition(f"\n{heading}\n")
    block = below.split("```\n")[1]
    commands = [shlex.split(line) for line in block.splitlines()]
    if not commands or any(words[0] != "kubectl" for words in commands):
        raise ValueError(f"no commands below {heading}")
    return commands


class Release:
    """Release of the chart on one API server."""

    def __init__(self, plane: ControlPlane, admin: ApiClient, folder: Path) -> None:
        self.plane = plane
        self.admin = admin
        self.folder = folder

    async def helm(self, *arguments: str) -> str:
        """Run helm against the API server, and return its output."""
        kubeconfig = self.plane.kubeconfig()
        run = partial(helm, *arguments, folder=self.folder, kubeconfig=kubeconfig)
        return await asyncio.to_thread(run)

    async def apply(self, verb: str, values: Values) -> str:
        """Install or upgrade with values; return the notes."""
        path = str(values_file(self.folder, values))
        return await self.helm(verb, RELEASE, str(CHART), "--values", path)

    async def get(self, item: Object) -> Object | None:
        """Return an object from the API server, None if it does not exist."""
        try:
            return await self.admin.request("GET", address_of(item))
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def spec(self, kind: str, name: str) -> Object:
        """Return the spec of one of the chart's objects."""
        item = await self.get(find(rendered({}, self.folder), kind, name))
        assert item is not None
        spec: Object = item["spec"]
        return spec

    async def left(self) -> list[str]:
        """Return the names of all of idlegpu's objects, of every kind that can be listed."""
        everywhere = await self._names(await self._kinds(), "-A")
        namespaced = await self._kinds("--namespaced=true")
        inside = [await self._names(namespaced, "-n", each) for each in (OURS, f"{OURS}-agent")]
        return [*(name for name in everywhere if OURS in name), *inside[0], *inside[1]]

    async def _kinds(self, *choice: str) -> list[str]:
        kinds = await self.plane.kubectl("api-resources", "--verbs=list", "-o", "name", *choice)
        # Events describe the past, and expire.
        return [kind for kind in kinds.split() if not kind.startswith("events")]

    async def _names(self, kinds: list[str], *where: str) -> list[str]:
        return (await self.plane.kubectl("get", ",".join(kinds), *where, "-o", "name")).split()
