"""Command lines `idlegpu` and `kubectl idlegpu` as a user runs them, for a scenario's cluster."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.controlplane.plane import ADMIN
from testkit.controlplane.tools import binary
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World


@dataclass(frozen=True, slots=True)
class Done:
    """Result of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CommandLine:
    """Runner of `idlegpu` in a separate process.

    Args:
        program: program and its first arguments.
        **environment: environment variables besides those of this process.
    """

    def __init__(
        self, program: Sequence[str] = (sys.executable, "-m", "extender.cli"), **environment: str
    ) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith("IDLEGPU_")}
        self._environment = {**own, **environment}
        self._program = program

    @property
    def path(self) -> str:
        """Value of PATH."""
        return self._environment["PATH"]

    def with_program(self, *program: str) -> "CommandLine":
        """Return a runner of another program with the same environment."""
        return CommandLine(program, **self._environment)

    async def __call__(self, *arguments: str, status: int = 0) -> Done:
        """Run a command and check its exit status."""
        done = await self.run(*arguments)
        assert done.status == status, f"{arguments}: {done}"
        return done

    async def run(self, *arguments: str) -> Done:
        """Run a command without checking its exit status."""
        process = await asyncio.create_subprocess_exec(
            *self._program, *arguments,
            env=self._environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        return Done(process.returncode or 0, out.decode(), err.decode())

    async def until(self, words: str, *arguments: str) -> Done:
        """Run a command repeatedly until its output contains these words."""
        last = Done(0, "", "")

        async def is_shown() -> bool:
            nonlocal last
            last = await self(*arguments)
            return words in last.out

        try:
            await wait_for(is_shown, f"{arguments} shows {words!r}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {last}") from error
        return last


def by_url(world: World) -> CommandLine:
    certificates = world.services.setup.certificates
    return by_proxy(
        world,
        IDLEGPU_URL=world.services.extender.url,
        IDLEGPU_CA_FILE=str(certificates / "extender" / "ca.crt") if certificates else "",
    )


def by_proxy(world: World, user: str = ADMIN, **environment: str) -> CommandLine:
    services = world.services
    return CommandLine(
        KUBECONFIG=str(services.plane.kubeconfig(user)),
        IDLEGPU_TOKEN=services.setup.token,
        **environment,
    )


def by_kubectl(world: World) -> CommandLine:
    """Return a runner of `kubectl idlegpu`: the real kubectl, which finds the script on PATH."""
    services, kubectl = world.services, binary("kubectl")
    return CommandLine(
        (str(kubectl), "idlegpu"),
        KUBECONFIG=str(services.plane.kubeconfig()),
        IDLEGPU_TOKEN=services.setup.token,
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    )
