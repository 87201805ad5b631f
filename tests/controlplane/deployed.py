"""What a user deploys: the extender with its rights, and a kube-scheduler configured to ask it.

The rights are those of manifests/, the scheduler's configuration is that of scheduler-config/:
what is shipped is what is tested.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import aiohttp
import yaml

from tests.controlplane.objects import Object
from tests.controlplane.plane import EXTENDER, ControlPlane
from tests.controlplane.process import ServerProcess, free_port

ROOT: Final = Path(__file__).parents[2]
RIGHTS: Final = ROOT / "manifests" / "rbac"
SCHEDULER_CONFIG: Final = ROOT / "scheduler-config" / "kube-scheduler.yaml"
REQUEST_TIMEOUT_SECONDS: Final = 10.0


async def grant_rights(plane: ControlPlane) -> None:
    """Give the extender's service account what the manifests give it, with the real kubectl."""
    await plane.kubectl("apply", "-k", str(RIGHTS))


def scheduler_config(extender_url: str, changes: Mapping[str, object] | None = None) -> Object:
    """Return the shipped KubeSchedulerConfiguration, for an extender at another address.

    Args:
        extender_url: base URL of the webhooks.
        changes: fields of the extender's entry to change, e.g. `{"ignorable": False}`.
    """
    config: Object = yaml.safe_load(SCHEDULER_CONFIG.read_text())
    (shipped,) = config["extenders"]
    if not extender_url.startswith("https:"):
        del shipped["enableHTTPS"], shipped["tlsConfig"]
    config["extenders"] = [{**shipped, "urlPrefix": extender_url, **(changes or {})}]
    return config


class ExtenderServer:
    """The extender as a process of its own: `python -m extender --config FILE`.

    Attributes:
        url: base URL of webhooks and API; the same over all starts.
        settings: those of the last start.
        process: the server; kill and start it as a test needs.
    """

    def __init__(self, plane: ControlPlane, *, name: str = "extender") -> None:
        """Describe an extender; `start` it with settings.

        Args:
            plane: a control plane that runs, whose user `EXTENDER` it is.
            name: what its files are called.
        """
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self.settings: Object = {}
        self._own = {"listen": address, "kubeconfig": str(plane.kubeconfig(EXTENDER))}
        self._config = plane.folder / f"{name}.yaml"
        self.process = ServerProcess(
            name=name,
            command=[sys.executable, "-m", "extender", "--config", str(self._config)],
            folder=plane.folder,
            ready_url=f"{self.url}/readyz",
            environment={
                # What the developer has set for an extender is not meant for this one.
                **{variable: "" for variable in os.environ if variable.startswith("IDLEGPU_")},
                "PYTHONPATH": str(ROOT),
            },
        )

    async def ensure(self, settings: Object) -> None:
        """Have it run with these settings; it is started anew only where it does not yet.

        Args:
            settings: as in the settings file; address and kubeconfig are set here.

        Raises:
            ProcessError: it did not come up.
        """
        if self.process.is_running and settings == self.settings:
            return
        await self.process.stop()
        self.settings = settings
        self._config.write_text(yaml.safe_dump({**settings, **self._own}))
        await self.process.start()

    async def get(self, path: str, parameters: Mapping[str, str] | None = None) -> Object:
        """Ask its API, e.g. for "/v1/gpus".

        Raises:
            aiohttp.ClientError: it does not answer, or not with 200.
        """
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
        async with (
            aiohttp.ClientSession(self.url, timeout=timeout, raise_for_status=True) as session,
            session.get(path, params=parameters) as response,
        ):
            answer: Object = await response.json()
            return answer
