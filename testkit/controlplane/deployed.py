"""What a user deploys: the extender with its rights, and a kube-scheduler configured to ask it.

The rights are those of manifests/, the scheduler's configuration is that of scheduler-config/:
what is shipped is what is tested.
"""

import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from testkit.controlplane.objects import Object
from testkit.controlplane.plane import EXTENDER, ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.waiting import wait_for

ROOT: Final = Path(__file__).parents[2]
RIGHTS: Final = ROOT / "manifests" / "rbac"
SCHEDULER_CONFIG: Final = ROOT / "scheduler-config" / "kube-scheduler.yaml"
REQUEST_TIMEOUT_SECONDS: Final = 10.0
TLS_FILES: Final = ("caFile", "certFile", "keyFile")


async def grant_rights(plane: ControlPlane) -> None:
    """Give the extender's service account what the manifests give it, with the real kubectl."""
    await plane.kubectl("apply", "-k", str(RIGHTS))


def scheduler_config(
    extender_url: str,
    changes: Mapping[str, object] | None = None,
    *,
    file: Path = SCHEDULER_CONFIG,
    certificates: Path | None = None,
) -> Object:
    """Return a shipped KubeSchedulerConfiguration, for an extender at another address.

    Args:
        extender_url: base URL of the webhooks.
        changes: fields of the extender's entry to change, e.g. `{"ignorable": False}`.
        file: which of the shipped ones.
        certificates: folder of what kube-scheduler shows and trusts; None for plain HTTP.
    """
    config: Object = yaml.safe_load(file.read_text())
    (shipped,) = config["extenders"]
    if certificates is None:
        del shipped["enableHTTPS"], shipped["tlsConfig"]
    else:
        tls = shipped["tlsConfig"]
        tls |= {name: str(certificates / Path(tls[name]).name) for name in TLS_FILES}
    config["extenders"] = [{**shipped, "urlPrefix": extender_url, **(changes or {})}]
    return config


