"""Real Prometheus that scrapes pages of a test, with several sets of labels."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary

INTERVAL = "3s"
"""Interval and timeout of scrapes; with 1 s, scrapes on a busy machine time out."""


class Pages:
    """Exporter for each page; a page that is None answers 500."""

    def __init__(self) -> None:
        self.text: dict[str, str | None] = {}
        pages = self.text

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = pages.get(self.path.strip("/"))
                self.send_response(500 if text is None else 200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write((text or "").encode())

            @override
            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass(frozen=True, kw_only=True)
class Job:
    """Scrape configuration of one exporter.

    Attributes:
        page: name of the exporter's page.
        honor_labels: whether its labels override the target's.
        labels: labels of the target.
    """

    page: str
    honor_labels: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


def prometheus_process(folder: Path, address: str, jobs: Mapping[str, Job]) -> ServerProcess:
    """Describe the process of a Prometheus; `ready_url` has its base URL."""
    port = free_port()
    config = {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL},
        "scrape_configs": [
            {
                "job_name": name,
                "honor_labels": job.honor_labels,
                "metrics_path": f"/{job.page}",
                "static_configs": [{"targets": [address], "labels": dict(job.labels)}],
            }
            for name, job in jobs.items()
        ],
    }
    path = folder / "prometheus.config"
    path.write_text(json.dumps(config))
    return ServerProcess(
        name="prometheus",
        folder=folder,
        ready_url=f"http://127.0.0.1:{port}/-/ready",
        command=[
            str(binary("prometheus")),
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    )
