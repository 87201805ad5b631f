"""A real Prometheus that scrapes one simulated exporter as if it were one on each node."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary

EXPORTER_PORT: Final = 9400  # of the real dcgm-exporter; only in the label `instance`
JOB: Final = "dcgm-exporter"


class PrometheusServer:
    """Prometheus with one target for each node, all at the same exporter.

    The exporter is told which node is meant by the URL parameter `node`. Targets may change
    while it runs; the data survives a restart.

    Attributes:
        process: the server; kill and start it as a test needs.
        url: base URL of its API.
    """

    def __init__(
        self,
        folder: Path,
        exporter_url: str,
        *,
        interval_seconds: float = 1.0,
        name: str = "prometheus",
        tls: Mapping[str, str] | None = None,
    ) -> None:
        """Describe a Prometheus; `set_targets`, then `await process.start()`.

        Args:
            folder: where data and logs go.
            exporter_url: what to scrape, e.g. "http://127.0.0.1:9400/metrics".
            interval_seconds: time between two scrapes of a target.
            name: what its files are called.
            tls: as `tls_config` of targets whose label `__scheme__` is https.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._exporter_url = urlsplit(exporter_url)
        self._targets = folder / f"{name}.targets.json"
        self._besides: list[dict[str, object]] = []
        self._data = folder / name
        config = folder / f"{name}.config"
        config.write_text(json.dumps(self._config(interval_seconds, tls or {}), indent=2))
        self.set_targets(())
        command = [
            str(binary("prometheus")),
            f"--config.file={config}",
            f"--storage.tsdb.path={self._data}",
            "--storage.tsdb.retention.time=1d",
            f"--web.listen-address=127.0.0.1:{port}",
            "--scrape.discovery-reload-interval=100ms",  # not 5 s until new targets are scraped
        ]
        self.process = ServerProcess(
            name=name, command=command, folder=folder, ready_url=f"{self.url}/-/ready"
        )

    def set_targets(
        self, nodes: Iterable[str], labels: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        """Say which nodes have an exporter; a running Prometheus sees it within 5 s.

        Args:
            nodes: the nodes' names.
            labels: labels of a node's target, by node, on top of `instance`, or in its place.
        """
        targets = self._besides + [
            {
                "targets": [self._exporter_url.netloc],
                "labels": {
                    "__param_node": node,
                    "instance": f"{node}:{EXPORTER_PORT}",
                    **(labels or {}).get(node, {}),
                },
            }
            for node in nodes
        ]
        partial = self._targets.with_suffix(".partial")
        partial.write_text(json.dumps(targets, indent=2))
        partial.replace(self._targets)  # Prometheus must never read half a file

    def add_job(self, job: str, *addresses: str, **labels: str) -> None:
        """Have others than exporters scraped from the next `set_targets` on.

        Args:
            job: their label `job`.
            addresses: host:port of each; the path is the exporter's.
            **labels: further labels of theirs.
        """
        self._besides.append({"targets": list(addresses), "labels": {"job": job, **labels}})

    async def restart_empty(self) -> None:
        """Start it, again where it runs, without what it has stored.

        A Prometheus that was killed shows what it had scraped before for five minutes more: it
        could not note that these series have ended.
        """
        self.process.kill()
        shutil.rmtree(self._data, ignore_errors=True)
        await self.process.start()

    def _config(self, interval_seconds: float, tls: Mapping[str, str]) -> dict[str, object]:
        interval = f"{round(interval_seconds * 1000)}ms"
        return {
            "global": {"scrape_interval": interval, "scrape_timeout": interval},
            "scrape_configs": [
                {
                    "job_name": JOB,
                    "scheme": self._exporter_url.scheme,
                    "tls_config": tls,
                    "metrics_path": self._exporter_url.path or "/metrics",
                    "file_sd_configs": [{"files": [str(self._targets)], "refresh_interval": "1s"}],
                }
            ],
        }