def merged(base: Mapping[str, object], over: Mapping[str, object]) -> Object:
    """Merge settings, section by section.

    Example:
        >>> merged({"wake": {"enabled": True}}, {"wake": {"target": "pod"}})
        {'wake': {'enabled': True, 'target': 'pod'}}
    """
    result: Object = dict(base)
    for name, value in over.items():
        known = result.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            result[name] = merged(known, value)
        else:
            result[name] = value
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How an extender is run, with any settings.

    Attributes:
        kubeconfig: who it is to the API server.
        settings: as in the settings file, where nothing else is asked for. With a `status_listen`
            its API has a port of its own, with `tls` both are served over TLS, and with `peers` it
            has itself as one unless others are named. A variable has its API in plain HTTP, as the
            component does.
        command: program and arguments, but for the settings file.
        environment: variables of its own.
        token: opens its API, "" where that is open.
    """

    kubeconfig: Path
    settings: Mapping[str, object] = field(default_factory=dict)
    command: Sequence[str] = (sys.executable, "-m", "extender", "--config")
    environment: Mapping[str, str] = field(default_factory=dict)
    token: str = ""


class ExtenderServer:
    """The extender as a process of its own: `python -m extender --config FILE`.

    Attributes:
        url: base URL of its API; the same over all starts.
        webhooks: base URL of its webhooks, likewise.
        settings: those that it was last told.
        config: its settings file.
        process: the server; kill and start it as a test needs.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        name: str = "extender",
        manner: Manner | None = None,
        folder: Path | None = None,
    ) -> None:
        """Describe an extender; `ensure` that it runs, with settings.

        Args:
            plane: a control plane that runs.
            name: what its files are called.
            manner: how it is run; as user `EXTENDER` and on plain HTTP, unless given.
            folder: where its files go; the control plane's, unless given.
        """
        folder = folder or plane.folder
        manner = manner or Manner(kubeconfig=plane.kubeconfig(EXTENDER))
        listen = status = f"127.0.0.1:{free_port()}"
        own = {"listen": listen, "kubeconfig": str(manner.kubeconfig)}
        # No test waits for a Service or for later agents unless it says so.
        usual: Object = {"drain_seconds": 0, "ready": {"wait_seconds": 2}, **manner.settings}
        if "status_listen" in usual:
            status = own["status_listen"] = f"127.0.0.1:{free_port()}"
        if "peers" in usual:
            usual["peers"] = {"addresses": [listen]}  # no Service leads to it
        # One for all that are named beside each other, where it is by no certificate.
        self._peers_secret = plane.folder / "peers-secret"
        self._peers_secret.write_text("known to all replicas")
        self._ca_file = usual.get("tls", {}).get("client_ca_file", "")
        is_plain = not self._ca_file or "IDLEGPU_API_ALLOW_PLAIN" in manner.environment
        self.url = f"{'http' if is_plain else 'https'}://{status}"
        self.webhooks = f"{'https' if self._ca_file else 'http'}://{listen}"
        self.settings: Object = {}
        self._usual, self._own = usual, own
        self._headers = {"Authorization": f"Bearer {manner.token}"} if manner.token else {}
        self.config = folder / f"{name}.yaml"
        self.process = ServerProcess(
            name=name,
            command=[*manner.command, str(self.config)],
            folder=folder,
            ready_url=f"{self.url}/readyz",
            environment={
                # What the developer has set for an extender is not meant for this one.
                **{variable: "" for variable in os.environ if variable.startswith("IDLEGPU_")},
                **manner.environment,
                "PYTHONPATH": str(ROOT),
            },
        )

    async def ensure(self, settings: Object) -> None:
        """Have it run with these settings; it is restarted only where it cannot load them.

        Args:
            settings: as in the settings file; what is the extender's own is set here.

        Raises:
            ProcessError: it did not come up.
        """
        if self.process.is_running:
            if settings == self.settings or await self._take_over(settings):
                return
            await self.process.stop()
        self.write(settings)
        await self.process.start()

    async def _take_over(self, settings: Object) -> bool:
        """Write other settings and wait until it has loaded them; say whether all are in force."""
        loaded = await self._metric("idlegpu_settings_loaded_timestamp_seconds")
        self.write(settings)

        async def is_loaded() -> bool:
            return await self._metric("idlegpu_settings_loaded_timestamp_seconds") > loaded

        await wait_for(is_loaded, f"{self.config} is loaded")
        return not await self._metric("idlegpu_settings_restart_needed")

    async def _metric(self, name: str) -> float:
        async with (
            self.session(headers=self._headers, raise_for_status=True) as session,
            session.get("/metrics") as response,
        ):
            text = await response.text()
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
        return float(line.split()[1])

    def write(self, settings: Object) -> None:
        """Write these settings into its file: where it runs, it follows them by itself."""
        self.settings = settings
        found = {**merged(self._usual, settings), **self._own}
        if "peers" in found:
            found["peers"] = {"secret_file": str(self._peers_secret), **found["peers"]}
        text = yaml.safe_dump(found)
        self.config.write_text(text)

    @property
    def trust(self) -> ssl.SSLContext | bool:
        """What aiohttp is to check of its certificate: the CA, by now, as it has no name here."""
        if not self._ca_file:
            return True
        context = ssl.create_default_context(cafile=self._ca_file)
        context.check_hostname = False
        return context

    def session(self, **options: Any) -> aiohttp.ClientSession:
        """Open a session at its API's address, with aiohttp's options."""
        return aiohttp.ClientSession(
            self.url, connector=aiohttp.TCPConnector(ssl=self.trust), **options
        )

    async def get(self, path: str, parameters: Mapping[str, str] | None = None) -> Object:
        """Ask its API, e.g. for "/v1/gpus".

        Raises:
            aiohttp.ClientError: it does not answer, or not with 200.
        """
        async with (
            self.session(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS),
                raise_for_status=True,
            ) as session,
            session.get(path, params=parameters) as response,
        ):
            answer: Object = await response.json()
            return answer
