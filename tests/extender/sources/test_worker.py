"""The worker receives the validated settings, without the libraries that validate them."""

import subprocess
import sys
from pathlib import Path

from extender.settings.sources import Prometheus
from extender.sources.prometheus.process import _serialize_settings
from extender.sources.prometheus.worker import _read_settings

FULL = Prometheus.model_validate(
    {
        "url": "http://prometheus:9090",
        "bearer_token_file": "/run/token",
        "ca_file": "/run/ca.crt",
        "headers": {"X-Scope-OrgID": "a"},
        "metrics": {
            "my_util": {"signal": "gpu_utilization_ratio", "unit": "percent"},
            "DCGM_FI_DEV_GPU_UTIL": None,
        },
    }
)


def test_settings_arrive_unchanged() -> None:
    arrived = _read_settings(_serialize_settings(FULL))

    for name in Prometheus.model_fields.keys() - {"metrics", "node_labels"}:
        assert getattr(arrived, name) == getattr(FULL, name), name
    assert tuple(arrived.node_labels) == FULL.node_labels
    assert isinstance(arrived.bearer_token_file, Path)
    row = arrived.metrics["my_util"]
    assert row is not None
    assert (row.signal, row.unit) == ("gpu_utilization_ratio", "percent")
    assert arrived.metrics["DCGM_FI_DEV_GPU_UTIL"] is None


def test_the_worker_does_not_import_large_libraries() -> None:
    code = (
        "import sys, extender.sources.prometheus.worker as worker;"
        "print(*{'pydantic', 'aiohttp', 'kubernetes_asyncio', 'pandas'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == ""
