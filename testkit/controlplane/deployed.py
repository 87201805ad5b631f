"""Deployed parts: the extender with its rights, and a kube-scheduler that calls it.

The rights come from manifests/ and the scheduler's configuration from scheduler-config/, so that
tests cover the shipped files.
"""

import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
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
REQUEST_TIMEOUT_SECONDS: Final = 30.0
TLS_FILES: Final = ("caFile", "certFile", "keyFile")


async def grant_rights(plane: ControlPlane) -> None:
    """Bind the manifests' rights to the extender's service account, with the real kubectl."""
    await plane.kubectl("apply", "-k", str(RIGHTS))


@cache
def _shipped(file: Path) -> Object:
    """Parse a configuration file once: PyYAML is slow, and each scenario needs it."""
    config: Object = yaml.safe_load(file.read_text())
    return config


def scheduler_config(
    extender_url: str,
    changes: Mapping[str, object] | None = None,
    *,
    file: Path = SCHEDULER_CONFIG,
    certificates: Path | None = None,
) -> Object:
    """Return a shipped KubeSchedulerConfiguration with the extender at another address.

    Args:
        extender_url: base URL of the webhooks.
        changes: fields of the extender's entry to change, e.g. `{"ignorable": False}`.
        file: shipped configuration file.
        certificates: folder with kube-scheduler's certificate and CA; None for plain HTTP.
    """
    config = deepcopy(_shipped(file))
    (shipped,) = config["extenders"]
    if certificates is None:
        del shipped["enableHTTPS"], shipped["tlsConfig"]
    else:
        tls = shipped["tlsConfig"]
        tls |= {name: str(certificates / Path(tls[name]).name) for name in TLS_FILES}
    config["extenders"] = [{**shipped, "urlPrefix": extender_url, **(changes or {})}]
    return config


def merged(base: Mapping[str, object], over: Mapping[str, object]) -> Object:
    """Merge settings section by section.

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
class RunOptions:
    """Options for running an extender, independent of a test's settings.

    Attributes:
        kubeconfig: kubeconfig of the extender's user.
        settings: defaults of the settings file, which a test's settings override. With a
            `status_listen` the API has its own port; with `tls` both ports serve TLS; with `peers`
            the extender is its own peer unless other peers are named. A variable sets plain HTTP
            for its API, as the component does.
        command: program and arguments, without the settings file.
        environment: environment variables.
        token: bearer token for its API, "" if the API needs none.
    """

    kubeconfig: Path
    settings: Mapping[str, object] = field(default_factory=dict)
    command: Sequence[str] = (sys.executable, "-m", "extender", "--config")
    environment: Mapping[str, str] = field(default_factory=dict)
    token: str = ""


class ExtenderServer:
    """Process of an extender: `python -m extender --config FILE`.

    Attributes:
        url: base URL of its API; the same after a restart.
        webhooks: base URL of its webhooks; the same after a restart.
        settings: settings that were written last.
        config: settings file.
        process: process, which tests may kill and start.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        name: str = "extender",
        options: RunOptions | None = None,
        folder: Path | None = None,
    ) -> None:
        """Describe an extender; `ensure` starts it with settings.

        Args:
            plane: running control plane.
            name: base name of its files.
            options: options for running it; by default as user `EXTENDER` and on plain HTTP.
            folder: folder of its files; by default the control plane's.
        """
        folder = folder or plane.folder
        options = options or RunOptions(kubeconfig=plane.kubeconfig(EXTENDER))
        listen = status = f"127.0.0.1:{free_port()}"
        own = {"listen": listen, "kubeconfig": str(options.kubeconfig)}
        # By default a test waits neither for a Service nor for later agents.
        usual: Object = {"drain_seconds": 0, "ready": {"wait_seconds": 2}, **options.settings}
        if "status_listen" in usual:
            status = own["status_listen"] = f"127.0.0.1:{free_port()}"
        if "peers" in usual:
            usual["peers"] = {"addresses": [listen]}  # no Service has it as an endpoint
        # The replicas in this folder share a secret, for requests without certificates.
        self._peers_secret = plane.folder / "peers-secret"
        self._peers_secret.write_text("known to all replicas")
        self._ca_file = usual.get("tls", {}).get("client_ca_file", "")
        is_plain = not self._ca_file or "IDLEGPU_API_ALLOW_PLAIN" in options.environment
        self.url = f"{'http' if is_plain else 'https'}://{status}"
        self.webhooks = f"{'https' if self._ca_file else 'http'}://{listen}"
        self.settings: Object = {}
        self._usual, self._own = usual, own
        self._headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
        self.config = folder / f"{name}.yaml"
        self.process = ServerProcess(
            name=name,
            command=[*options.command, str(self.config)],
            folder=folder,
            ready_url=f"{self.url}/readyz",
            environment={
                # Ignore the developer's own environment variables for an extender.
                **{variable: "" for variable in os.environ if variable.startswith("IDLEGPU_")},
                **options.environment,
                "PYTHONPATH": str(ROOT),
            },
        )

    async def ensure(self, settings: Object) -> None:
        """Make it run with these settings; restart it only if it cannot reload them.

        Args:
            settings: content of the settings file; addresses and paths are added here.

        Raises:
            ProcessError: it did not start.
        """
        if self.process.is_running:
            if settings == self.settings or await self._take_over(settings):
                return
            await self.process.stop()
        self.write(settings)
        await self.process.start()

    async def _take_over(self, settings: Object) -> bool:
        """Write new settings and wait until they are loaded; return whether all are in force."""
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
        """Write settings to its file; a running extender reloads them."""
        self.settings = settings
        found = {**merged(self._usual, settings), **self._own}
        if "peers" in found:
            found["peers"] = {"secret_file": str(self._peers_secret), **found["peers"]}
        text = yaml.safe_dump(found)
        self.config.write_text(text)

    @property
    def trust(self) -> ssl.SSLContext | bool:
        """Return aiohttp's `ssl` argument: the current CA, without a check of the host name."""
        if not self._ca_file:
            return True
        context = ssl.create_default_context(cafile=self._ca_file)
        context.check_hostname = False
        return context

    def session(self, **options: Any) -> aiohttp.ClientSession:
        """Open a session with its API as base URL, with aiohttp's options."""
        return aiohttp.ClientSession(
            self.url, connector=aiohttp.TCPConnector(ssl=self.trust), **options
        )

    async def get(self, path: str, parameters: Mapping[str, str] | None = None) -> Object:
        """Send a GET to its API, e.g. for "/v1/gpus".

        Raises:
            aiohttp.ClientError: it does not answer, or the status is not 200.
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
