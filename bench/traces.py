"""Pods and loads of public traces, for the simulations; `data/README.md` names their sources."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

DATA: Final = Path(__file__).parent / "data"
DAY_SECONDS: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPods:
    """Pods of a trace in the order of arrival.

    Attributes:
        created: creation in seconds since the start of the trace.
        ran: run time in seconds, from scheduling to the end.
        gpus: number of requested GPUs.
        shape: number that pods with equal requests share.
        is_serving: whether its class is latency-sensitive.
    """

    created: Floats
    ran: Floats
    gpus: Ints
    shape: Ints
    is_serving: npt.NDArray[np.bool_]

    def only(self, kept: npt.NDArray[np.bool_]) -> "TracedPods":
        """Return the selected pods."""
        return TracedPods(
            created=self.created[kept],
            ran=self.ran[kept],
            gpus=self.gpus[kept],
            shape=self.shape[kept],
            is_serving=self.is_serving[kept],
        )


def openb_pods() -> TracedPods:
    """Return the GPU pods of Alibaba's trace."""
    columns = _columns("openb_gpu_pods.csv")
    return TracedPods(
        created=columns["created_seconds"],
        ran=columns["ran_seconds"],
        gpus=columns["gpus"].astype(np.intp),
        shape=columns["shape"].astype(np.intp),
        is_serving=columns["is_serving"] > 0,
    )


def openb_requests() -> tuple[Ints, Ints, Ints]:
    """Return the requests of pods by shape: millicores, MiB of memory, thousandths of a GPU."""
    columns = _columns("openb_requests.csv")
    millicores, memory, share = (
        columns[name].astype(np.intp) for name in ("cpu_milli", "memory_mib", "gpu_milli")
    )
    return millicores, memory, share


def acme_quantiles() -> tuple[Floats, Floats]:
    """Return utilization and used framebuffer as ratios, at each percentile of all samples."""
    columns = _columns("acme_quantiles.csv")
    return columns["gpu_util_percent"] / 100, columns["framebuffer_percent_of_80_gb"] / 100


def _columns(name: str) -> dict[str, Floats]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file)
    values = np.array(rows, dtype=np.float64)
    return {name: values[:, at] for at, name in enumerate(names)}
