"""Real Prometheus that scrapes one simulated exporter as if each node had one."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary

EXPORTER_PORT: Final = 9400  # port of the real dcgm-exporter; only in the label `instance`
JOB: Final = "dcgm-exporter"


class PrometheusServer:
    """Prometheus with one target for each node, all at the same exporter.

    The URL parameter `node` selects the node at the exporter. Targets may change while it runs; the
    data survives a restart.

    Attributes:
        process: process, which tests may kill and start.
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
        """Describe a Prometheus; call `set_targets`, then `await process.start()`.

        Args:
            folder: folder of data and logs.
            exporter_url: URL to scrape, e.g. "http://127.0.0.1:9400/metrics".
            interval_seconds: time between two scrapes of a target.
            name: base name of its files.
            tls: `tls_config` of targets whose label `__scheme__` is https.
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
            # otherwise new targets are scraped only after 5 s
            "--scrape.discovery-reload-interval=100ms",
        ]
        self.process = ServerProcess(
            name=name, command=command, folder=folder, ready_url=f"{self.url}/-/ready"
        )

    def set_targets(
        self, nodes: Iterable[str], labels: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        """Set the nodes with an exporter; a running Prometheus reads them within 5 s.

        Args:
            nodes: names of the nodes.
            labels: labels of each node's target, which add to or replace `instance`.
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
        partial.replace(self._targets)  # rename, so that Prometheus never reads a partial file

    def add_job(self, job: str, *addresses: str, **labels: str) -> None:
        """Add a scrape job for other targets, from the next `set_targets` on.

        Args:
            job: value of the label `job`.
            addresses: host:port of each target; the path is the exporter's.
            **labels: further labels of the targets.
        """
        self._besides.append({"targets": list(addresses), "labels": {"job": job, **labels}})

    async def restart_empty(self) -> None:
        """Start or restart it without stored data.

        A Prometheus that was killed returns its old samples for five more minutes, because it wrote
        no staleness markers.
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
